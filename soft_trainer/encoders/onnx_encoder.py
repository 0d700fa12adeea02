"""Loads exported encoders, with the methods of `Encoder`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from soft_trainer.encoders.encoding import prompt_length, score
from soft_trainer.encoders.onnx_session import FLOAT_FILE, INT8_FILE, OnnxSession, has_onnxruntime
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError, extra_needed, for_caller

FOLDER = "onnx"
NEEDS_EXTRA = extra_needed("ONNX", "onnx")


def session_settings(tokenizer, profile: EncoderProfile) -> dict[str, object]:
    """Returns all that `OnnxSession` needs to know besides the model and the tokenizer."""
    lengths = {side: prompt_length(tokenizer, profile, side) for side in ("query", "code")}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "truncation_side": tokenizer.truncation_side}
    return dataclasses.asdict(profile) | tokens | {"prompt_lengths": lengths}


class OnnxEncoder:
    """An exported encoder with the methods of `Encoder`; see `load_encoder(..., backend="onnx")`."""

    def __init__(self, session: OnnxSession, profile: EncoderProfile):
        self.session = session
        self.profile = profile

    def encode_queries(self, queries: Sequence[str], batch_size: int = 64, progress: bool = False) -> Tensor:
        """Embeds queries, Tensor[n, d] in float32. Batches have a fixed number of tokens."""
        return torch.from_numpy(self.session.encode(queries, "query"))

    def encode_codes(
        self, codes: Sequence[str], language=None, batch_size: int = 64, progress: bool = False
    ) -> Tensor:
        """Embeds functions, Tensor[n, d] in float32. No language is needed."""
        return torch.from_numpy(self.session.encode(codes, "code"))

    def score(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Scores embeddings of queries, Tensor[B, d], against those of codes, Tensor[N, d]. Returns Tensor[B, N]."""
        return score(self.profile, queries, codes)


def open_exported(folder: str | Path, tokenizer, profile: EncoderProfile, truncate_dim: int | None) -> OnnxEncoder:
    """Opens the exported encoder in `folder/onnx`. Weights of 8-bit integers are preferred to float32.

    Raises:
        UserError: the folder has no exported encoder, or the extra `onnx` is missing.
    """
    files = [path for name in (INT8_FILE, FLOAT_FILE) if (path := Path(folder) / FOLDER / name).is_file()]
    if not files:
        command = for_caller(f"soft-trainer export {folder} --onnx", f'export_onnx("{folder}")')
        raise UserError(f"{folder}: no {FOLDER}/{FLOAT_FILE}; `{command}` writes it")
    if not has_onnxruntime():
        raise UserError(NEEDS_EXTRA)
    session = OnnxSession(files[0], tokenizer.backend_tokenizer, session_settings(tokenizer, profile), truncate_dim)
    return OnnxEncoder(session, profile)
