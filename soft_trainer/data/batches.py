"""Batches: one process's share of a global batch, made in a data worker with everything that the loss needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import pandas as pd
import scipy.sparse
import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.utils.data import Dataset

from soft_trainer import distributed
from soft_trainer.data.collator import PairCollator, Side
from soft_trainer.data.negatives import Negatives, draw, own_columns
from soft_trainer.data.tokens import SIDES, TokenColumn, side_texts, text_ids
from soft_trainer.encoders.profiles import EncoderProfile

Weigh = Callable[[np.ndarray, np.ndarray, Tensor, Tensor | None], dict[str, Tensor]]


@dataclass
class Batch:
    """B queries of one process and the N codes that they are compared with.

    With gathered negatives these are the codes of all processes, in the order of the processes.

    Args:
        query, code: the model inputs of this process's queries and codes.
        rows: int64[B], the training row of each query. A NumPy array, so that it stays on the host.
        code_rows: int64[N], the training row of each column of the scores.
        positives: LongTensor[B], the column of each query's own code.
        sizes: the number of queries of each process.
        code_sizes: the number of codes of each process; more than its queries if they have extra negatives.
        negatives: BoolTensor[B, N], True on the columns that count as negatives. None: all but the positive count.
        also: BoolTensor[B, N], True on further right answers. None: there are none.
        duplicates: the number of columns that do not count as negatives because they are duplicates.
        loss_inputs: `weights` or `similarity` of the loss, Tensor[B, N] each. None: the step computes them.
    """

    query: Side
    code: Side
    rows: np.ndarray
    code_rows: np.ndarray
    positives: Tensor
    sizes: tuple[int, ...]
    code_sizes: tuple[int, ...]
    negatives: Tensor | None = None
    also: Tensor | None = None
    duplicates: int = 0
    loss_inputs: dict[str, Tensor] | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Returns the batch with every tensor on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Returns the batch in pinned memory; called by `DataLoader`."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Applies `change` to every tensor."""
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed |= {side: getattr(self, side).mapped(change) for side in SIDES}
        if self.loss_inputs is not None:
            changed["loss_inputs"] = {name: change(tensor) for name, tensor in self.loss_inputs.items()}
        return dataclasses.replace(self, **changed)

    def loss_scale(self, queries: int) -> float:
        """Returns the factor by which to multiply the mean loss of `queries` of this process's queries.

        It is processes x queries / queries of the global batch. The averaged gradients of the processes then equal
        those of one process on the global batch.
        """
        return queries * len(self.sizes) / sum(self.sizes)

    def count_tokens(self, padding: bool) -> int:
        """Counts the tokens of both sides, with or without padding."""
        total = 0
        for chunk in (*self.query.chunks, *self.code.chunks):
            mask = chunk["attention_mask"]
            # A mask with data flow has a row for every token; the first row shows the tokens that are there.
            total += chunk["input_ids"].numel() if padding else int((mask if mask.dim() == 2 else mask[:, 0]).sum())
        return total


@dataclass(frozen=True)
class OwnNegatives:
    """Extra negatives of each row, redrawn every epoch.

    Args:
        negatives: the candidates of every row.
        number: how many are drawn for a row.
        seed: determines the draws, together with epoch and row number.
    """

    negatives: Negatives
    number: int
    seed: int

    def columns(self, rows: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the extra codes for these rows, int64[E], and which row uses which, bool[B, E]."""
        return own_columns(rows, *draw(self.negatives, self.number, rows, self.seed, epoch))


class TrainBatches(Dataset):
    """Turns the rows of a global batch into this process's `Batch`.

    It is sent to the data workers, so it holds only what can be pickled, and takes the process's number up front.

    Args:
        tokens: the token ids of "query" and of "code", by training row; code-only rows follow the training rows.
        collator: features -> `{"query": ..., "code": ...}`.
        weigh: (query rows, code rows, positives, negatives) -> `Batch.loss_inputs`, when workers compute them.
        text_ids: for "query" and "code" a number for every row's text, equal for equal texts, if duplicates matter.
        duplicates: "mask" drops a negative with the query's or the code's text, "positives" makes it another right
            answer.
        gather: True if the codes of every process are negatives, False if only this process's are.
        own_negatives: extra negatives of each row.
        rank, world_size: this process's number and the number of processes.
    """

    def __init__(
        self,
        tokens: Mapping[str, TokenColumn],
        collator: Callable,
        weigh: Weigh | None = None,
        text_ids: Mapping[str, np.ndarray] | None = None,
        duplicates: str = "mask",
        gather: bool = True,
        own_negatives: OwnNegatives | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.tokens = tokens
        self.collator = collator
        self.weigh = weigh
        self.text_ids = text_ids
        self.duplicates = duplicates
        self.gather = gather
        self.own_negatives = own_negatives
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return len(self.tokens["query"])

    def __getitem__(self, row: int) -> dict:
        return {"row": row} | {f"{side}_ids": self.tokens[side][row] for side in SIDES}

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of every row, both sides together, int64[rows]."""
        return sum(self.tokens[side].lengths.astype(np.int64) for side in SIDES)

    def __getitems__(self, global_rows: Sequence[int]) -> Batch:
        """Returns this process's share of the global batch with these rows (of an epoch: `GlobalRows`)."""
        epoch = getattr(global_rows, "epoch", 0)
        global_rows = np.asarray(global_rows)
        shards = [distributed.shard(len(global_rows), rank, self.world_size) for rank in range(self.world_size)]
        rows_of = [global_rows[shard] for shard in shards]
        rows = rows_of[self.rank]
        codes_of, meets = self._codes(rows_of, epoch)
        code_rows = np.concatenate(codes_of) if self.gather else codes_of[self.rank]
        start = sum(map(len, codes_of[: self.rank])) if self.gather else 0
        positives = torch.arange(start, start + len(rows))
        ids = self.text_ids
        same = None if ids is None else same_texts(ids, rows, code_rows, positives, meets)
        negatives = meets if same is None else (~same if meets is None else meets & ~same)
        return Batch(
            **self._sides(rows_of, codes_of),
            rows=rows,
            code_rows=code_rows,
            positives=positives,
            sizes=tuple(map(len, rows_of)),
            code_sizes=tuple(map(len, codes_of)),
            negatives=negatives,
            also=same if same is not None and self.duplicates == "positives" else None,
            duplicates=0 if same is None else int(same.sum()),
            loss_inputs=self.weigh(rows, code_rows, positives, negatives) if self.weigh and len(rows) else None,
        )

    def _codes(self, rows_of: Sequence[np.ndarray], epoch: int) -> tuple[list[np.ndarray], Tensor | None]:
        """Returns the codes that each process encodes, and which query sees which, BoolTensor[B, N]; None if all."""
        if self.own_negatives is None:
            return list(rows_of), None
        if self.gather:
            # Drawn for the global batch, as one process would draw them, and then divided.
            codes, meets = self.own_negatives.columns(np.concatenate(rows_of), epoch)
            shards = [distributed.shard(len(codes), rank, self.world_size) for rank in range(self.world_size)]
            added = [codes[shard] for shard in shards]
            meets = meets[distributed.shard(len(meets), self.rank, self.world_size)]
            columns = list(zip(rows_of, (meets[:, shard] for shard in shards), strict=True))
        else:
            # Includes other processes' draws, because the number of their forward passes depends on them.
            added, masks = zip(*(self.own_negatives.columns(rows, epoch) for rows in rows_of), strict=True)
            columns = [(rows_of[self.rank], masks[self.rank])]
        parts = []
        for rows, own in columns:
            parts += [np.ones((len(own), len(rows)), dtype=bool), own]
        codes_of = [np.concatenate(both) for both in zip(rows_of, added, strict=True)]
        return codes_of, torch.from_numpy(np.concatenate(parts, 1))

    def _sides(self, rows_of: Sequence[np.ndarray], codes_of: Sequence[np.ndarray]) -> dict[str, Side]:
        """Collates the model inputs of both sides, in the same number of chunks on every process."""
        # A process without rows encodes a row of another process and uses none of its embeddings.
        spare = rows_of[0][:1]
        sides = {}
        if not isinstance(self.collator, PairCollator):
            rows = rows_of[self.rank] if len(rows_of[self.rank]) else spare
            features = self.collator([self[int(row)] for row in rows])
        for side, parts in (("query", rows_of), ("code", codes_of)):
            tokens = self.tokens[side]
            own = parts[self.rank]
            if isinstance(self.collator, PairCollator):
                passes = max(self.collator.count_chunks(tokens.lengths[part]) for part in parts)
                ids = [tokens[int(row)] for row in (own if len(own) else spare)]
                sides[side] = self.collator.side(ids, passes, side)
            else:
                sides[side] = Side.of(features[side])
            if not len(own):
                sides[side] = Side(sides[side].chunks, sides[side].order[:0])
        return sides


def same_texts(
    text_ids: Mapping[str, np.ndarray],
    rows: np.ndarray,
    code_rows: np.ndarray,
    positives: Tensor,
    meets: Tensor | None = None,
) -> Tensor | None:
    """Finds other columns that have the query's or the code's text, BoolTensor[B, N]; None if there are none.

    Args:
        text_ids: for "query" and "code" a number for every row's text, equal for equal texts.
        rows, code_rows: the rows of queries and columns, int64[B] and int64[N].
        positives: LongTensor[B], column of each query's own code.
        meets: BoolTensor[B, N], the columns to look at. None: all of them.
    """
    same = np.zeros((len(rows), len(code_rows)), dtype=bool)
    for ids in text_ids.values():
        same |= ids[rows][:, None] == ids[code_rows][None, :]
    same = torch.from_numpy(same).scatter_(1, positives.unsqueeze(1), False)
    same = same if meets is None else same & meets
    return same if bool(same.any()) else None


def text_ids_of(rows: datasets.Dataset, profile: EncoderProfile) -> dict[str, np.ndarray]:
    """Returns the `text_ids` of every row, by side. Codes with one url, versions of a function, are equal."""
    ids = {side: text_ids(side_texts(rows, side, profile)) for side in SIDES}
    if "url" not in rows.column_names:
        return ids
    urls = [url or f"\0{row}" for row, url in enumerate(rows["url"][:])]
    texts, numbers = pd.factorize(ids["code"])
    functions, names = pd.factorize(np.array(urls, dtype=object))
    if len(names) < len(rows):
        # Codes that are linked by equal texts or urls get the smallest of their numbers.
        size = len(numbers) + len(names)
        links = scipy.sparse.coo_array((np.ones(len(rows), bool), (texts, len(numbers) + functions)), (size, size))
        groups = connected_components(links, directed=False)[1][texts]
        ids["code"] = pd.Series(ids["code"]).groupby(groups).transform("min").to_numpy()
    return ids
