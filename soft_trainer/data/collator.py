"""Turns rows into padded tensors: a batch keeps its rows, and each side is padded in chunks of similar length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.chunks import ChunkCost, chunk_by_length, split_chunks
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.encoding import pad, token_count


@dataclass
class Side:
    """One side of a batch, in the chunks in which it is encoded.

    Args:
        chunks: the model inputs of each chunk.
        order: LongTensor[B], the position of each row of the batch among the rows of all chunks. Other rows of the
            chunks are encoded without effect.
    """

    chunks: list[dict[str, Tensor]]
    order: Tensor

    @classmethod
    def of(cls, inputs: Side | Mapping) -> Side:
        """Wraps a collator's output: model inputs, or `{"chunks": [inputs, ...], "order": LongTensor}`."""
        if isinstance(inputs, cls):
            return inputs
        if "chunks" in inputs:
            return cls(list(inputs["chunks"]), inputs["order"])
        return cls([dict(inputs)], torch.arange(len(next(iter(inputs.values())))))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Side:
        """Returns the side with `change` applied to every tensor."""
        chunks = [{name: change(tensor) for name, tensor in chunk.items()} for chunk in self.chunks]
        return Side(chunks, change(self.order))

    def without_rows(self) -> Side:
        """Returns the side with the same forward passes but none of the batch's rows."""
        return Side(self.chunks, self.order[:0])

    def with_passes(self, number: int) -> Side:
        """Returns the side with at least `number` chunks; the added ones have no effect."""
        one_row = {name: tensor[:1] for name, tensor in self.chunks[0].items()}
        return Side(self.chunks + [one_row] * (number - len(self.chunks)), self.order)


class PairCollator:
    """Pads the pairs of a batch, each side by itself, to the longest row of its chunk.

    Args:
        pad_token_id: the tokenizer's.
        cost: the cost of encoding a chunk. None: each side is one chunk.
        largest_chunk: the largest number of rows in a chunk.
        prompt_lengths: for "query" and "code", how many tokens at the start of every row are left out of the pooling.
    """

    def __init__(
        self,
        pad_token_id: int,
        cost: ChunkCost | None = None,
        largest_chunk: int | None = None,
        prompt_lengths: Mapping[str, int] | None = None,
    ):
        self.pad_token_id, self.cost, self.largest_chunk = pad_token_id, cost, largest_chunk
        self.prompt_lengths = dict(prompt_lengths or {})

    def __call__(self, features: Sequence[dict], passes: Mapping[str, int] | None = None) -> dict[str, Side]:
        """Collates features with `query_ids` and `code_ids`.

        Args:
            passes: the number of chunks of each side, at least as many as `count_chunks` says.
        """
        return {
            side: self.side([feature[f"{side}_ids"] for feature in features], (passes or {}).get(side, 1), side)
            for side in SIDES
        }

    def side(self, token_ids: Sequence[np.ndarray], passes: int = 1, name: str = "query") -> Side:
        """Collates the side `name` of a batch in the cheapest number of chunks, but at least `passes`."""
        lengths = np.fromiter(map(token_count, token_ids), dtype=np.int64, count=len(token_ids))
        chunks = split_chunks(chunk_by_length(lengths, self.cost, self.largest_chunk), passes)
        order = np.empty(len(token_ids), dtype=np.int64)
        order[np.concatenate(chunks)] = np.arange(len(token_ids))
        prompt = self.prompt_lengths.get(name, 0)
        padded = [pad([token_ids[row] for row in chunk], self.pad_token_id, prompt) for chunk in chunks]
        return Side(padded, torch.from_numpy(order)).with_passes(passes)

    def count_chunks(self, lengths: np.ndarray) -> int:
        """Counts the chunks that rows with these lengths, int64[B], are split into; 1 if there are no rows."""
        return len(chunk_by_length(lengths, self.cost, self.largest_chunk)) if len(lengths) else 1
