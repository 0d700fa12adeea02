"""One process's part of a global batch, with all that its loss needs beside the embeddings, made in a data worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from soft_trainer import distributed
from soft_trainer.data.tokens import SIDES, TokenColumn


class TrainBatches(Dataset):
    """Turns the rows of a global batch into this process's inputs.

    Args:
        tokens: the token ids of "query" and of "code".
        collator: features -> model inputs.
        estimate: (query rows, code rows, positives, negatives) -> tensors of B rows for the loss, when those are to be
            computed ahead of the step.
        text_ids: for "query" and "code" a number for every row's text, equal for equal texts, when duplicates are to
            be masked.
        gather: whether the codes of every process are negatives, or this process's alone.
    """

    def __init__(
        self,
        tokens: dict[str, TokenColumn],
        collator: Callable,
        estimate: Callable | None = None,
        text_ids: dict[str, np.ndarray] | None = None,
        gather: bool = True,
    ):
        self.tokens, self.collator, self.estimate = tokens, collator, estimate
        self.text_ids, self.gather = text_ids, gather

    def __len__(self) -> int:
        return len(self.tokens["query"])

    def __getitem__(self, row: int) -> dict:
        return {"row": row} | {f"{side}_ids": self.tokens[side][row] for side in SIDES}

    def lengths(self) -> np.ndarray:
        """Tokens of every row, both sides, int64[rows]."""
        return sum(self.tokens[side].lengths.astype(np.int64) for side in SIDES)

    def __getitems__(self, joined: Sequence[int]) -> dict:
        """The collated inputs of this process's part, and of the loss:

        `rows` int64[B] and `code_rows` int64[N] (those whose codes meet these queries), NumPy arrays so that they stay
        on the host; `positives` LongTensor[B]; `sizes`, the rows of each process; `negatives` BoolTensor[B, N] where a
        duplicate is masked; `duplicates`, how many are; what `estimate` gives.
        """
        rank, processes = distributed.rank_and_world_size()
        joined = np.asarray(joined)
        parts = [distributed.shard(len(joined), process, processes) for process in range(processes)]
        rows = joined[parts[rank]]
        code_rows = joined if self.gather else rows
        start = parts[rank].start if self.gather else 0
        batch = self.collator([self[int(row)] for row in rows])
        batch["rows"], batch["code_rows"] = rows, code_rows
        batch["positives"] = torch.arange(start, start + len(rows))
        batch["sizes"] = [part.stop - part.start for part in parts]
        negatives = self._negatives(rows, code_rows, batch["positives"])
        batch["duplicates"] = 0
        if negatives is not None:
            batch["negatives"] = negatives
            batch["duplicates"] = int(negatives.numel() - negatives.sum())
        if self.estimate is not None:
            batch |= self.estimate(rows, code_rows, batch["positives"], negatives)
        return batch

    def _negatives(self, rows, code_rows, positives) -> torch.Tensor | None:
        """False where a negative's query or code text equals the positive's; None when no negative's does."""
        if self.text_ids is None:
            return None
        same = np.zeros((len(rows), len(code_rows)), dtype=bool)
        for ids in self.text_ids.values():
            same |= ids[rows][:, None] == ids[code_rows][None, :]
        if same.sum() == len(rows):
            return None
        negatives = torch.from_numpy(~same)
        return negatives.scatter_(1, positives.unsqueeze(1), True)


def text_ids(texts: Iterable[str]) -> np.ndarray:
    """A number for every text, equal for equal texts, uint64[rows].

    It is a hash: of 250,000 texts two unequal ones share theirs with a chance of 2 in a thousand million.
    """
    return np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), np.uint64)
