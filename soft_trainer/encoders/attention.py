"""Defines the attention of packed passes: each token attends only to tokens of the same text.

`attend` is registered with `transformers` under the name `PACKED`. On a GPU, it calls torch's variable-length flash
kernel. On a CPU, where torch has no such kernel, `TextAttention` computes short texts of similar length together, and
long texts in parts. Without borders between texts, in a padded pass, `attend` computes attention as "sdpa" does.
"""

from __future__ import annotations

import contextlib
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
        attention_mask: ignored in a packed pass.

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

    def part(self, values: Tensor, positions: slice, heads: slice) -> Tensor:
        """Returns a part of Tensor[heads, P, m, d], as Tensor[heads x n, L m, d]."""
        chosen = values[heads, positions]
        return chosen.reshape(len(chosen) * self.number, -1, values.shape[-1])

    def inputs(self, heads: slice, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Returns the block's parts of the queries, keys and values."""
        positions = self.queries, self.keys, self.keys
        return [
            self.part(each, position, heads) for each, position in zip((query, key, value), positions, strict=True)
        ]

    def probabilities(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns the softmax of the scores, Tensor[heads x n, q m, k]."""
        scores = torch.bmm(query, key.transpose(1, 2))
        if self.bias is not None:
            shape = -1, self.number, self.bias.shape[1], scores.shape[1] // self.bias.shape[1], scores.shape[2]
            scores.view(shape)[..., self.first :].add_(self.bias.to(scores.dtype))
        return torch.softmax(scores, -1, out=scores)


@dataclass(frozen=True)
class Layout:
    """Orders the tokens of a packed pass by the lengths of their texts, and divides the texts' scores into blocks.

    Args:
        tokens: LongTensor[P], the packed token at each position, or None if this is the packed order, as for one text.
            Padding repeats a text's first token.
        real: BoolTensor[P], False on padding.
        positions: LongTensor[T], the position of each packed token.
    """

    tokens: Tensor | None
    real: Tensor
    positions: Tensor
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
            values = values.index_select(0, self.positions)
        return values

    def pieces(self, queries: Tensor) -> Iterator[tuple[Block, slice]]:
        """Yields each block with some of the heads at a time, so that their scores are at most `SCORES`."""
        heads, _, share, _ = queries.shape
        for block in self.blocks:
            rows = (block.queries.stop - block.queries.start) * share
            step = max(SCORES * block.number // (rows * (block.keys.stop - block.keys.start)), 1)
            for start in range(0, heads, step):
                yield block, slice(start, start + step)


@lru_cache(maxsize=4)  # all layers of a pass have the same layout, or two if only some have a window
def layout_of(borders: Sequence[int], causal: bool, window: int | None) -> Layout:
    """Divides the texts between these borders into blocks."""
    starts = np.array(borders[:-1])
    lengths = np.diff(borders)
    before = borders[-1] if window is None else window
    after = 0 if causal else before
    steps = -(-lengths // STEP)
    tokens = []
    reals = []
    blocks = []
    done = 0
    for step in np.unique(steps[steps > 0]):
        of_step = np.flatnonzero(steps == step)
        number = max(LARGEST_GROUP // int(step * STEP) ** 2, 1)
        for texts in np.split(of_step, range(number, len(of_step), number)):
            length = lengths[texts, None]
            position = np.arange(length.max())
            real = position < length
            tokens.append((starts[texts, None] + position * real).reshape(-1))
            reals.append(real.reshape(-1))
            last = done + real.size - len(position)  # where the last text starts
            for top in range(0, len(position), ROWS):
                rows = slice(top, min(top + ROWS, len(position)))
                columns = slice(max(top - before, 0), min(rows.stop + after, len(position)))
                apart = position[rows, None] - position[columns]
                seen = real[:, None, columns] & (apart <= before) & (apart >= -after)
                hidden = real[:, rows, None] & ~seen  # padding sees all: a softmax over nothing is NaN
                first = int(hidden.any((0, 1)).argmax())
                bias = None
                if hidden.any():
                    bias = torch.zeros(hidden[..., first:].shape)
                    bias = bias.masked_fill_(torch.from_numpy(hidden[..., first:]), -math.inf)[:, :, None]
                queries = slice(done + top, last + rows.stop)
                keys = slice(done + columns.start, last + columns.stop)
                blocks.append(Block(len(texts), queries, keys, bias, first))
            done = last + len(position)
    tokens = torch.from_numpy(np.concatenate(tokens))
    real = torch.from_numpy(np.concatenate(reals))
    positions = torch.empty(borders[-1], dtype=torch.int64)
    positions[tokens[real]] = real.nonzero()[:, 0]
    if torch.equal(tokens, torch.arange(borders[-1])):
        tokens = None
    return Layout(tokens, real, positions, blocks)


def kept(shape: Sequence[int], dropped: int) -> Tensor:
    """Draws which values dropout keeps, CharTensor: -1, or 0 with the probability `dropped` / 256.

    A value takes one random byte, and eight bytes come from one random integer. `bernoulli_` takes ten times as long.
    """
    number = math.prod(shape)
    drawn = torch.empty((number + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    drawn = drawn.view(torch.int8)[:number]
    return torch.ge(drawn, dropped - 128, out=torch.empty_like(drawn)).neg_().view(shape)


def masked(values: Tensor, keep: Tensor) -> Tensor:
    """Returns a copy of `values` that is 0 where `keep` is 0."""
    bits = BITS[values.dtype]
    return values.view(bits).bitwise_and(keep.to(bits)).view(values.dtype)


def put(rows: Tensor, values: Tensor, factor: float = 1.0, adds: bool = False) -> None:
    """Sets or adds to a part of Tensor[heads, P, m, d] the product of a factor and Tensor[heads x n, L m, d]."""
    values = values.view_as(rows)
    if adds:
        rows += values
    else:
        torch.mul(values, factor, out=rows)


class TextAttention(torch.autograd.Function):
    """Computes softmax(scale Q K') V within each text, with dropout of the probabilities.

    With dropout, the probabilities are kept for the backward pass. Otherwise, it computes them again.
    """

    @staticmethod
    def forward(ctx, query, key, value, layout: Layout, rate: float, scale: float) -> Tensor:
        """Returns Tensor[T, heads, d]. `query`, `key` and `value` are Tensor[T, heads, d]."""
        dropped = min(round(rate * 256), 255)
        factor = 256 / (256 - dropped)
        heads = key.shape[1]
        whole = [layout.by_head(each, heads) for each in (query * scale, key, value)]
        outputs = torch.empty_like(whole[0])
        saved = []
        with torch.autocast("cpu", enabled=False):
            for block, some in layout.pieces(outputs):
                q, k, v = block.inputs(some, *whole)
                weights = block.probabilities(q, k)
                if dropped:
                    keep = kept(weights.shape, dropped)
                    saved += [q, k, v, weights, keep]
                    weights = masked(weights, keep)
                put(outputs[some, block.queries], torch.bmm(weights, v), factor)
        ctx.save_for_backward(*(saved or whole))
        ctx.constants = layout, heads, dropped, factor, scale
        return layout.packed(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple:
        """Returns the gradients of `query`, `key` and `value`."""
        layout, heads, dropped, factor, scale = ctx.constants
        saved = ctx.saved_tensors
        gradients = layout.by_head(gradient * factor, heads)
        if layout.tokens is not None:
            gradients *= layout.real[:, None, None]
        of_query = torch.empty_like(gradients)
        of_key, of_value = (torch.empty_like(gradients[:, :, :1]) for _ in range(2))
        adds = any(block.queries != block.keys for block in layout.blocks)  # a key's gradient is a sum over blocks
        if adds:
            precise = torch.promote_types(gradient.dtype, torch.float32)
            of_key, of_value = (torch.zeros_like(each, dtype=precise) for each in (of_key, of_value))
        with torch.autocast("cpu", enabled=False):
            for number, (block, some) in enumerate(layout.pieces(gradients)):
                g = block.part(gradients, block.queries, some)
                if dropped:
                    q, k, v, probabilities, keep = saved[5 * number : 5 * number + 5]
                    weights = masked(probabilities, keep)
                    of_scores = masked(torch.bmm(g, v.transpose(1, 2)), keep)
                else:
                    q, k, v = block.inputs(some, *saved)
                    weights = probabilities = block.probabilities(q, k)
                    of_scores = torch.bmm(g, v.transpose(1, 2))
                put(of_value[some, block.keys], torch.bmm(weights.transpose(1, 2), g), adds=adds)
                torch._softmax_backward_data(of_scores, probabilities, -1, of_scores.dtype, grad_input=of_scores)
                put(of_query[some, block.queries], torch.bmm(of_scores, k), scale)
                put(of_key[some, block.keys], torch.bmm(of_scores.transpose(1, 2), q), adds=adds)
        parts = (layout.packed(each).to(gradient.dtype) for each in (of_query, of_key, of_value))
        return *parts, None, None, None


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
