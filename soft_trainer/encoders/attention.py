"""Defines the attention of packed passes: each token attends to the tokens of its own text only.

`attend` is registered with `transformers` under the name `PACKED`. On a GPU, it calls torch's variable-length flash
kernel. On a CPU, where torch has no such kernel, `TextAttention` computes short texts of similar length together, and
long texts in parts. Without borders between texts, in a padded pass, `attend` computes attention as "sdpa" does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from soft_trainer.encoders.packing import PACKED

UNREADABLE = ("softcap", "position_bias", "s_aux")  # arguments of attention that packed passes do not compute
STEP = 16  # tokens; texts whose lengths round up to the same multiple are computed together
# The most scores of one head in a group of several texts. The scores of 12 heads then stay in a core's cache, so that
# float32 takes half of the time that it takes with all texts of a length in one group.
LARGEST_GROUP = 2**15
ROWS = 256  # the most queries of a block
SCORES = 2**21  # the most scores of several heads that are computed at once
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
        layout = layout_of(tuple(borders.tolist()), causal, window)
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            layout = make_layout(tuple(borders.tolist()), causal, window, attention_mask.view(-1).numpy())
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
class Block:
    """The queries of n texts that are padded to one length, or some queries of one text, and the keys that they see.

    Args:
        number: n.
        queries, keys: their positions among the tokens of a `Layout`.
        bias: added to the scores of the keys from `first`, Tensor[n, q, 1, k - first]: -inf where a token does not
            attend to another. None if every query attends to every key.
    """

    number: int
    queries: slice
    keys: slice
    bias: Tensor | None
    first: int


@dataclass(frozen=True)
class Layout:
    """Orders the tokens of a packed pass by the lengths of their texts, and divides the texts' scores into blocks.

    Args:
        tokens: LongTensor[P], the packed token at each position. Padding repeats a text's first token.
        places: LongTensor[T], the position of each packed token.
        real: BoolTensor[P], False on padding.
    """

    tokens: Tensor | None
    places: Tensor | None
    real: Tensor | None
    blocks: Sequence[Block]

    def by_head(self, values: Tensor, heads: int) -> Tensor:
        """Returns packed values, Tensor[T, heads x m, d], in this order, as Tensor[heads, P, m, d]."""
        if self.tokens is not None:
            values = values.index_select(0, self.tokens)
        return values.unflatten(1, (heads, -1)).transpose(0, 1)

    def packed(self, values: Tensor) -> Tensor:
        """Reverses `by_head`."""
        values = values.transpose(0, 1).flatten(1, 2)
        if self.tokens is not None:
            values = values.index_select(0, self.places)
        return values

    def pieces(self, heads: int, share: int) -> Iterator[tuple[Block, slice]]:
        """Yields each block with some of the heads at a time, so that their scores are at most `SCORES`."""
        for block in self.blocks:
            rows = (block.queries.stop - block.queries.start) * share
            step = max(SCORES * block.number // (rows * (block.keys.stop - block.keys.start)), 1)
            for start in range(0, heads, step):
                yield block, slice(start, start + step)


def make_layout(borders: Sequence[int], causal: bool, window: int | None, attends: np.ndarray | None = None) -> Layout:
    """Divides the texts between these borders into blocks.

    Args:
        attends: which tokens of each text attend to which, bool[sum of squared lengths].
    """
    starts = np.array(borders[:-1])
    lengths = np.diff(borders)
    squares = np.cumsum(lengths**2) - lengths**2
    steps = -(-lengths // STEP)
    groups = []
    for step in np.unique(steps[steps > 0]):
        texts = np.flatnonzero(steps == step)
        number = max(LARGEST_GROUP // int(step * STEP) ** 2, 1)
        groups += [texts[start : start + number] for start in range(0, len(texts), number)]
    tokens = []
    reals = []
    blocks = []
    done = 0
    for texts in groups:
        place = np.arange(lengths[texts].max())
        real = place < lengths[texts, None]
        tokens.append((starts[texts, None] + place * real).reshape(-1))
        reals.append(real.reshape(-1))
        end = done + real.size
        for top in range(0, len(place), ROWS):
            bottom = min(top + ROWS, len(place))
            low = 0
            high = bottom if causal else len(place)
            if window is not None:
                low = max(top - window, 0)
                high = min(bottom + window, high)
            rows = place[top:bottom, None]
            columns = place[low:high]
            seen = np.abs(rows - columns) <= (len(place) if window is None else window)
            if causal:
                seen &= rows >= columns
            if attends is not None:
                seen = seen & attends.take(
                    (squares[texts, None, None] + rows * lengths[texts, None, None] + columns), mode="clip"
                )
            # Padding attends to everything, because a softmax over no entries is NaN.
            hidden = ~(seen & real[:, None, low:high]) & real[:, top:bottom, None]
            bias = None
            first = int(hidden.any((0, 1)).argmax())
            if hidden.any():
                hidden = torch.from_numpy(hidden[..., first:])
                bias = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, :, None]
            spare = len(place)
            blocks.append(
                Block(
                    len(texts),
                    slice(done + top, end - spare + bottom),
                    slice(done + low, end - spare + high),
                    bias,
                    first,
                )
            )
        done = end
    order = np.concatenate(tokens)
    real = np.concatenate(reals)
    if np.array_equal(order, np.arange(borders[-1])):
        return Layout(None, None, None, blocks)
    places = np.empty(borders[-1], dtype=np.int64)
    places[order[real]] = np.flatnonzero(real)
    return Layout(*map(torch.from_numpy, (order, places, real)), blocks)


layout_of = lru_cache(maxsize=4)(make_layout)  # all layers of a pass have the same, or two if only some have a window


def kept(shape: Sequence[int], rate: float) -> Tensor:
    """Draws which values dropout keeps, CharTensor: -1, or 0 with the probability `rate`, rounded to 1/256.

    A value takes one random byte, and eight bytes come from one random integer. `bernoulli_` takes ten times as long.
    """
    number = math.prod(shape)
    drawn = torch.empty((number + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    drawn = drawn.view(torch.int8)[:number]
    return torch.ge(drawn, dropped_bytes(rate) - 128, out=torch.empty_like(drawn)).neg_().view(shape)


def dropped_bytes(rate: float) -> int:
    """Returns how many of the 256 values of a byte dropout drops, never all of them."""
    return min(round(rate * 256), 255)


def masked(values: Tensor, keep: Tensor) -> Tensor:
    """Returns a copy of `values` that is 0 where `keep` is 0."""
    bits = BITS[values.dtype]
    return values.view(bits).bitwise_and(keep.to(bits)).view(values.dtype)


def part(values: Tensor, positions: slice, heads: slice, number: int) -> Tensor:
    """Returns the part of Tensor[heads, P, m, d] for n texts, as Tensor[heads x n, L m, d]."""
    chosen = values[heads, positions]
    return chosen.reshape(len(chosen) * number, -1, values.shape[-1])


def probabilities_of(query: Tensor, key: Tensor, block: Block, share: int) -> Tensor:
    """Returns the softmax of the scores, Tensor[heads x n, q m, k]."""
    scores = torch.bmm(query, key.transpose(1, 2))
    if block.bias is not None:
        columns = scores.view(-1, block.number, scores.shape[1] // share, share, scores.shape[2])[..., block.first :]
        columns += block.bias.to(scores.dtype)
    return torch.softmax(scores, -1, out=scores)


class TextAttention(torch.autograd.Function):
    """Computes softmax(scale Q K') V within each text, with dropout of the probabilities.

    With dropout, the probabilities are kept for the backward pass. Otherwise, it computes them again.
    """

    @staticmethod
    def forward(ctx, query, key, value, layout: Layout, rate: float, scale: float) -> Tensor:
        """Returns Tensor[T, heads, d]. `query`, `key` and `value` are Tensor[T, heads, d]."""
        rate = dropped_bytes(rate) / 256
        factor = 1 / (1 - rate)
        queries, keys, values = (layout.by_head(each, key.shape[1]) for each in (query, key, value))
        share = queries.shape[2]
        outputs = torch.empty_like(queries)
        saved = []
        with torch.autocast("cpu", enabled=False):
            for block, heads in layout.pieces(len(keys), share):
                q = part(queries, block.queries, heads, block.number) * scale
                k, v = (part(each, block.keys, heads, block.number) for each in (keys, values))
                weights = probabilities_of(q, k, block, share)
                if rate:
                    keep = kept(weights.shape, rate)
                    saved += [q, k, v, weights, keep]
                    weights = masked(weights, keep)
                rows = outputs[heads, block.queries]
                torch.mul(torch.bmm(weights, v).view_as(rows), factor, out=rows)
        ctx.save_for_backward(*(saved or [queries, keys, values]))
        ctx.constants = layout, key.shape[1], rate, factor, scale
        return layout.packed(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple:
        """Returns the gradients of `query`, `key` and `value`."""
        layout, number, rate, factor, scale = ctx.constants
        saved = iter(ctx.saved_tensors)
        if not rate:
            queries, keys, values = saved
        gradients = layout.by_head(gradient * factor, number)
        if layout.tokens is not None:
            gradients *= layout.real[:, None, None]
        share = gradients.shape[2]
        of_queries = torch.empty_like(gradients)
        of_keys, of_values = (torch.empty_like(gradients[:, :, :1]) for _ in range(2))
        if any(block.queries != block.keys for block in layout.blocks):  # a key's gradient is then a sum over blocks
            precise = torch.promote_types(gradients.dtype, torch.float32)
            of_keys, of_values = (torch.zeros_like(each, dtype=precise) for each in (of_keys, of_values))
        with torch.autocast("cpu", enabled=False):
            for block, heads in layout.pieces(number, share):
                g = part(gradients, block.queries, heads, block.number)
                if rate:
                    q, k, v, probabilities, keep = itertools.islice(saved, 5)
                    weights = masked(probabilities, keep)
                    of_scores = masked(torch.bmm(g, v.transpose(1, 2)), keep)
                else:
                    q = part(queries, block.queries, heads, block.number) * scale
                    k, v = (part(each, block.keys, heads, block.number) for each in (keys, values))
                    weights = probabilities = probabilities_of(q, k, block, share)
                    of_scores = torch.bmm(g, v.transpose(1, 2))
                add(of_values[heads, block.keys], torch.bmm(weights.transpose(1, 2), g), block)
                torch._softmax_backward_data(of_scores, probabilities, -1, of_scores.dtype, grad_input=of_scores)
                rows = of_queries[heads, block.queries]
                torch.mul(torch.bmm(of_scores, k).view_as(rows), scale, out=rows)
                add(of_keys[heads, block.keys], torch.bmm(of_scores.transpose(1, 2), q), block)
        of_query, of_key, of_value = (
            layout.packed(each).to(gradient.dtype) for each in (of_queries, of_keys, of_values)
        )
        return of_query, of_key, of_value, None, None, None


def add(rows: Tensor, values: Tensor, block: Block) -> None:
    """Adds values to the gradient of some keys. The only block of a text sets it."""
    if block.queries == block.keys:
        rows.copy_(values.view_as(rows))
    else:
        rows += values.view_as(rows)


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
