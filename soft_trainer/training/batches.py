"""Builds one process's shard of each global batch in data workers: model inputs and targets."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from soft_trainer.data.columns import text_ids
from soft_trainer.data.split import RelevantCodes, Split
from soft_trainer.data.tokens import SIDES, TokenColumn, encoder_texts
from soft_trainer.encoders.encoding import mapped_inputs
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.system import distributed
from soft_trainer.training.collator import Inputs, PairCollator
from soft_trainer.training.negatives import HardNegatives
from soft_trainer.training.targets import TargetMaker


class Batch(dict):
    """A training batch on one process: B queries, and the N functions that the loss compares them with.

    A dict whose keys are attributes too, so that `batch["rows"]` and `batch.rows` are the same, and the methods of
    `transformers.Trainer` can read it. If negatives are gathered, the N functions come from all processes, ordered by
    rank. The keys:

        passes           list[dict], the model inputs of each forward pass of this process; see `Inputs`
        queries          LongTensor[B], the index of each of this process's queries among the embeddings of the passes
        codes            LongTensor[C], the index of each of this process's functions
        targets          `Targets`, the positives and negatives of the B queries. The loader gives the estimator's
                         similarities at most; the step makes the weights from them (`TargetMaker.add_weights`)
        rows             int64[B], the index of each query's training pair. NumPy arrays stay on the host
        query_rows       int64[B], the index of each query in the split's queries
        code_rows        int64[N], the index of each column's code in the corpus
        sizes            tuple[int], the number of queries on each process
        share            the batch's rows x the number of batches / the rows of all batches in the optimizer step: 1 if
                         the accumulated batches have equally many rows
        code_sizes       tuple[int], the number of functions on each process, including hard negatives
        false_negatives  the number of (query, column) entries that do not count as negatives, being known positives
        has_weights      True once the targets have their weights
    """

    def __getattr__(self, name: str):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a batch has no {name}") from None

    def to(self, device: torch.device | str) -> Batch:
        """Returns a copy of the batch with every tensor on `device`."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Returns a copy of the batch in pinned memory. `DataLoader` calls this method."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns a copy of the batch with `change` applied to every tensor."""
        return Batch(
            self,
            passes=[mapped_inputs(inputs, change) for inputs in self.passes],
            queries=change(self.queries),
            codes=change(self.codes),
            targets=self.targets.mapped(change),
        )

    def loss_scale(self, queries: int) -> float:
        """Returns the factor by which to multiply the mean loss over a block of this process's queries.

        The factor is the number of queries in the block, times the number of processes, divided by the number of
        queries in the global batch, times `share`. The average of the scaled gradients over all processes and all
        accumulated batches is then the gradient of the mean loss of all their queries.

        Args:
            queries: the number of queries in the block.
        """
        return queries * len(self.sizes) / sum(self.sizes) * self.share


@dataclass(frozen=True)
class Share:
    """The part of a global batch that one process encodes, as indices of pairs, queries and functions.

    Args:
        rows: int64[B], the training pairs.
        queries: int64[B], the query of each pair.
        positives: int64[B], the code of each pair.
        added: int64[E], the hard negatives that this process encodes.
    """

    rows: np.ndarray
    queries: np.ndarray
    positives: np.ndarray
    added: np.ndarray

    @property
    def codes(self) -> np.ndarray:
        """The functions that this process encodes: the positives, then the hard negatives."""
        return np.concatenate([self.positives, self.added])


@dataclass(eq=False)
class TrainBatches(Dataset):
    """A data set that turns the indices of a global batch's training pairs into one process's `Batch`.

    The process's rank is an argument, because data workers receive a pickled copy of this object.

    Args:
        tokens: the token ids of each query, under "query", and of each function in the corpus, under "code".
        pairs: int64[P, 2], the query and the code of each training pair.
        collator: turns token ids into model inputs.
        target_maker: finds positives and negatives, and asks the estimator for similarities. Without an estimator, the
            training step asks.
        gather: True to use the functions of all processes as negatives, or False to use only this process's functions.
        hard_negatives: draws additional negatives for each query, or None.
        rank, world_size: this process's rank and the number of processes.
    """

    tokens: Mapping[str, TokenColumn]
    pairs: np.ndarray
    collator: Callable
    target_maker: TargetMaker
    gather: bool = True
    hard_negatives: HardNegatives | None = None
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> dict:
        query, code = self.pairs[row]
        return {"row": row, "query_ids": self.tokens["query"][query], "code_ids": self.tokens["code"][code]}

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens in each pair, query plus code, int64[P]."""
        queries, codes = self.pairs.T
        return self.tokens["query"].lengths.astype(np.int64)[queries] + self.tokens["code"].lengths[codes]

    def __getitems__(self, global_rows: Sequence[int]) -> Batch:
        """Builds this process's `Batch` from a global batch, passed as `GlobalRows`."""
        shares = self._shares(np.asarray(global_rows), getattr(global_rows, "epoch", 0))
        own = shares[self.rank]
        compared = shares if self.gather else [own]  # the shares whose functions are the columns
        codes = np.concatenate([share.codes for share in compared])
        first = sum(len(share.codes) for share in shares[: self.rank]) if self.gather else 0
        positives = torch.arange(first, first + len(own.rows))
        targets, known = self.target_maker.find_positives(own.queries, codes, positives)
        if len(own.rows):
            targets = self.target_maker.add_similarity(targets, own.queries, codes)
        inputs = self._inputs(shares)
        return Batch(
            passes=inputs.passes,
            queries=inputs.queries,
            codes=inputs.codes,
            targets=targets,
            rows=own.rows,
            query_rows=own.queries,
            code_rows=codes,
            sizes=tuple(len(share.rows) for share in shares),
            share=1.0,
            code_sizes=tuple(len(share.codes) for share in shares),
            false_negatives=known,
            has_weights=False,
        )

    def _shares(self, rows: np.ndarray, epoch: int) -> list[Share]:
        """Divides a global batch among the processes, and draws its hard negatives for this epoch."""
        none = np.empty(0, dtype=np.int64)
        shares = [Share(own, *self.pairs[own].T, none) for own in self._divided(rows)]
        if self.hard_negatives is None:
            return shares
        if not self.gather:
            # The draws of other processes are needed too, because they determine the number of forward passes.
            drawn = [self.hard_negatives.columns(share.queries, share.positives, epoch) for share in shares]
        else:
            # Draw for the global batch, as a single process would, then divide the draws among the processes.
            queries, codes = self.pairs[rows].T
            drawn = self._divided(self.hard_negatives.columns(queries, codes, epoch))
        return [dataclasses.replace(share, added=added) for share, added in zip(shares, drawn, strict=True)]

    def _divided(self, values: np.ndarray) -> list[np.ndarray]:
        """Splits an array into one shard per process."""
        return [values[distributed.shard(len(values), rank, self.world_size)] for rank in range(self.world_size)]

    def _inputs(self, shares: Sequence[Share]) -> Inputs:
        """Collates this process's queries and functions into model inputs, in as many passes as on every process."""
        if not isinstance(self.collator, PairCollator):  # a custom collator, which works only in one process
            inputs = self.collator([self[int(row)] for row in shares[0].rows])
            if not isinstance(inputs, Mapping) or not {*SIDES} <= inputs.keys():
                raise UserError(
                    "data_collator: expected {'query': inputs, 'code': inputs}, made of query_ids and code_ids, "
                    f"not {list(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__}"
                )
            number = len(shares[0].rows)
            return Inputs([dict(inputs[side]) for side in SIDES], *torch.arange(2 * number).split(number))
        own = shares[self.rank]
        texts = {"query": self._tokens("query", own.queries), "code": self._tokens("code", own.codes)}
        counts = {
            "query": self.collator.count(max(len(share.queries) for share in shares)),
            "code": self.collator.count(max(len(share.codes) for share in shares)),
        }
        # A process without rows encodes a row of another process.
        spare = {
            "query": self._tokens("query", shares[0].queries[:1])[0],
            "code": self._tokens("code", shares[0].codes[:1])[0],
        }
        return self.collator(texts, spare, counts)

    def _tokens(self, side: str, rows: np.ndarray) -> list:
        """Returns the tokens of queries or functions."""
        return [self.tokens[side][int(row)] for row in rows]


def ignore_interrupts(worker: int) -> None:
    """Makes a data worker ignore Ctrl-C, which reaches all processes of a terminal. The trainer ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def relevant_codes(split: Split, profile: EncoderProfile) -> RelevantCodes:
    """Returns a look-up of relevant functions among the training rows, by the texts that the encoder reads."""
    queries = text_ids(encoder_texts(split.queries, "query", profile))
    codes = text_ids(encoder_texts(split.corpus, "code", profile))
    return RelevantCodes(split.judgments.stored, queries, codes)
