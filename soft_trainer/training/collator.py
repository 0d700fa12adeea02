"""Collates tokenised rows into tensors: packed without padding, or padded.

On a GPU, each side of a padded batch is one chunk, because each forward pass costs thousands of kernel launches. On a
CPU, a side is divided into chunks of similar length, which saves padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.encoding import mapped_inputs, pad, padded_width, token_count
from soft_trainer.encoders.packing import pack

STEP = 8  # tokens; lengths are rounded up to a multiple, because finer chunks gain nothing
# The fixed cost of a layer on a CPU, in operations that take equally long. Training is equally fast with half or four
# times this value.
LAYER_OVERHEAD = 1.6e8
# A static encoder's gradient has a row for each token of the vocabulary, and every chunk computes all of them. A row
# costs as much as this many tokens of padding.
STATIC_PADDING = 100


@dataclass(frozen=True)
class ChunkCost:
    """A model of the cost of encoding a chunk, in units of one token's cost without attention.

    A chunk of n rows padded to L tokens costs `overhead + n L (1 + attention L)`.

    Args:
        overhead: the fixed cost of a chunk (kernel launches, small matrices).
        attention: the additional cost per token for each token that it attends to.
    """

    overhead: float = 64.0
    attention: float = 5e-4

    @classmethod
    def of(cls, hidden_size: int) -> ChunkCost:
        """Estimates the cost for a transformer with `hidden_size` on a CPU."""
        return cls(LAYER_OVERHEAD / (24 * hidden_size**2), 1 / (6 * hidden_size))

    @classmethod
    def of_model(cls, model) -> ChunkCost:
        """Estimates the cost for a model on a CPU, either a transformer or a static encoder."""
        if getattr(model, "takes_means", False):
            return cls(STATIC_PADDING * model.config.vocab_size, attention=0.0)
        return cls.of(model.config.hidden_size)


def chunk_by_length(
    lengths: np.ndarray, cost: ChunkCost | None, largest: int | None = None, number: int = 1
) -> list[np.ndarray]:
    """Splits rows into chunks of similar length, to minimise the estimated cost of encoding all chunks.

    Args:
        lengths: int[B], the number of tokens in each row.
        cost: the cost to minimise. If None, all rows form a single chunk in their original order.
        largest: the maximum number of rows in a chunk.
        number: the minimum number of chunks, at most one per row. The largest chunks are split to reach this number.

    Returns:
        The row indices of each chunk, the longest rows first.
    """
    if cost is None or len(lengths) < 2:
        chunks = [np.arange(len(lengths))]
    else:
        chunks = _cheapest(lengths, cost)
    if largest is not None:
        parts = []
        for chunk in chunks:
            parts += np.split(chunk, range(largest, len(chunk), largest))
        chunks = parts
    while len(chunks) < min(number, len(lengths)):
        place = max(range(len(chunks)), key=lambda place: len(chunks[place]))
        chunks[place : place + 1] = np.array_split(chunks[place], 2)
    return chunks


def _cheapest(lengths: np.ndarray, cost: ChunkCost) -> list[np.ndarray]:
    """Finds the cheapest way to divide rows into chunks, by dynamic programming over the distinct lengths."""
    rows = np.argsort(-lengths, kind="stable")
    steps = -(-lengths[rows] // STEP)
    starts = np.flatnonzero(np.diff(steps, prepend=steps[0] + 1))  # first row of each distinct length
    padded = steps[starts] * float(STEP)
    per_row = padded * (1 + cost.attention * padded)
    ends = np.append(starts[1:], len(rows))
    best = np.zeros(len(starts) + 1)
    last = np.zeros(len(starts) + 1, dtype=np.int64)  # the start of the last chunk
    for i in range(1, len(starts) + 1):
        totals = best[:i] + cost.overhead + (ends[i - 1] - starts[:i]) * per_row[:i]
        last[i] = totals.argmin()
        best[i] = totals[last[i]]
    chunks = []
    i = len(starts)
    while i:
        chunks.append(rows[starts[last[i]] : ends[i - 1]])
        i = last[i]
    return chunks[::-1]


@dataclass
class Side:
    """The model inputs of a batch's queries or functions, in chunks that are encoded one after another.

    A chunk is the result of `pad` or `pack`.

    Args:
        chunks: the model inputs for each chunk.
        order: LongTensor[B], the position of each row of the batch among the rows of all chunks. Other rows in the
            chunks are encoded but not used.
    """

    chunks: list[dict]
    order: Tensor

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Side:
        """Returns a copy with `change` applied to every tensor, for example to move them to another device."""
        return Side([mapped_inputs(chunk, change) for chunk in self.chunks], change(self.order))


class PairCollator:
    """A collator that packs the texts of a batch, or divides each side into chunks and pads them.

    Args:
        pad_token_id: the tokenizer's padding id.
        cost: the cost of encoding a padded chunk. If None, all queries form one chunk, and so do all functions.
        largest_chunk: the maximum number of rows in a chunk.
        prompt_lengths: the number of leading tokens that pooling skips, keyed by "query" and "code".
        limits: the maximum number of tokens, keyed by "query" and "code". If given, chunks are padded to one of a few
            lengths. If None, a chunk is padded only to its longest row.
        first_position: the position of a text's first token, for packing. If None, texts are padded instead.
    """

    def __init__(
        self,
        pad_token_id: int,
        cost: ChunkCost | None = None,
        largest_chunk: int | None = None,
        prompt_lengths: Mapping[str, int] | None = None,
        limits: Mapping[str, int] | None = None,
        first_position: int | None = None,
    ):
        self.pad_token_id = pad_token_id
        self.cost = cost
        self.largest_chunk = largest_chunk
        self.prompt_lengths = dict(prompt_lengths or {})
        self.limits = limits
        self.first_position = first_position

    @property
    def joins_sides(self) -> bool:
        """True if the queries and the functions of a batch are packed into a single chunk."""
        return self.first_position is not None and self.largest_chunk is None

    def __call__(self, features: Sequence[dict]) -> dict[str, Side]:
        """Collates features with `query_ids` and `code_ids` into model inputs, keyed by "query" and "code"."""
        sides = {}
        for side in SIDES:
            sides[side] = self.side([feature[f"{side}_ids"] for feature in features], name=side)
        return sides

    def side(self, token_ids: Sequence[np.ndarray], passes: int = 1, name: str = "query") -> Side:
        """Collates the token ids of queries or functions into at least `passes` chunks, at the lowest cost.

        Args:
            name: "query" or "code".
        """
        lengths = np.fromiter(map(token_count, token_ids), dtype=np.int64, count=len(token_ids))
        chunks = chunk_by_length(lengths, self.cost, self.largest_chunk, passes)
        order = np.empty(len(token_ids), dtype=np.int64)
        order[np.concatenate(chunks)] = np.arange(len(token_ids))
        # A batch with fewer rows than passes encodes one row again and discards the embedding.
        chunks += [np.zeros(1, dtype=np.int64)] * (passes - len(chunks))
        inputs = [self._inputs([token_ids[row] for row in chunk], name) for chunk in chunks]
        return Side(inputs, torch.from_numpy(order))

    def _inputs(self, token_ids: Sequence[np.ndarray], side: str) -> dict:
        """Returns the model inputs of one chunk of queries or functions."""
        prompt = self.prompt_lengths.get(side, 0)
        if self.first_position is not None:
            return pack(token_ids, prompt, self.first_position)
        width = 1
        if self.limits is not None:
            width = padded_width(max(map(token_count, token_ids)), self.limits[side])
        return pad(token_ids, self.pad_token_id, prompt, width)

    def joined(self, queries: Sequence[np.ndarray], codes: Sequence[np.ndarray]) -> dict:
        """Packs the token ids of queries and functions into one chunk, queries first."""
        prompts = [self.prompt_lengths.get(side, 0) for side in SIDES]
        return pack([*queries, *codes], np.repeat(prompts, [len(queries), len(codes)]), self.first_position)

    def count_chunks(self, lengths: np.ndarray) -> int:
        """Counts the chunks that `side` makes for rows with these lengths, int64[B]. No rows make one chunk."""
        if len(lengths):
            return len(chunk_by_length(lengths, self.cost, self.largest_chunk))
        return 1
