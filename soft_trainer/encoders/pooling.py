"""Pools token vectors into embeddings, and scores embeddings."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from soft_trainer.encoders.profiles import EncoderProfile


def pool(profile: EncoderProfile, outputs, attention_mask: Tensor) -> Tensor:
    """Computes one embedding for each text, Tensor[B, d] in float32 or higher; padding may be on either side.

    Args:
        outputs: the model's outputs: `last_hidden_state`, Tensor[B, L, d], and `pooler_output` for "pooler".
        attention_mask: Tensor[B, L], 1 on the tokens to pool. A text without tokens has mean 0.
    """
    if profile.pooling == "pooler":
        embeddings = _at_least_float32(outputs.pooler_output)
    elif profile.pooling == "mean":
        states = _at_least_float32(outputs.last_hidden_state)
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        embeddings = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
    else:
        states, mask = outputs.last_hidden_state, attention_mask.int()
        # `argmax` gives the first of several ones.
        place = mask.argmax(1) if profile.pooling == "cls" else mask.shape[1] - 1 - mask.flip(1).argmax(1)
        embeddings = _at_least_float32(states[torch.arange(len(states), device=states.device), place])
    return F.normalize(embeddings, dim=-1) if profile.normalize else embeddings


def score(profile: EncoderProfile, queries: Tensor, codes: Tensor) -> Tensor:
    """Computes the scores Tensor[B, N] of queries Tensor[B, d] against codes Tensor[N, d]: dot or cosine, scaled."""
    queries, codes = comparable(profile, queries), comparable(profile, codes)
    with torch.autocast(queries.device.type, enabled=False):
        return queries @ codes.T * profile.score_scale


def comparable(profile: EncoderProfile, embeddings: Tensor) -> Tensor:
    """Prepares embeddings so that their dot products are the profile's unscaled scores; float32 or higher."""
    embeddings = _at_least_float32(embeddings)
    return F.normalize(embeddings, dim=-1) if profile.score_function == "cosine" else embeddings


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
