"""Runs exported encoders with NumPy, `tokenizers` and onnxruntime, without torch."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.errors import UserError, extra_needed
from soft_trainer.files import cache_dir, read_json
from soft_trainer.fingerprints import encoder_file_hashes, file_fingerprint, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "onnx"
FLOAT_FILE = "model.onnx"
INT8_FILE = "model_qint8_avx512_vnni.onnx"  # sentence-transformers' name for these weights
SETTINGS = "settings.json"
TOKENIZER = "tokenizer.json"
NEEDS_EXTRA = extra_needed("ONNX", "onnx")
# The maximum number of tokens in a batch, padding included.
BATCH_TOKENS = 2048
# Int8 weights are used if the mean cosine between int8 and float32 embeddings reaches this.
LEAST_COSINE = 0.97
PROBES = ("sort a list", "def read(path):\n    return open(path).read()  # größer 'a  b'\n", "x", "a b c " * 400)


def has_onnxruntime() -> bool:
    """Returns True if onnxruntime is installed."""
    from importlib.util import find_spec  # needed only for encoders without torch

    return find_spec("onnxruntime") is not None


class OnnxEncoder:
    """A `TextEncoder` that was exported to ONNX and runs without torch.

    Args:
        folder: the export's folder, which contains the model, the tokenizer and the settings.
        truncate_dim: the number of leading dimensions to keep. By default, the same number as for `load_encoder`.
        int8: whether to use 8-bit integer weights.

    Raises:
        UserError: a file cannot be read, the encoder has fewer dimensions than `truncate_dim`, or on this processor
            the embeddings of 8-bit weights are not close to those of float32 weights.
    """

    def __init__(self, folder: Path, truncate_dim: int | None = None, int8: bool = False):
        from tokenizers import Tokenizer  # imported here, so that a search by words does not wait for it

        self.folder = folder
        self.truncate_dim = truncate_dim
        self._settings = read_json(folder / SETTINGS)
        self._profile = self._settings["profile"]
        available = self._settings["dimensions"]
        check_dimensions(truncate_dim, available)
        self.dimensions = truncate_dim or self._profile["truncate_dim"] or available
        self.runtime = "onnx"
        self.fingerprint = self._settings["fingerprint"]
        file = FLOAT_FILE
        if int8:
            self.runtime = "int8"
            self.fingerprint = fingerprint(self.fingerprint, self.runtime)
            file = INT8_FILE
        self._session = _session(folder / file)
        # A tokenizer has one maximum length at a time, and a thread may search while another thread encodes chunks.
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizers = {}
        for side in ("query", "code"):
            own = copy.deepcopy(tokenizer)
            own.enable_truncation(self._profile[f"{side}_length"], direction=self._settings["truncation_side"])
            self._tokenizers[side] = own
        if int8:
            self._check_int8()

    def _check_int8(self) -> None:
        """Compares int8 with float32 embeddings when this processor first runs these weights, and remembers success.

        Each kind of processor has other instructions for 8-bit integers, and some of them overflow.

        Raises:
            UserError: the mean cosine is below `LEAST_COSINE`.
        """
        path = self.folder / INT8_FILE
        passed = cache_dir() / "int8" / fingerprint(file_fingerprint(path), _processor())
        if passed.exists():
            return
        cosine = mean_cosine(self, OnnxEncoder(self.folder, self.truncate_dim), PROBES)
        if not cosine >= LEAST_COSINE:
            raise UserError(
                f"{path}: on this processor, the mean cosine with embeddings of float32 weights is only {cosine:.2f}; "
                "use float32 weights (`--int8` or backend='int8' dropped)"
            )
        with suppress(OSError):  # the next use would compare again
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()

    def encode(self, texts: Sequence[str], side: str, languages: Sequence[str] | None = None) -> np.ndarray:
        """Embeds texts; see `TextEncoder`."""
        embeddings = self._embed(texts, side)
        return normalized(embeddings) if self._profile["score_function"] == "cosine" else embeddings

    # ---- The methods of `load_encoder(..., backend="onnx")` ----

    def encode_queries(self, queries: Sequence[str], batch_size: int = 64, progress: bool = False) -> Tensor:
        """Embeds queries. Returns Tensor[n, d] in float32. `batch_size` is ignored: tokens limit the batch."""
        import torch  # callers of this method have imported it already

        return torch.from_numpy(self._embed(queries, "query"))

    def encode_codes(
        self, codes: Sequence[str], language=None, batch_size: int = 64, progress: bool = False
    ) -> Tensor:
        """Embeds functions. Returns Tensor[n, d] in float32. `language` and `batch_size` are ignored."""
        import torch  # as above

        return torch.from_numpy(self._embed(codes, "code"))

    def score(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Scores query embeddings, Tensor[B, d], against code embeddings, Tensor[N, d]. Returns Tensor[B, N]."""
        from torch.nn import functional  # as above

        if self._profile["score_function"] == "cosine":
            queries = functional.normalize(queries, dim=-1)
            codes = functional.normalize(codes, dim=-1)
        return queries @ codes.T * self._profile["score_scale"]

    # ---- Texts to embeddings ----

    def _embed(self, texts: Sequence[str], side: str) -> np.ndarray:
        """Embeds texts in batches of similar lengths. Returns float32[n, d]."""
        prefix = self._profile[f"{side}_prefix"]
        encodings = self._tokenizers[side].encode_batch_fast([prefix + text for text in texts])
        rows = [encoding.ids for encoding in encodings]
        # The longest come first, so that a batch has little padding.
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        embeddings = np.empty((len(rows), self.dimensions), np.float32)
        start = 0
        while start < len(order):
            longest = max(len(rows[order[start]]), 1)
            batch = order[start : start + max(1, BATCH_TOKENS // longest)]
            embeddings[batch] = self._embed_batch([rows[row] for row in batch], side)
            start += len(batch)
        return embeddings

    def _embed_batch(self, rows: list[list[int]], side: str) -> np.ndarray:
        """Embeds one batch of token ids. Returns float32[B, d]."""
        lengths = np.array([len(row) for row in rows])
        positions = np.arange(max(lengths.max(), 1))
        mask = positions < lengths[:, None]
        ids = np.full(mask.shape, self._settings["pad_token_id"], np.int64)
        ids[mask] = np.concatenate([np.array(row, np.int64) for row in rows])
        inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
        (states,) = self._session.run(None, inputs)
        pooling = POOLINGS[self._profile["pooling"]]
        if pooling.skips_prompt:
            mask = mask & (positions >= self._settings["prompt_lengths"][side])
        pooled = pooling.exported(states, mask)
        if not self._profile["normalize"]:
            return pooled[:, : self.dimensions]
        if self.truncate_dim is None:
            return normalized(pooled)[:, : self.dimensions]
        return normalized(pooled[:, : self.dimensions])


def _session(path: Path):
    """Opens an ONNX model to run on all cores available to the process."""
    import onnxruntime  # an optional dependency

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises a different class for every kind of bad file
        raise UserError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error


def _processor() -> str:
    """Returns the model and the features of the processor, as far as the system gives them."""
    listed = Path("/proc/cpuinfo")
    if not listed.exists():
        return platform.processor() or platform.machine()
    return listed.read_text().split("\n\n")[0].partition("flags")[2] or platform.machine()


def mean_cosine(encoder: OnnxEncoder, other: OnnxEncoder, texts: Sequence[str]) -> float:
    """Returns the mean cosine between the embeddings that two encoders give functions."""
    cosines = normalized(encoder.encode(texts, "code")) * normalized(other.encode(texts, "code"))
    return float(cosines.sum(1).mean())


def lighter(encoder: OnnxEncoder, texts: Sequence[str]) -> tuple[OnnxEncoder, str]:
    """Chooses int8 or float32 weights by comparing the embeddings that both give `texts`.

    Returns:
        The int8 encoder if the mean cosine of int8 and float32 embeddings reaches `LEAST_COSINE`, otherwise `encoder`.
        The second value says why.
    """
    if not (encoder.folder / INT8_FILE).is_file():  # the export did not keep them
        return encoder, "float32, because int8 gives other embeddings on this processor"
    try:
        small = OnnxEncoder(encoder.folder, encoder.truncate_dim, int8=True)
        cosine = mean_cosine(small, encoder, texts)
        if cosine >= LEAST_COSINE:
            return small, f"int8 (mean cosine with float32: {cosine:.3f} on {len(texts)} chunks)"
        return encoder, f"float32 (mean cosine of int8 with float32: {cosine:.3f} on {len(texts)} chunks)"
    except UserError as error:
        return encoder, f"float32 ({error})"


def open_exported(folder: Path, truncate_dim: int | None = None, int8: bool = False) -> OnnxEncoder:
    """Opens the ONNX export in an encoder's folder, with float weights or with 8-bit integer weights.

    Raises:
        UserError: the folder has no export, the encoder has changed since the export, or the extra `onnx` is missing.
    """
    export = folder / FOLDER
    file, option = (INT8_FILE, " --int8") if int8 else (FLOAT_FILE, "")
    remedy = f"`soft-trainer export {folder}{option}` writes it"
    if not (export / file).is_file() or not (export / SETTINGS).is_file():
        raise UserError(f"{folder}: no such export in {FOLDER}/; {remedy}")
    if not has_onnxruntime():
        raise UserError(NEEDS_EXTRA)
    made_from = read_json(export / SETTINGS)["made_from"]
    for name, content in encoder_file_hashes(folder).items():
        if made_from.get(name) != content:
            raise UserError(f"{export}: {name} has changed since the export; {remedy} again")
    return OnnxEncoder(export, truncate_dim, int8)


def check_dimensions(value: int | None, available: int, option: str = "truncate_dim") -> None:
    """Raises UserError unless `value` is None or a whole number from 1 to `available`."""
    if value is not None and not (type(value) is int and 1 <= value <= available):
        raise UserError(f"{option}={value!r}: must be a whole number from 1 to {available}, the encoder's dimensions")


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Scales embeddings, float32[n, d], to unit length."""
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
