"""Runs exported encoders with NumPy, `tokenizers` and onnxruntime. A search then needs no torch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError

FLOAT_FILE = "model.onnx"
INT8_FILE = "model_qint8_avx512_vnni.onnx"  # sentence-transformers' name for these weights
FILES = {"float32": FLOAT_FILE, "int8": INT8_FILE}
# Tokens in a batch, padding included.
BATCH_TOKENS = 2048


def has_onnxruntime() -> bool:
    """Returns True if onnxruntime is installed."""
    from importlib.util import find_spec  # only an index with an encoder asks

    return find_spec("onnxruntime") is not None


class OnnxSession:
    """An exported encoder. Its embeddings are float32[n, d], pooled like those of `load_encoder`.

    Args:
        model: the `.onnx` file.
        tokenizer: the encoder's `tokenizers.Tokenizer`.
        settings: the fields of the encoder's profile, with `pad_token_id`, `truncation_side` and `prompt_lengths`, the
            number of leading tokens on each side that pooling skips.
        truncate_dim: the number of leading dimensions to keep. By default, all.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, model: Path, tokenizer, settings: Mapping, truncate_dim: int | None = None):
        import onnxruntime  # an optional dependency

        self.settings = settings
        self.truncate_dim = truncate_dim
        # A tokenizer has one maximum length at a time, and one thread may search while another encodes pieces.
        self._tokenizers = {}
        for side in ("query", "code"):
            own = copy.deepcopy(tokenizer)
            own.no_padding()
            own.enable_truncation(settings[f"{side}_length"], direction=settings["truncation_side"])
            self._tokenizers[side] = own
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        try:
            self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class of its own for every kind of bad file
            raise UserError(f"{model}: cannot be read: {str(error).splitlines()[0]}") from error

    def encode(self, texts: Sequence[str], side: str) -> np.ndarray:
        """Embeds texts.

        Args:
            side: "query" or "code", which determines prompt and length.
        """
        prefix = self.settings[f"{side}_prefix"]
        encodings = self._tokenizers[side].encode_batch_fast([prefix + text for text in texts])
        rows = [encoding.ids for encoding in encodings]
        # The longest come first, so that a batch has little padding.
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        embeddings: list[np.ndarray | None] = [None] * len(rows)
        start = 0
        while start < len(order):
            longest = max(len(rows[order[start]]), 1)
            batch = order[start : start + max(1, BATCH_TOKENS // longest)]
            for row, embedding in zip(batch, self._embed([rows[row] for row in batch], side), strict=True):
                embeddings[row] = embedding
            start += len(batch)
        return np.array(embeddings, np.float32).reshape(len(rows), -1)

    def _embed(self, rows: list[list[int]], side: str) -> np.ndarray:
        """Embeds one batch of token ids."""
        lengths = np.array([len(row) for row in rows])
        places = np.arange(max(lengths.max(), 1))
        mask = places < lengths[:, None]
        ids = np.full(mask.shape, self.settings["pad_token_id"], np.int64)
        ids[mask] = np.concatenate([np.array(row, np.int64) for row in rows])
        inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
        (states,) = self._session.run(None, inputs)
        pooled = self._pooled(states, mask, mask & (places >= self.settings["prompt_lengths"][side]))
        if self.settings["normalize"]:
            pooled = normalized(pooled)
        shorter = pooled[:, : self.truncate_dim]
        if self.settings["normalize"]:
            return normalized(shorter)
        return shorter

    def _pooled(self, states: np.ndarray, mask: np.ndarray, pooling_mask: np.ndarray) -> np.ndarray:
        """Computes one vector for each text, like `encoders.encoding.pool`."""
        pooling = self.settings["pooling"]
        if pooling == "pooler":
            return states
        if pooling == "mean":
            counts = np.maximum(pooling_mask.sum(1, keepdims=True), 1)
            return np.einsum("bld,bl->bd", states, pooling_mask.astype(np.float32)) / counts
        if pooling == "cls":
            place = pooling_mask.argmax(1)
        else:
            place = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
        return states[np.arange(len(states)), place]


def normalized(embeddings: np.ndarray) -> np.ndarray:
    """Scales embeddings to length one."""
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
