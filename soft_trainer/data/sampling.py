"""Which rows meet in a batch: the joined batch of all processes, the same on every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch.utils.data import BatchSampler, DataLoader

from soft_trainer.errors import SetupError

TRIES = 64  # random batches to try for a row whose text occurs elsewhere, before all are looked through


class JoinedBatchSampler(BatchSampler):
    """Yields the row numbers of joined batches: a function of seed and epoch alone.

    Every process yields the same and takes its own part (`distributed.part`), so each knows the rows of all without a
    message, and a property of a batch holds for the joined one.

    Args:
        rows: how many rows there are.
        batch_size: rows of a joined batch, over all processes.
        strategy: a key of `STRATEGIES`.
        drop_last: leave out a last batch that is not full.
        text_ids: numbers of every row's texts, equal for equal texts; read by "no_duplicates".

    Raises:
        SetupError: an unknown strategy, or not one full batch.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        strategy: str = "random",
        seed: int = 0,
        drop_last: bool = True,
        text_ids: Sequence[np.ndarray] = (),
    ):
        if strategy not in STRATEGIES:
            raise SetupError(f"train_sampling_strategy={strategy!r}: use one of {', '.join(STRATEGIES)}")
        if drop_last and rows < batch_size:
            raise SetupError(
                f"{rows} training rows do not fill one batch of {batch_size} (per-process batch x processes): use a "
                "smaller batch, or --dataloader_drop_last false"
            )
        self.rows, self.batch_size, self.strategy = rows, batch_size, strategy
        self.seed, self.drop_last, self.text_ids, self.epoch = seed, drop_last, text_ids, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        yield from STRATEGIES[self.strategy](self, np.random.default_rng([self.seed, self.epoch]))

    def cut(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Batches of rows in the order given."""
        for batch in range(len(self)):
            yield list(order[batch * self.batch_size : (batch + 1) * self.batch_size])


def _random(sampler: JoinedBatchSampler, generator: np.random.Generator) -> Iterator[list[int]]:
    """Every batch a random draw."""
    return sampler.cut(generator.permutation(sampler.rows).tolist())


def _sequential(sampler: JoinedBatchSampler, generator: np.random.Generator) -> Iterator[list[int]]:
    """The order of the data set."""
    return sampler.cut(range(sampler.rows))


def _no_duplicates(sampler: JoinedBatchSampler, generator: np.random.Generator) -> Iterator[list[int]]:
    """Random batches in which no query and no code text occurs twice.

    Rows whose text occurs elsewhere are placed first, each in a random batch without its like; the others fill up. A
    row for which every batch has its like is left out of the epoch.
    """
    places = np.full(len(sampler), sampler.batch_size)
    places[-1] = min(sampler.rows - (len(sampler) - 1) * sampler.batch_size, sampler.batch_size)
    batches: list[list[int]] = [[] for _ in places]
    texts: list[set] = [set() for _ in places]
    shared = np.zeros(sampler.rows, dtype=bool)
    for ids in sampler.text_ids:
        shared |= np.bincount(ids, minlength=sampler.rows)[ids] > 1
    order = generator.permutation(sampler.rows)
    for row in order[shared[order]].tolist():
        own = {(side, int(ids[row])) for side, ids in enumerate(sampler.text_ids)}
        tried = [*generator.integers(len(places), size=TRIES), *generator.permutation(len(places))]
        batch = next((b for b in tried if places[b] and not own & texts[b]), None)
        if batch is not None:
            batches[batch].append(row)
            texts[batch] |= own
            places[batch] -= 1
    free = np.repeat(np.arange(len(places)), places)
    for row, batch in zip(order[~shared[order]].tolist(), generator.permutation(free).tolist(), strict=False):
        batches[batch].append(row)
    return (generator.permutation(batch).tolist() for batch in batches)


STRATEGIES: dict[str, Callable[[JoinedBatchSampler, np.random.Generator], Iterator[list[int]]]] = {
    "random": _random,
    "sequential": _sequential,
    "no_duplicates": _no_duplicates,
}


class EpochDataLoader(DataLoader):
    """A data loader whose sampler hears of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Called by `Trainer` before every epoch."""
        self.batch_sampler.set_epoch(epoch)
