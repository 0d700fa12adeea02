"""Runs exported encoders with NumPy, `tokenizers` and onnxruntime, without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.errors import UserError
from soft_trainer.system.files import read_json

if TYPE_CHECKING:
    pass

FOLDER = "onnx"
FLOAT_FILE = "model.onnx"
SETTINGS = "settings.json"
TOKENIZER = "tokenizer.json"
# The maximum number of tokens in a batch, padding included.
BATCH_TOKENS = 2048
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

    Raises:
        UserError: a file cannot be read, or the encoder has fewer dimensions than `truncate_dim`.
    """

    runtime = "onnx"

    def __init__(self, folder: Path, truncate_dim: int | None = None):
        from tokenizers import Tokenizer  # imported here, so that a search by words does not wait for it

        self.folder = folder
        self.truncate_dim = truncate_dim
        self._settings = read_json(folder / SETTINGS)
        self._profile = self._settings["profile"]
        available = self._settings["dimensions"]
        check_dimensions(truncate_dim, available)
        self.dimensions = truncate_dim or self._profile["truncate_dim"] or available
        self.fingerprint = self._settings["fingerprint"]
        self._session = _session(folder / FLOAT_FILE)
        # A tokenizer has one maximum length at a time, and a thread may search while another thread encodes chunks.
        self._tokenizers = {}
        for side in ("query", "code"):
            tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
            tokenizer.enable_truncation(self._profile[f"{side}_length"], direction=self._settings["truncation_side"])
            self._tokenizers[side] = tokenizer

    def encode(self, texts: Sequence[str], side: str, languages: Sequence[str] | None = None) -> np.ndarray:
        """Embeds texts; see `TextEncoder`."""
        embeddings = self._embed(texts, "query" if side == "query" else "code")
        return normalized(embeddings) if self._profile["score_function"] == "cosine" else embeddings

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


def check_dimensions(value: int | None, available: int, option: str = "truncate_dim") -> None:
    """Raises UserError unless `value` is None or a whole number from 1 to `available`."""
    if value is not None and not (type(value) is int and 1 <= value <= available):
        raise UserError(f"{option}={value!r}: must be a whole number from 1 to {available}, the encoder's dimensions")


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Scales embeddings, float32[n, d], to unit length."""
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
