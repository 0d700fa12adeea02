"""Which rows meet in a batch: the joined batch of all processes, the same on every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch.utils.data import BatchSampler, DataLoader

from soft_trainer.errors import SetupError

STRATEGIES: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "random": lambda rows, generator: generator.permutation(rows),
    "sequential": lambda rows, generator: np.arange(rows),
}


class JoinedBatchSampler(BatchSampler):
    """Yields the row numbers of joined batches: a function of seed and epoch alone.

    Every process yields the same and takes its own part (`distributed.part`), so each knows the rows of all without a
    message, and a property of a batch holds for the joined one.

    Args:
        rows: how many rows there are.
        batch_size: rows of a joined batch, over all processes.
        strategy: a key of `STRATEGIES`.
        drop_last: leave out a last batch that is not full.

    Raises:
        SetupError: an unknown strategy, or not one full batch.
    """

    def __init__(self, rows: int, batch_size: int, strategy: str = "random", seed: int = 0, drop_last: bool = True):
        if strategy not in STRATEGIES:
            raise SetupError(f"train_sampling_strategy={strategy!r}: use one of {', '.join(STRATEGIES)}")
        if drop_last and rows < batch_size:
            raise SetupError(
                f"{rows} training rows do not fill one batch of {batch_size} (per-process batch x processes): use a "
                "smaller batch, or --dataloader_drop_last false"
            )
        self.rows, self.batch_size, self.strategy = rows, batch_size, strategy
        self.seed, self.drop_last, self.epoch = seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = STRATEGIES[self.strategy](self.rows, np.random.default_rng([self.seed, self.epoch]))
        for batch in range(len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()


class EpochDataLoader(DataLoader):
    """A data loader whose sampler hears of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Called by `Trainer` before every epoch."""
        self.batch_sampler.set_epoch(epoch)
