"""Exports encoders to ONNX, in the layout of `SentenceTransformer(DIR, backend="onnx")`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from soft_trainer.encoders.encoding import Encoder, prompt_length
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.onnx import (
    FLOAT_FILE,
    FOLDER,
    INT8_FILE,
    NEEDS_EXTRA,
    PROBES,
    SETTINGS,
    TOKENIZER,
    OnnxEncoder,
    has_onnxruntime,
)
from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.static_torch import is_static
from soft_trainer.errors import UserError
from soft_trainer.files import ADAPTER_CONFIG, ONNX_FILES, reporting_disk_errors, write_json
from soft_trainer.fingerprints import encoder_file_hashes, list_files
from soft_trainer.hub_files import CONFIG, repository_file

OPSET = 18
TOLERANCE = 1e-3  # how much the export may change an embedding of unit length


def export_onnx(model: str | Path, output_dir: str | Path | None = None, int8: bool = False) -> list[Path]:
    """Exports an encoder's transformer, from token ids to token vectors, as `onnx/model.onnx`.

    Pooling, prompts and lengths stay in the encoder's other files, which sentence-transformers and this package read.

    Args:
        model: the encoder's folder, or a Hub name if `output_dir` is set.
        output_dir: the folder in which to write `onnx/`. By default, the encoder's folder.
        int8: whether to also write the weights as 8-bit integers, with one scale per channel.

    Returns:
        The paths of the written ONNX models.

    Raises:
        UserError: the extra `onnx` is missing, the encoder is static, reads data flow or has no fast tokenizer, the
            exported model's embeddings differ, those of 8-bit weights differ much on this processor, or the folder
            contains another encoder or cannot be written to.
    """
    folder = Path(output_dir or model)
    if output_dir is None and not folder.is_dir():
        raise UserError(f"{model}: no such folder; to export an encoder from the Hub, set output_dir")
    encoder = load_encoder(model, device="cpu")
    check_exportable(encoder, str(model))
    config = repository_file(model, CONFIG) or repository_file(model, ADAPTER_CONFIG)
    there = encoder_file_hashes(folder)
    if there and there != encoder_file_hashes(config.parent):
        raise UserError(f"output_dir={folder}: the folder has an encoder other than {model}; set another output_dir")
    with reporting_disk_errors(folder):
        files = write_onnx(encoder, config.parent, folder / FOLDER, int8)
        # The 8-bit weights of an earlier export belong to other float weights.
        for pattern in ONNX_FILES:
            for path in {*folder.glob(pattern)} - {*files}:
                path.unlink()
        list_files(folder, files)
    return [path for path in files if path.suffix == ".onnx"]


def check_exportable(encoder: Encoder, name: str) -> None:
    """Raises UserError, with the reason, if an encoder cannot be exported to ONNX."""
    if not has_onnxruntime():
        raise UserError(NEEDS_EXTRA)
    if is_static(encoder.model.config):
        raise UserError(f"{name}: a static encoder does not need an export, because it already runs without torch")
    if encoder.profile.data_flow_length:
        raise UserError(f"{name}: the encoder reads data flow, which requires torch; train with data_flow_length=0")
    if not encoder.tokenizer.is_fast:
        raise UserError(f"{name}: the encoder requires transformers, because it has no tokenizer.json")


def write_onnx(encoder: Encoder, source: Path, folder: Path, int8: bool) -> list[Path]:
    """Writes an encoder's ONNX export to a folder after checking its embeddings. Returns the paths of the files.

    Args:
        source: the folder with the encoder's files. The export records the hashes of these files.

    Raises:
        UserError: the model cannot be exported, or the embeddings differ by more than `TOLERANCE`, or with 8-bit
            weights by more than `LEAST_COSINE` allows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=folder) as aside:
        return [path.replace(folder / path.name) for path in _export(encoder, source, Path(aside), int8)]


def _export(encoder: Encoder, source: Path, folder: Path, int8: bool) -> list[Path]:
    """Writes the files of `write_onnx` to an empty folder."""
    path = folder / FLOAT_FILE
    wrapped = _Transformer(encoder.model, encoder.profile).eval()
    example = encoder.tokenizer(["sort a list", "x"], padding=True, return_tensors="pt")
    axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask", "last_hidden_state")}
    if encoder.profile.pooling == "pooler":
        axes["last_hidden_state"] = {0: "batch"}
    attention = encoder.model.config._attn_implementation
    encoder.model.set_attn_implementation("eager")  # fused attention branches on sizes, which tracing would fix
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            # optimum exports only with transformers below 4.58. The newer exporter of torch takes 6 to 11 s for MiniLM
            # instead of 0.7 s, needs onnxscript, and writes two files.
            torch.onnx.export(
                wrapped,
                (example["input_ids"], example["attention_mask"]),
                path,
                input_names=["input_ids", "attention_mask"],
                output_names=["last_hidden_state"],
                dynamic_axes=axes,
                opset_version=OPSET,
                dynamo=False,
            )
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"this model cannot be exported to ONNX: {str(error).splitlines()[0]}") from error
    finally:
        encoder.model.set_attn_implementation(attention)
    tokenizer = json.loads(encoder.tokenizer.backend_tokenizer.to_str())
    write_json(folder / TOKENIZER, tokenizer | {"truncation": None, "padding": None})
    write_json(folder / SETTINGS, _settings(encoder) | {"made_from": encoder_file_hashes(source)})
    check_embeddings(encoder, folder)
    files = [path, folder / TOKENIZER, folder / SETTINGS]
    if int8:
        add_int8(folder)
        files.insert(1, folder / INT8_FILE)
    return files


def _settings(encoder: Encoder) -> dict[str, object]:
    """Returns the settings that `OnnxEncoder` reads, in addition to the model and the tokenizer."""
    lengths = {side: prompt_length(encoder.tokenizer, encoder.profile, side) for side in ("query", "code")}
    return {
        "fingerprint": encoder.fingerprint,
        "dimensions": encoder.model.config.hidden_size,
        "pad_token_id": encoder.tokenizer.pad_token_id,
        "truncation_side": encoder.tokenizer.truncation_side,
        "prompt_lengths": lengths,
        "profile": dataclasses.asdict(encoder.profile),
    }


def add_int8(folder: Path) -> None:
    """Adds 8-bit integer weights to an export.

    Raises:
        UserError: on this processor, their embeddings are not close to those of float32 weights; nothing is written.
    """
    quantize(folder / FLOAT_FILE, folder / INT8_FILE)
    try:
        OnnxEncoder(folder, int8=True)
    except UserError:
        (folder / INT8_FILE).unlink()
        raise


def quantize(path: Path, target: Path) -> None:
    """Writes a copy of the ONNX model at `path` with 8-bit integer weights. Activations are quantised at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # an optional dependency

    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # hides a hint about other types of quantisation
    try:
        # Token embeddings stay in float32: with them in 8 bits, MiniLM's MRR on CodeSearchNet's Ruby was 0.679
        # instead of 0.686, at 0.694 in float32 (benchmarks/onnx_search.py).
        kinds = {"op_types_to_quantize": ["MatMul"], "weight_type": QuantType.QInt8}
        # With 8 bits, sums overflow on processors without VNNI: all-mpnet-base-v2 had an MRR of 0.06, not 0.88.
        quantize_dynamic(path, target, per_channel=True, reduce_range=True, **kinds)
    finally:
        logger.setLevel(level)


def check_embeddings(encoder: Encoder, folder: Path) -> None:
    """Raises UserError if an export's embeddings of `PROBES` differ from the encoder's."""
    exported = OnnxEncoder(folder)
    for side in ("query", "code"):
        expected = encoder.encode(PROBES, side)
        found = exported.encode(PROBES, side)
        largest = float((np.abs(found - expected).max(1) / np.linalg.norm(expected, axis=1)).max())
        if not largest <= TOLERANCE:
            raise UserError(f"the exported model's embeddings differ by {largest:.2g}; nothing was written")


class _Transformer(nn.Module):
    """The exported module: it maps token ids to token vectors, or to the pooler's output."""

    def __init__(self, model: nn.Module, profile: EncoderProfile):
        super().__init__()
        self.model = model
        self.output = POOLINGS[profile.pooling].output

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns Tensor[B, L, d], or Tensor[B, d] from a pooler."""
        return getattr(self.model(input_ids=input_ids, attention_mask=attention_mask), self.output)
