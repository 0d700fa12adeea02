"""From rows to padded tensors: a batch stays as sampled, each side goes in chunks of like length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from soft_trainer.data.chunks import ChunkCost, chunk_by_length
from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.encoding import pad, token_count


class PairCollator:
    """Pads the pairs of a batch, each side by itself, to the longest of its chunk.

    Args:
        pad_token_id: the tokenizer's.
        cost: what a chunk costs beside its tokens; None pads each side in one piece.
        largest_chunk: rows that a chunk may have at most.
    """

    def __init__(self, pad_token_id: int, cost: ChunkCost | None = None, largest_chunk: int | None = None):
        self.pad_token_id, self.cost, self.largest_chunk = pad_token_id, cost, largest_chunk

    def __call__(self, features: Sequence[dict]) -> dict:
        """`{"query": side, "code": side}` of features with `query_ids` and `code_ids`.

        A side is `{"chunks": [inputs, ...], "order": LongTensor[B]}`: the model's inputs of each chunk, and for each
        row of the batch its place in the joined chunks.
        """
        return {side: self.side([feature[f"{side}_ids"] for feature in features]) for side in SIDES}

    def side(self, token_ids: Sequence[np.ndarray]) -> dict:
        """One side of a batch, in chunks."""
        lengths = np.fromiter(map(token_count, token_ids), dtype=np.int64, count=len(token_ids))
        chunks = chunk_by_length(lengths, self.cost, self.largest_chunk)
        order = np.empty(len(token_ids), dtype=np.int64)
        order[np.concatenate(chunks)] = np.arange(len(token_ids))
        padded = [pad([token_ids[row] for row in chunk], self.pad_token_id) for chunk in chunks]
        return {"chunks": padded, "order": torch.from_numpy(order)}
