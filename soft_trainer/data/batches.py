"""The batch: one process's share of a global batch, made in a data worker with everything that its loss needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from soft_trainer import distributed
from soft_trainer.data.collator import PairCollator, Side
from soft_trainer.data.tokens import SIDES, TokenColumn, column_texts, side_settings, text_column
from soft_trainer.encoders.profiles import EncoderProfile

Weigh = Callable[[np.ndarray, np.ndarray, Tensor, Tensor | None], dict[str, Tensor]]


@dataclass
class Batch:
    """B queries of one process and the N codes that they meet.

    With gathered negatives the codes are those of all processes, in the order of the processes.

    Args:
        query, code: the model inputs of this process's queries and codes.
        rows: int64[B], the training row of each query. A NumPy array, so that it stays on the host.
        code_rows: int64[N], the training row of each column of the scores.
        positives: LongTensor[B], the column of each query's own code.
        sizes: the number of queries of each process.
        negatives: BoolTensor[B, N], True on the columns that count as negatives. None: all but the positive count.
        duplicates: the number of columns that are masked as duplicates.
        loss_inputs: `weights` or `similarity` of the loss, Tensor[B, N] each. None: the step computes them.
    """

    query: Side
    code: Side
    rows: np.ndarray
    code_rows: np.ndarray
    positives: Tensor
    sizes: tuple[int, ...]
    negatives: Tensor | None = None
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
        inputs = self.loss_inputs
        return dataclasses.replace(
            self,
            query=self.query.mapped(change),
            code=self.code.mapped(change),
            positives=change(self.positives),
            negatives=None if self.negatives is None else change(self.negatives),
            loss_inputs=None if inputs is None else {name: change(tensor) for name, tensor in inputs.items()},
        )

    def loss_scale(self, queries: int) -> float:
        """The factor on the mean loss of `queries` of this process's queries.

        With it the gradients that processes average are those of one process on the global batch: processes x
        queries / queries of the global batch.
        """
        return queries * len(self.sizes) / sum(self.sizes)

    def count_tokens(self, padding: bool) -> int:
        """The number of tokens of both sides, with or without padding."""
        total = 0
        for chunk in (*self.query.chunks, *self.code.chunks):
            mask = chunk["attention_mask"]
            # A mask with data flow has a row for every token; the first row shows the tokens that are there.
            total += chunk["input_ids"].numel() if padding else int((mask if mask.dim() == 2 else mask[:, 0]).sum())
        return total


class TrainBatches(Dataset):
    """Turns the rows of a global batch into this process's `Batch`.

    It is sent to the data workers, so it holds only what can be pickled, and the process's number from the start.

    Args:
        tokens: the token ids of "query" and of "code", by training row.
        collator: features -> `{"query": ..., "code": ...}`.
        weigh: (query rows, code rows, positives, negatives) -> `Batch.loss_inputs`, when workers compute them.
        text_ids: for "query" and "code" a number for every row's text, equal for equal texts, when duplicates are
            masked.
        gather: True if the codes of every process are negatives, False if only this process's are.
        rank, world_size: this process's number and the number of processes.
    """

    def __init__(
        self,
        tokens: Mapping[str, TokenColumn],
        collator: Callable,
        weigh: Weigh | None = None,
        text_ids: Mapping[str, np.ndarray] | None = None,
        gather: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.tokens, self.collator, self.weigh = tokens, collator, weigh
        self.text_ids, self.gather, self.rank, self.world_size = text_ids, gather, rank, world_size

    def __len__(self) -> int:
        return len(self.tokens["query"])

    def __getitem__(self, row: int) -> dict:
        return {"row": row} | {f"{side}_ids": self.tokens[side][row] for side in SIDES}

    def lengths(self) -> np.ndarray:
        """Tokens of every row, both sides together, int64[rows]."""
        return sum(self.tokens[side].lengths.astype(np.int64) for side in SIDES)

    def __getitems__(self, global_rows: Sequence[int]) -> Batch:
        """Returns this process's share of the global batch with these rows."""
        global_rows = np.asarray(global_rows)
        shards = [distributed.shard(len(global_rows), rank, self.world_size) for rank in range(self.world_size)]
        rows = global_rows[shards[self.rank]]
        code_rows = global_rows if self.gather else rows
        start = shards[self.rank].start if self.gather else 0
        positives = torch.arange(start, start + len(rows))
        negatives = self._without_duplicates(rows, code_rows, positives)
        return Batch(
            **self._sides(rows, [global_rows[shard] for shard in shards]),
            rows=rows,
            code_rows=code_rows,
            positives=positives,
            sizes=tuple(shard.stop - shard.start for shard in shards),
            negatives=negatives,
            duplicates=0 if negatives is None else int(negatives.numel() - negatives.sum()),
            loss_inputs=self.weigh(rows, code_rows, positives, negatives) if self.weigh and len(rows) else None,
        )

    def _sides(self, rows: np.ndarray, rows_of_processes: Sequence[np.ndarray]) -> dict[str, Side]:
        """The model inputs of both sides, in as many chunks on every process."""
        # A process without rows encodes a row of another process and uses none of its embeddings.
        features = [self[int(row)] for row in (rows if len(rows) else rows_of_processes[0][:1])]
        if isinstance(self.collator, PairCollator):
            passes = {
                side: max(self.collator.count_chunks(self.tokens[side].lengths[part]) for part in rows_of_processes)
                for side in SIDES
            }
            sides = self.collator(features, passes)
        else:
            sides = {side: Side.of(inputs) for side, inputs in self.collator(features).items()}
        return {side: inputs if len(rows) else inputs.without_rows() for side, inputs in sides.items()}

    def _without_duplicates(self, rows: np.ndarray, code_rows: np.ndarray, positives: Tensor) -> Tensor | None:
        """BoolTensor[B, N], False where a negative has the query's or the code's text; None if nothing is masked."""
        if self.text_ids is None:
            return None
        same = np.zeros((len(rows), len(code_rows)), dtype=bool)
        for ids in self.text_ids.values():
            same |= ids[rows][:, None] == ids[code_rows][None, :]
        if same.sum() == len(rows):
            return None
        negatives = torch.from_numpy(~same)
        return negatives.scatter_(1, positives.unsqueeze(1), True)


def text_ids_of(rows: datasets.Dataset, profile: EncoderProfile) -> dict[str, np.ndarray]:
    """For "query" and "code" the `text_ids` of every row."""
    columns = {side: text_column(rows, side_settings(profile, side)["columns"], side) for side in SIDES}
    return {side: text_ids(column_texts(rows, column)) for side, column in columns.items()}


def text_ids(texts: Iterable[str]) -> np.ndarray:
    """A number for every text, equal for equal texts, uint64[rows].

    The number is a hash. Among 250,000 texts, two different ones share a number with a probability of 2e-9.
    """
    return np.fromiter((xxhash.xxh3_64_intdigest(text.encode()) for text in texts), np.uint64)
