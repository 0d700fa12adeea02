"""Exports encoders to ONNX, for an index."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from soft_trainer.encoders.onnx import (
    FLOAT_FILE,
    PROBES,
    SETTINGS,
    TOKENIZER,
    OnnxEncoder,
)
from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.errors import UserError
from soft_trainer.system.files import write_json

if TYPE_CHECKING:  # slow to import
    from soft_trainer.encoders.encoding import Encoder

OPSET = 18
TOLERANCE = 1e-3  # how much the export may change an embedding of unit length


def write_onnx(encoder: Encoder, folder: Path) -> None:
    """Writes an encoder's ONNX export to a folder after checking its embeddings.

    Raises:
        UserError: the model cannot be exported, or the embeddings differ by more than `TOLERANCE`.
    """
    if encoder.profile.data_flow_length:
        raise UserError("the encoder reads data flow, which requires torch; train with data_flow_length=0")
    if not encoder.tokenizer.is_fast:
        raise UserError("the encoder requires transformers, because it has no tokenizer.json")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=folder) as aside:
        _export(encoder, Path(aside))
        for path in Path(aside).iterdir():
            path.replace(folder / path.name)


def _export(encoder: Encoder, folder: Path) -> None:
    """Writes the files of `write_onnx` to an empty folder."""
    import torch  # imported here, because it takes seconds

    class Transformer(torch.nn.Module):
        """Maps token ids to token vectors, Tensor[B, L, d], or to a pooler's output, Tensor[B, d]."""

        def __init__(self):
            super().__init__()
            self.model = encoder.model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            output = POOLINGS[encoder.profile.pooling].output
            return getattr(self.model(input_ids=input_ids, attention_mask=attention_mask), output)

    path = folder / FLOAT_FILE
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
                Transformer().eval(),
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
    write_json(folder / SETTINGS, _settings(encoder))
    check_embeddings(encoder, folder)


def _settings(encoder: Encoder) -> dict[str, object]:
    """Returns the settings that `OnnxEncoder` reads, in addition to the model and the tokenizer."""
    from soft_trainer.encoders.encoding import prompt_length  # imports torch

    lengths = {side: prompt_length(encoder.tokenizer, encoder.profile, side) for side in ("query", "code")}
    return {
        "fingerprint": encoder.fingerprint,
        "dimensions": encoder.model.config.hidden_size,
        "pad_token_id": encoder.tokenizer.pad_token_id,
        "truncation_side": encoder.tokenizer.truncation_side,
        "prompt_lengths": lengths,
        "profile": dataclasses.asdict(encoder.profile),
    }


def check_embeddings(encoder: Encoder, folder: Path) -> None:
    """Raises UserError if an export's embeddings of `PROBES` differ from the encoder's."""
    exported = OnnxEncoder(folder)
    for side in ("query", "code"):
        expected = encoder.encode(PROBES, side)
        found = exported.encode(PROBES, side)
        largest = float((np.abs(found - expected).max(1) / np.linalg.norm(expected, axis=1)).max())
        if not largest <= TOLERANCE:
            raise UserError(f"the exported model's embeddings differ by {largest:.2g}; nothing was written")
