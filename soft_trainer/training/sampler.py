"""Draws global batches, each of which contains the training rows that all processes use in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from transformers import TrainingArguments

from soft_trainer.errors import UserError
from soft_trainer.training.batches import ignore_interrupts
from soft_trainer.training.clusters import similar_batches

TRIES = 64  # random batches to try for a row with a repeated text, before trying every batch with room
SORTED_TOGETHER = 50  # the rows of this many batches are sorted by length together, as in `Trainer`


class GlobalRows(list):
    """The row indices of a global batch, as a list with the epoch as an attribute."""

    def __init__(self, rows: Iterable[int], epoch: int):
        super().__init__(rows)
        self.epoch = epoch


@dataclass(eq=False)
class GlobalBatchSampler(BatchSampler):
    """A sampler that yields the row indices of each global batch. The batches depend only on the seed and the epoch.

    Every process draws the same batches and takes its shard of each batch (`distributed.shard`). Each process
    therefore knows all other processes' rows without communication, and a strategy such as "no_duplicates" applies to
    the global batch.

    Args:
        rows: the number of training rows.
        batch_size: the number of rows in a global batch, across all processes.
        strategy: "random", "sequential", "no_duplicates", "group_by_length", "one_language" or "similar".
        seed: the seed for all draws.
        drop_last: whether to drop the last batch if it is incomplete. The only batch, or the only one of a language,
            is never dropped.
        text_ids: for "no_duplicates", the ids of the queries' texts and of the functions' texts, one array each. Equal
            texts have equal ids.
        lengths: for "group_by_length", the number of tokens in each row.
        languages: for "one_language", the language of each row.
        similar: for "similar", other arguments of `similar_batches`.

    Raises:
        UserError: the rows have no languages, which the strategy "one_language" needs.
    """

    rows: int
    batch_size: int
    strategy: str = "random"
    seed: int = 0
    drop_last: bool = True
    text_ids: Sequence[np.ndarray] = ()
    lengths: np.ndarray | None = None
    languages: Sequence[str] = ()
    similar: Mapping | None = None
    epoch = 0

    def __post_init__(self):
        self.names, self.language_of = np.unique(np.asarray(self.languages, dtype=str), return_inverse=True)
        counts = [self.rows]
        if self.strategy == "one_language":
            if len(self.languages) == 0:
                raise UserError("train_sampling_strategy='one_language': the training rows have no column 'language'")
            counts = np.bincount(self.language_of).tolist()
        size = self.batch_size = min(self.batch_size, self.rows)
        self.batches = sum(max(count // size, 1) if self.drop_last else -(-count // size) for count in counts)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch whose batches the next iteration yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        strategies = {
            "random": self._random,
            "sequential": self._sequential,
            "no_duplicates": self._no_duplicates,
            "group_by_length": self._group_by_length,
            "one_language": self._one_language,
            "similar": self._similar,
        }
        draw = strategies[self.strategy]
        for rows in draw(np.random.default_rng([self.seed, self.epoch])):
            yield GlobalRows(rows, self.epoch)

    def _split(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Cuts a sequence of rows into batches, in order. Drops an incomplete last batch if `drop_last` is set."""
        for start in range(0, len(order), self.batch_size):
            batch = list(order[start : start + self.batch_size])
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def _split_parts(self, parts: Iterable[np.ndarray], generator: np.random.Generator) -> Iterator[list[int]]:
        """Cuts each part into batches, so that no batch mixes parts, and yields the batches in random order."""
        batches = []
        for part in parts:
            batches += self._split(part.tolist())
        return _shuffled(batches, generator)

    def _random(self, generator: np.random.Generator) -> Iterator[list[int]]:
        """Yields batches of the strategy "random": rows in random order."""
        return self._split(generator.permutation(self.rows).tolist())

    def _sequential(self, _: np.random.Generator) -> Iterator[list[int]]:
        """Yields batches of the strategy "sequential": rows in their original order."""
        return self._split(range(self.rows))

    def _no_duplicates(self, generator: np.random.Generator) -> Iterator[list[int]]:
        """Yields random batches without repeated query or code texts. Rows that fit into no batch are skipped."""
        capacity = np.minimum(self.batch_size, self.rows - self.batch_size * np.arange(len(self)))
        texts_of = shared_texts(self.text_ids)
        order = generator.permutation(self.rows).tolist()
        batches = _apart([row for row in order if row in texts_of], texts_of, capacity, generator)
        others = [row for row in order if row not in texts_of]
        free = np.repeat(np.arange(len(capacity)), capacity - [len(batch) for batch in batches])
        for row, batch in zip(others, generator.permutation(free).tolist(), strict=False):
            batches[batch].append(row)
        return (generator.permutation(batch).tolist() for batch in batches)

    def _group_by_length(self, generator: np.random.Generator) -> Iterator[list[int]]:
        """Yields batches of rows of similar length, by sorting shuffled rows for SORTED_TOGETHER batches at a time."""
        order = generator.permutation(self.rows)
        size = SORTED_TOGETHER * self.batch_size
        parts = (order[start : start + size] for start in range(0, self.rows, size))
        return self._split_parts((part[np.argsort(-self.lengths[part])] for part in parts), generator)

    def _one_language(self, generator: np.random.Generator) -> Iterator[list[int]]:
        """Yields random batches, each in a single language, with the languages in random order."""
        order = generator.permutation(self.rows)
        batches = []
        for language in range(len(self.names)):
            rows = order[self.language_of[order] == language].tolist()
            batches += list(self._split(rows)) or [rows]
        return _shuffled(batches, generator)

    def _similar(self, generator: np.random.Generator) -> Iterator[list[int]]:
        """Yields batches of small groups of similar rows, in random order."""
        options = {"batch_size": self.batch_size, "generator": generator, "drop_last": self.drop_last}
        return _shuffled(similar_batches(**options, **self.similar), generator)


def _shuffled(batches: list[list[int]], generator: np.random.Generator) -> Iterator[list[int]]:
    return (batches[index] for index in generator.permutation(len(batches)))


def _apart(
    rows: Sequence[int], texts_of: Mapping[int, set], capacity: np.ndarray, generator: np.random.Generator
) -> list[list[int]]:
    """Assigns each row to a random batch that has room and contains none of the row's texts, in linear time.

    Args:
        rows: the rows to assign.
        texts_of: the ids of each row's texts.
        capacity: the number of rows that fit into each batch.

    Returns:
        The rows of each batch. A row that fits into no batch is skipped.
    """
    batches: list[list[int]] = [[] for _ in capacity]
    texts_in: list[set] = [set() for _ in capacity]
    held: Counter = Counter()  # the number of batches that contain a text
    room = capacity.tolist()
    with_room = list(range(len(capacity)))
    index_of = with_room.copy()  # the position of a batch in `with_room`
    without: dict[object, list[int]] = {}  # for a common text, the batches that lack it
    for row in rows:
        texts = texts_of[row]
        drawn = (with_room[int(draw * len(with_room))] for draw in generator.random(TRIES if with_room else 0))
        batch = next((batch for batch in drawn if texts.isdisjoint(texts_in[batch])), None)
        if batch is None:
            common = max(texts, key=held.__getitem__)
            if common not in without:
                without[common] = generator.permutation(with_room).tolist()
            # Texts are never removed from a batch, so a batch with the common text need not be tried again.
            without[common] = [b for b in without[common] if room[b] and common not in texts_in[b]]
            batch = next((b for b in without[common] if texts.isdisjoint(texts_in[b])), None)
        if batch is None:
            continue
        batches[batch].append(row)
        texts_in[batch] |= texts
        held.update(texts)
        room[batch] -= 1
        if not room[batch]:
            last = with_room.pop()
            if last != batch:
                with_room[index_of[batch]] = last
                index_of[last] = index_of[batch]
    return batches


def shared_texts(text_ids: Sequence[np.ndarray]) -> dict[int, set]:
    """Finds the rows that share a query text or a code text with another row, and returns their shared texts.

    Args:
        text_ids: the ids of the queries' texts and of the functions' texts, one array each.

    Returns:
        A dict from row to a set of (array number, text id).
    """
    texts: dict[int, set] = {}
    for side, ids in enumerate(text_ids):
        _, which, counts = np.unique(ids, return_inverse=True, return_counts=True)
        for row in np.flatnonzero(counts[which] > 1).tolist():
            texts.setdefault(row, set()).add((side, int(which[row])))
    return texts


def data_seed(args: TrainingArguments) -> int:
    """Returns the seed for drawing batches and hard negatives: `data_seed` if it is set, otherwise `seed`."""
    if args.data_seed is None:
        return args.seed
    return args.data_seed


def languages_of(dataset) -> Sequence[str]:
    """Returns the column `language` of a data set, or () if there is no such column."""
    if "language" in dataset.column_names:
        return dataset["language"]
    return ()


def unchanged(batch):
    """Returns a batch that its data set has collated already."""
    return batch


class EpochDataLoader(DataLoader):
    """A data loader that passes `set_epoch` on to its batch sampler, and draws a seed in each epoch."""

    @classmethod
    def for_training(cls, batches: Dataset, sampler: GlobalBatchSampler, args: TrainingArguments) -> EpochDataLoader:
        """Makes a loader for a data set that builds whole batches, using the data-loader options in `args`."""
        workers = args.dataloader_num_workers
        return cls(
            batches,
            batch_sampler=sampler,
            collate_fn=unchanged,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            worker_init_fn=ignore_interrupts,
            # Only newer versions of transformers have this option, and only a loader with workers accepts it.
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None) if workers else None,
        )

    def __iter__(self):
        """Starts an epoch. Draws from torch's random numbers whether or not the workers are persistent."""
        if self._iterator is not None:  # persistent workers, for which torch draws a seed only once
            torch.empty((), dtype=torch.int64).random_()
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch. `Trainer` calls this method before each epoch."""
        self.batch_sampler.set_epoch(epoch)
