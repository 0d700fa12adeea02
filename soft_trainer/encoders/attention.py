"""Defines the attention of packed passes: each token attends to the tokens of its own text only.

`attend` is registered with `transformers` under the name `PACKED`. On a GPU, it calls torch's variable-length flash
kernel. On a CPU, where torch has no such kernel, `TextAttention` computes texts of similar length together. Without
borders between texts, in a padded pass, `attend` computes attention as "sdpa" does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from soft_trainer.encoders.packing import PACKED

UNREADABLE = ("softcap", "position_bias", "s_aux")  # arguments of attention that packed passes do not compute
STEP = 16  # tokens; texts whose lengths round up to the same multiple are computed together
# The most scores of one head in a group of several texts. The scores of 12 heads then stay in a core's cache, so that
# float32 takes half of the time that it takes with all texts of a length in one group.
LARGEST_GROUP = 2**15
# A signed integer of the same size as each float, to set dropped values to 0 with a bitwise "and", which is ten times
# as fast as `masked_fill`.
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes attention within each text if `cu_seq_lens_q` has the borders between texts, otherwise as "sdpa".

    Args:
        query, key, value: Tensor[1, heads, T, d]. There may be fewer heads of keys and values.
        attention_mask: if a BoolTensor, which tokens of each text attend to which (`attends` of `packed_graphs`). Only
            a CPU reads it. Any other mask of a packed pass is ignored.

    Returns:
        Tensor[1, T, heads, d], and no attention weights.

    Raises:
        ValueError: the model's attention has a term that packed passes do not compute.
    """
    borders = kwargs.get("cu_seq_lens_q")
    if borders is None:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **kwargs)
    for name in UNREADABLE:
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention has {name}")
    causal = module.is_causal if is_causal is None else is_causal
    window = kwargs.get("sliding_window")
    if window is not None:
        window -= 1  # `transformers` counts the token itself
    # Rotary embeddings make queries and keys float32 under autocast. The values come from a linear layer.
    query, key, value = (each.transpose(1, 2).squeeze(0).to(value.dtype) for each in (query, key, value))
    if query.device.type == "cpu":
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        layout = Layout.of(tuple(borders.tolist()), causal, window)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            layout = layout.with_attends(attention_mask.view(-1))
        outputs = TextAttention.apply(query, key, value, layout, dropout, scaling)
    else:
        longest = kwargs["max_length_q"]
        outputs = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            borders,
            borders,
            longest,
            longest,
            dropout,
            causal,
            False,
            scale=scaling,
            window_size_left=window,
            window_size_right=0 if causal else window,
        )[0]
    return outputs[None], None


AttentionInterface.register(PACKED, attend)
AttentionMaskInterface.register(PACKED, sdpa_mask)  # for padded passes


# ---- On a CPU ----


@dataclass(frozen=True)
class Group:
    """n texts of similar length, padded to L tokens.

    Args:
        texts: int64[n], the texts' numbers in the packed pass.
        tokens: LongTensor[n L], the packed token at each position. Padding repeats the text's first token.
        real: BoolTensor[n, L], False on padding, or None if there is none.
        bias: added to the scores of the columns from `first`, Tensor[1 or n, 1, 1 or L, L - first]: -inf where a token
            does not attend to another. None if every token attends to every other.
    """

    texts: np.ndarray
    tokens: Tensor
    shape: tuple[int, int]
    real: Tensor | None
    bias: Tensor | None
    first: int

    @classmethod
    def of(cls, texts: np.ndarray, borders: np.ndarray, causal: bool, window: int | None) -> Group:
        """Groups the texts with these numbers."""
        starts = borders[texts]
        lengths = borders[texts + 1] - starts
        width = int(lengths.max())
        place = np.arange(width)
        real = place < lengths[:, None]
        tokens = np.where(real, starts[:, None] + place, starts[:, None])
        first = 0
        hidden = None
        if causal or window is not None:
            apart = place[:, None] - place
            hidden = np.abs(apart) > (width if window is None else window)
            if causal:  # padding comes last, so no token sees it
                hidden |= apart < 0
            hidden = hidden[None]
            if not causal:
                # Padding attends to everything, because a softmax over no entries is NaN.
                hidden = (hidden | ~real[:, None, :]) & real[:, :, None]
        elif not real.all():
            first = int(lengths.min())
            hidden = ~real[:, None, first:]
        bias = None
        if hidden is not None:
            bias = bias_of(torch.from_numpy(hidden))
        return cls(
            texts,
            torch.from_numpy(tokens.reshape(-1)),
            real.shape,
            None if real.all() else torch.from_numpy(real),
            bias,
            first,
        )

    def gathered(self, values: Tensor, heads: int) -> Tensor:
        """Returns the group's part of packed values, Tensor[T, heads x m, d], as Tensor[n heads, m L, d]."""
        d = values.shape[-1]
        rows = values.reshape(len(values), -1).index_select(0, self.tokens)
        return rows.view(*self.shape, heads, -1, d).permute(0, 2, 3, 1, 4).reshape(self.shape[0] * heads, -1, d)

    def with_attends(self, attends: Sequence[Tensor]) -> Group:
        """Returns the same group with the bias that each text's BoolTensor[L, L] asks for."""
        number, width = self.shape
        hidden = torch.zeros(number, width, width, dtype=torch.bool)
        for place, text in enumerate(self.texts):
            length = len(attends[text])
            hidden[place, :length, :length] = ~attends[text]
            hidden[place, :length, length:] = True
        return replace(self, bias=bias_of(hidden), first=0)

    def rows(self, values: Tensor, heads: int) -> Tensor:
        """Reverses `gathered`: returns Tensor[n L, heads x m, d], in the order of `tokens`."""
        number, length = self.shape
        values = values.view(number, heads, -1, length, values.shape[-1])
        return values.permute(0, 3, 1, 2, 4).reshape(number * length, -1, values.shape[-1])


def bias_of(hidden: Tensor) -> Tensor:
    """Returns what is added to all heads' scores to hide entries: Tensor[n, 1, ...] for BoolTensor[n, ...]."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None]


@dataclass(frozen=True)
class Layout:
    """Groups the texts of a packed pass by length.

    Args:
        borders: where each text starts among the packed tokens, and the last one ends.
        groups: texts whose lengths round up to the same multiple of `STEP`, at most `LARGEST_GROUP` scores.
        places: LongTensor[T], the position of each packed token among the tokens of all groups.
    """

    borders: tuple[int, ...]
    groups: Sequence[Group]
    places: Tensor

    @staticmethod
    @lru_cache(maxsize=4)  # all layers of a pass have one layout, or two if only some have a sliding window
    def of(borders: tuple[int, ...], causal: bool, window: int | None) -> Layout:
        """Groups the texts between these borders."""
        steps = -(-np.diff(borders) // STEP)
        groups = []
        for step in np.unique(steps[steps > 0]):
            texts = np.flatnonzero(steps == step)
            number = max(LARGEST_GROUP // int(step * STEP) ** 2, 1)
            for start in range(0, len(texts), number):
                groups.append(Group.of(texts[start : start + number], np.array(borders), causal, window))
        places = torch.empty(borders[-1], dtype=torch.int64)
        done = 0
        for group in groups:
            order = torch.arange(done, done + len(group.tokens))
            real = slice(None) if group.real is None else group.real.view(-1)
            places[group.tokens[real]] = order[real]
            done += len(group.tokens)
        return Layout(borders, groups, places)

    def with_attends(self, attends: Tensor) -> Layout:
        """Returns the same layout in which each token attends to some tokens of its text only; see `attend`."""
        lengths = np.diff(self.borders)
        masks = attends.split((lengths**2).tolist())
        squares = [mask.view(length, length) for mask, length in zip(masks, lengths.tolist(), strict=True)]
        return replace(self, groups=[group.with_attends(squares) for group in self.groups])

    def joined(self, rows: Sequence[Tensor]) -> Tensor:
        """Returns the rows of all groups in the packed order, Tensor[T, heads, d]."""
        return torch.cat(rows).index_select(0, self.places)


def kept(shape: Sequence[int], rate: float) -> Tensor:
    """Draws which values dropout keeps, CharTensor: -1, or 0 with the probability `rate`, rounded to 1/256.

    A value takes one random byte, and eight bytes come from one random integer. `bernoulli_` takes ten times as long.
    """
    number = math.prod(shape)
    drawn = torch.empty((number + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    drawn = drawn.view(torch.int8)[:number]
    return torch.ge(drawn, dropped_bytes(rate) - 128, out=torch.empty_like(drawn)).neg_().view(shape)


def dropped_bytes(rate: float) -> int:
    """Returns how many of the 256 values of a byte dropout drops."""
    return round(rate * 256)


def masked(values: Tensor, keep: Tensor) -> Tensor:
    """Returns a copy of `values` that is 0 where `keep` is 0."""
    bits = BITS[values.dtype]
    return values.view(bits).bitwise_and(keep.to(bits)).view(values.dtype)


class TextAttention(torch.autograd.Function):
    """Computes softmax(scale Q K') V within each text, with dropout of the probabilities."""

    @staticmethod
    def forward(ctx, query, key, value, layout: Layout, rate: float, scale: float) -> Tensor:
        """Returns Tensor[T, heads, d]. `query`, `key` and `value` are Tensor[T, heads, d]."""
        keeps = any(ctx.needs_input_grad)  # otherwise, each group's tensors are freed at once
        heads = key.shape[1]
        rate = dropped_bytes(rate) / 256
        rows = []
        saved = []
        with torch.autocast("cpu", enabled=False):
            query = query * scale
            for group in layout.groups:
                q, k, v = (group.gathered(each, heads) for each in (query, key, value))
                scores = torch.bmm(q, k.transpose(1, 2))
                number, length = group.shape
                if group.bias is not None:
                    columns = scores.view(number, -1, length, length)[..., group.first :]
                    columns += group.bias.to(scores.dtype)
                probabilities = torch.softmax(scores, -1)
                weights = probabilities
                keep = None
                if rate:
                    keep = kept(scores.shape, rate)
                    weights = masked(probabilities, keep)
                if keeps:
                    saved += [q, k, v, probabilities, keep]
                rows.append(group.rows(torch.bmm(weights, v), heads))
            outputs = layout.joined(rows)
            if rate:
                outputs *= 1 / (1 - rate)
        ctx.save_for_backward(*saved)
        ctx.constants = layout, heads, rate, scale
        return outputs

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        """Returns the gradients of `query`, `key` and `value`."""
        layout, heads, rate, scale = ctx.constants
        saved = iter(ctx.saved_tensors)
        if rate:
            gradient = gradient * (1 / (1 - rate))
        parts = ([], [], [])
        with torch.autocast("cpu", enabled=False):
            for group in layout.groups:
                q, k, v, probabilities, keep = itertools.islice(saved, 5)
                g = group.gathered(gradient, heads)
                if group.real is not None:
                    number, length = group.shape
                    g.view(number, -1, length, g.shape[-1]).mul_(group.real[:, None, :, None])
                of_weights = torch.bmm(g, v.transpose(1, 2))
                weights = probabilities
                if rate:
                    weights = masked(probabilities, keep)
                    of_weights = masked(of_weights, keep)
                of_scores = torch._softmax_backward_data(of_weights, probabilities, -1, probabilities.dtype)
                gradients = (
                    torch.bmm(of_scores, k),
                    torch.bmm(of_scores.transpose(1, 2), q),
                    torch.bmm(weights.transpose(1, 2), g),
                )
                for part, each in zip(parts, gradients, strict=True):
                    part.append(group.rows(each, heads))
        of_query, of_key, of_value = map(layout.joined, parts)
        return of_query * scale, of_key, of_value, None, None, None


@contextlib.contextmanager
def running(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """Prepares a model for our forward and backward passes inside the `with` block, and restores it afterwards.

    The block must contain a forward pass together with its backward pass, which may run parts of the forward pass
    again. Blocks may be nested.
    """
    before = model.config._attn_implementation
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    if packed and "flash" not in before and before != PACKED:
        model.set_attn_implementation(PACKED)
    # On Hopper, cuDNN's attention builds a plan for each new shape, which takes 0.1 s and more.
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
