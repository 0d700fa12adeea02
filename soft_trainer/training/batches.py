"""Builds one process's share of a global batch, in a data-loader worker, with everything that the loss needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from soft_trainer import distributed
from soft_trainer.comparisons import GlobalPairs
from soft_trainer.data.judgments import RightAnswers, Split
from soft_trainer.data.tokens import SIDES, TokenColumn, side_texts, text_ids
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.training.collator import PairCollator, Side
from soft_trainer.training.negatives import OwnNegatives

Weigh = Callable[[np.ndarray, np.ndarray, Tensor, Tensor | None, GlobalPairs | None], dict[str, Tensor]]


@dataclass
class Batch:
    """B queries of one process, with the N codes that they are compared with.

    If negatives are gathered, these are the codes of all processes, in the order of their ranks.

    Args:
        query, code: the model inputs for this process's queries and codes.
        rows: int64[B], the training pair of each query. NumPy arrays stay on the host.
        query_rows: int64[B], each query's row in the queries.
        code_rows: int64[N], the row in the corpus of each column's code.
        positives: LongTensor[B], the column of each query's own code.
        sizes: the number of queries of each process.
        code_sizes: the number of codes of each process, which is larger if queries have additional negatives.
        negatives: BoolTensor[B, N], True where a column is a negative. If None, all columns but the positive are.
        also: BoolTensor[B, N], True where a column is another right answer, or None if there are none.
        duplicates: the number of columns that are not used as negatives because they are duplicates.
        loss_inputs: what `Objective.weigh` computes, such as `weights`, Tensor[B, N]. If None, the training step
            computes it.
        pairs: the pairs of the global batch, if the loss compares queries with queries and codes with codes.
    """

    query: Side
    code: Side
    rows: np.ndarray
    query_rows: np.ndarray
    code_rows: np.ndarray
    positives: Tensor
    sizes: tuple[int, ...]
    code_sizes: tuple[int, ...]
    negatives: Tensor | None = None
    also: Tensor | None = None
    duplicates: int = 0
    loss_inputs: dict[str, Tensor] | None = None
    pairs: GlobalPairs | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Returns a copy with every tensor on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Returns a copy in pinned memory. `DataLoader` calls this method."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Applies `change` to every tensor."""
        changed = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed |= {side: getattr(self, side).mapped(change) for side in SIDES}
        if self.loss_inputs is not None:
            changed["loss_inputs"] = {name: change(tensor) for name, tensor in self.loss_inputs.items()}
        if self.pairs is not None:
            changed["pairs"] = self.pairs.mapped(change)
        return dataclasses.replace(self, **changed)

    def loss_scale(self, queries: int) -> float:
        """Returns the factor by which to multiply the mean loss over some of this process's queries.

        It is the number of processes times the number of these queries, divided by the number of queries in the global
        batch. When gradients are averaged over processes, the result equals the gradient of one process on the global
        batch.
        """
        return queries * len(self.sizes) / sum(self.sizes)

    def count_tokens(self, padding: bool) -> int:
        """Counts the tokens on both sides, with or without padding."""
        total = 0
        for chunk in (*self.query.chunks, *self.code.chunks):
            mask = chunk["attention_mask"]
            # With data flow, the mask has a row for every token. The first row shows which tokens are not padding.
            total += chunk["input_ids"].numel() if padding else int((mask if mask.dim() == 2 else mask[:, 0]).sum())
        return total


class TrainBatches(Dataset):
    """Turns the training pairs of a global batch into this process's `Batch`.

    It can be pickled, because data-loader workers receive a copy, and it is told the process's rank when it is made.

    Args:
        tokens: the token ids of each query, under "query", and of each code in the corpus, under "code".
        pairs: int64[P, 2], the query and the code of each training pair.
        collator: turns features into `{"query": ..., "code": ...}`.
        weigh: computes `Batch.loss_inputs` from queries, codes, positives and negatives. Given only if data-loader
            workers compute them.
        answers: tells which other codes answer a query. If None, only a query's own code does.
        duplicates: "mask" excludes other right answers from the loss. "positives" keeps them as right answers.
        gather: True to use the codes of all processes as negatives, False to use only those of this process.
        own_negatives: each query's additional negatives.
        compares_sides: True if the loss also compares queries with queries and codes with codes.
        rank, world_size: this process's rank and the number of processes.
    """

    def __init__(
        self,
        tokens: Mapping[str, TokenColumn],
        pairs: np.ndarray,
        collator: Callable,
        weigh: Weigh | None = None,
        answers: RightAnswers | None = None,
        duplicates: str = "mask",
        gather: bool = True,
        own_negatives: OwnNegatives | None = None,
        compares_sides: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.tokens = tokens
        self.pairs = pairs
        self.collator = collator
        self.weigh = weigh
        self.answers = answers
        self.duplicates = duplicates
        self.gather = gather
        self.own_negatives = own_negatives
        self.compares_sides = compares_sides
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> dict:
        query, code = self.pairs[row]
        return {"row": row, "query_ids": self.tokens["query"][query], "code_ids": self.tokens["code"][code]}

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens in each pair, both sides together, int64[P]."""
        queries, codes = self.pairs.T
        return self.tokens["query"].lengths.astype(np.int64)[queries] + self.tokens["code"].lengths[codes]

    def __getitems__(self, global_rows: Sequence[int]) -> Batch:
        """Returns this process's share of a global batch, which is given as `GlobalRows`."""
        epoch = getattr(global_rows, "epoch", 0)
        rows_of = self._shares(np.asarray(global_rows))
        queries_of = []
        own_codes_of = []
        for rows in rows_of:
            queries, codes = self.pairs[rows].T
            queries_of.append(queries)
            own_codes_of.append(codes)
        codes_of, meets = self._with_own_negatives(queries_of, own_codes_of, epoch)
        queries = queries_of[self.rank]
        if self.gather:
            codes = np.concatenate(codes_of)
            start = sum(map(len, codes_of[: self.rank]))
        else:
            codes = codes_of[self.rank]
            start = 0
        positives = torch.arange(start, start + len(queries))
        further = self._further_answers(queries, codes, positives, meets)
        negatives = meets
        if further is not None:
            if meets is None:
                negatives = ~further
            else:
                negatives = meets & ~further
        pairs = self._pairs(queries_of, own_codes_of, codes_of) if self.compares_sides else None
        loss_inputs = None
        if self.weigh is not None and len(queries):
            loss_inputs = self.weigh(queries, codes, positives, negatives, pairs)
        return Batch(
            **self._sides(rows_of, queries_of, codes_of),
            rows=rows_of[self.rank],
            query_rows=queries,
            code_rows=codes,
            positives=positives,
            sizes=tuple(map(len, queries_of)),
            code_sizes=tuple(map(len, codes_of)),
            negatives=negatives,
            also=further if self.duplicates == "positives" else None,
            duplicates=0 if further is None else int(further.sum()),
            loss_inputs=loss_inputs,
            pairs=pairs,
        )

    def _shares(self, values: np.ndarray) -> list[np.ndarray]:
        """Returns the share of each process."""
        return [values[distributed.shard(len(values), rank, self.world_size)] for rank in range(self.world_size)]

    def _further_answers(
        self, queries: np.ndarray, codes: np.ndarray, positives: Tensor, meets: Tensor | None
    ) -> Tensor | None:
        """Returns the right answers other than each query's own code, BoolTensor[B, N], or None if there are none."""
        if self.answers is None:
            return None
        further = self.answers.among(queries, codes).scatter(1, positives.unsqueeze(1), False)
        if meets is not None:
            further &= meets
        if bool(further.any()):
            return further
        return None

    def _pairs(
        self, queries_of: list[np.ndarray], own_codes_of: list[np.ndarray], codes_of: list[np.ndarray]
    ) -> GlobalPairs:
        """Returns the pairs of the global batch, or without gathering those of this process."""
        if not self.gather:
            queries = queries_of[self.rank]
            columns = torch.arange(len(queries))
            return GlobalPairs.of(queries, own_codes_of[self.rank], columns, slice(None), self.answers)
        columns = []
        start = 0
        for queries, codes in zip(queries_of, codes_of, strict=True):
            columns.append(torch.arange(start, start + len(queries)))  # additional negatives follow the own codes
            start += len(codes)
        first = sum(map(len, queries_of[: self.rank]))
        own = slice(first, first + len(queries_of[self.rank]))
        rows = np.concatenate(queries_of), np.concatenate(own_codes_of)
        return GlobalPairs.of(*rows, torch.cat(columns), own, self.answers)

    def _with_own_negatives(
        self, queries_of: list[np.ndarray], codes_of: list[np.ndarray], epoch: int
    ) -> tuple[list[np.ndarray], Tensor | None]:
        """Returns the codes of each process, and which pairs to compare, BoolTensor[B, N], or None to compare all."""
        if self.own_negatives is None:
            return codes_of, None
        if self.gather:
            # Drawn for the global batch, as one process would draw them, and then divided.
            added, drawn_for = self.own_negatives.columns(np.concatenate(queries_of), np.concatenate(codes_of), epoch)
            added_of = self._shares(added)
            own_of = np.split(self._shares(drawn_for)[self.rank], np.cumsum([len(part) for part in added_of])[:-1], 1)
            met_of = zip(codes_of, own_of, strict=True)
        else:
            # The draws of other processes matter too, because they decide the number of forward passes.
            drawn = [self.own_negatives.columns(*each, epoch) for each in zip(queries_of, codes_of, strict=True)]
            added_of = [added for added, _ in drawn]
            met_of = [(codes_of[self.rank], drawn[self.rank][1])]
        columns = []
        for codes, own in met_of:
            columns += [np.ones((len(own), len(codes)), dtype=bool), own]
        encoded = [np.concatenate(both) for both in zip(codes_of, added_of, strict=True)]
        return encoded, torch.from_numpy(np.concatenate(columns, axis=1))

    def _sides(
        self, rows_of: Sequence[np.ndarray], queries_of: Sequence[np.ndarray], codes_of: Sequence[np.ndarray]
    ) -> dict[str, Side]:
        """Collates the model inputs for both sides, with the same number of chunks on every process."""
        # A process without rows encodes a row of another process, and does not use the embedding.
        sides = {}
        if not isinstance(self.collator, PairCollator):
            if len(rows_of[self.rank]):
                rows = rows_of[self.rank]
            else:
                rows = rows_of[0][:1]
            features = self.collator([self[int(row)] for row in rows])
        for side, parts in (("query", queries_of), ("code", codes_of)):
            tokens = self.tokens[side]
            own = parts[self.rank]
            if isinstance(self.collator, PairCollator):
                passes = max(self.collator.count_chunks(tokens.lengths[part]) for part in parts)
                ids = [tokens[int(row)] for row in (own if len(own) else parts[0][:1])]
                sides[side] = self.collator.side(ids, passes, side)
            else:
                sides[side] = Side.of(features[side])
            if not len(own):
                sides[side] = Side(sides[side].chunks, sides[side].order[:0])
        return sides


def right_answers(split: Split, profile: EncoderProfile) -> RightAnswers:
    """Returns the right answers among the training rows, looked up by the texts that the encoder reads."""
    queries = text_ids(side_texts(split.queries, "query", profile))
    codes = text_ids(side_texts(split.corpus, "code", profile))
    return RightAnswers(split.judgments.answers, queries, codes)
