"""Defines the poolings, which turn the token vectors of texts into one embedding per text.

Each pooling has three forms: with torch for padded and for packed passes, and with NumPy for exported encoders. torch
is imported inside the functions, because profiles and exported encoders do not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Pooling:
    """Pools the token vectors of each text into one embedding, in torch, on packed texts, or with NumPy.

    Args:
        padded: takes the model's output, Tensor[B, L, d], and the tokens to pool, Tensor[B, L], 1 or True, or for
            "mean" any weights. Padding may be on either side. Returns Tensor[B, d].
        packed: takes the model and the `PackedStates` of n texts, and returns Tensor[n, d].
        exported: `padded` for NumPy arrays, with padding on the right.
        output: the model's output that `padded` and `exported` take.
        skips_prompt: whether the tokens of prompts can be skipped.
        mode: the name of the pooling in sentence-transformers, or None for the model's pooler, which
            sentence-transformers runs without a pooling module.
        key: the key for this pooling in the files of older releases of sentence-transformers, or None.
    """

    padded: Callable[[Tensor, Tensor], Tensor]
    packed: Callable[[nn.Module, PackedStates], Tensor]
    exported: Callable[[np.ndarray, np.ndarray], np.ndarray]
    output: str = "last_hidden_state"
    skips_prompt: bool = False
    mode: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class PackedStates:
    """The token vectors of n packed texts; see `encoders.packing.pack`.

    Args:
        vectors: the vectors of all tokens, Tensor[T, d].
        borders: where each text starts and the last one ends, IntTensor[n + 1].
        pooled_from: where pooling starts in each text, LongTensor[n].
    """

    vectors: Tensor
    borders: Tensor
    pooled_from: Tensor

    @property
    def starts(self) -> Tensor:
        """The offset of each text's first token, LongTensor[n]."""
        return self.borders[:-1].long()

    @property
    def ends(self) -> Tensor:
        """The offset after each text's last token, LongTensor[n]."""
        return self.borders[1:].long()

    @property
    def last(self) -> int:
        """The offset of the last token of all. A text without tokens at the end starts after it."""
        return len(self.vectors) - 1


# ---- Mean over the tokens: 0 for a text without tokens ----


def _padded_mean(states: Tensor, mask: Tensor) -> Tensor:
    import torch

    states = states.to(torch.promote_types(states.dtype, torch.float32))
    mask = mask.unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1).clamp(min=1)


def _packed_mean(model: nn.Module, states: PackedStates) -> Tensor:
    import torch

    vectors = states.vectors
    starts = states.starts
    ends = states.ends
    offsets = torch.arange(len(vectors), device=vectors.device)
    pooled = offsets >= states.pooled_from.repeat_interleave(ends - starts, output_size=len(vectors))
    # Unlike a matrix product, this sum is never rounded to half precision, and it takes no memory.
    kept = vectors.to(torch.promote_types(vectors.dtype, torch.float32)) * pooled[:, None]
    sums = torch.segment_reduce(kept, "sum", offsets=states.borders.long(), unsafe=True, initial=0)
    return sums / (ends - states.pooled_from).clamp(min=1)[:, None]


def _exported_mean(states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    counts = np.maximum(mask.sum(1, keepdims=True), 1)
    return np.einsum("bld,bl->bd", states, mask.astype(np.float32)) / counts


# ---- The first token. If values are equal, `argmax` returns the first. ----


def _padded_first(states: Tensor, mask: Tensor) -> Tensor:
    import torch

    return states[torch.arange(len(states), device=states.device), mask.int().argmax(1)]


def _packed_first(model: nn.Module, states: PackedStates) -> Tensor:
    import torch

    first = torch.where(states.pooled_from < states.ends, states.pooled_from, states.starts)
    return states.vectors[first.clamp(max=states.last)]


def _exported_first(states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return states[np.arange(len(states)), mask.argmax(1)]


# ---- The last token, which belongs to the prompt only if the prompt is the whole text ----


def _padded_last(states: Tensor, mask: Tensor) -> Tensor:
    import torch

    last = mask.shape[1] - 1 - mask.int().flip(1).argmax(1)
    return states[torch.arange(len(states), device=states.device), last]


def _packed_last(model: nn.Module, states: PackedStates) -> Tensor:
    return states.vectors[(states.ends - 1).clamp(min=0)]


def _exported_last(states: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return states[np.arange(len(states)), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)]


# ---- The model's pooler, which reads each text's first token ----


def _pooled_by_model(states, mask):
    return states


def _packed_pooler(model: nn.Module, states: PackedStates) -> Tensor:
    first = states.vectors[states.starts.clamp(max=states.last)][:, None]
    # Under autocast, a wrapper makes the states of half weights float32.
    return model.pooler(first.to(next(model.pooler.parameters()).dtype))


POOLINGS = {
    "mean": Pooling(
        _padded_mean,
        _packed_mean,
        _exported_mean,
        skips_prompt=True,
        mode="mean",
        key="pooling_mode_mean_tokens",
    ),
    "cls": Pooling(
        _padded_first,
        _packed_first,
        _exported_first,
        skips_prompt=True,
        mode="cls",
        key="pooling_mode_cls_token",
    ),
    "last_token": Pooling(
        _padded_last,
        _packed_last,
        _exported_last,
        mode="lasttoken",
        key="pooling_mode_lasttoken",
    ),
    "pooler": Pooling(_pooled_by_model, _packed_pooler, _pooled_by_model, output="pooler_output"),
}
