"""Draws batches from several sources of training rows. All rows of a batch come from one source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch.utils.data import BatchSampler

from soft_trainer.errors import UserError
from soft_trainer.terminal import nearest
from soft_trainer.training.sampler import GlobalBatchSampler, GlobalRows

SEEDS_APART = 1_000_003  # the difference between the seeds of two sources


class SourceSampler(BatchSampler):
    """A sampler of global batches from several sources. Rows of different sources never share a batch.

    Negatives from another source would be too easy. Within a source, a `GlobalBatchSampler` draws the batches. An
    epoch ends when a source has too few batches left for its fraction. All draws depend only on the seed and the
    epoch.

    Args:
        sources: the number of rows in each source, keyed by name. The rows of a source are adjacent, in this order.
        sampling: "proportional" (every row once per epoch), "round_robin" (one batch from each source in turn), or
            fractions of the batches, such as "general=0.2". Other sources divide the remaining fraction in proportion
            to their numbers of batches.
        rest: other arguments of `GlobalBatchSampler`. Arrays have one value for each row of all sources.

    Raises:
        UserError: a fraction is invalid, or a source has too few rows.
    """

    def __init__(self, sources: Mapping[str, int], sampling: str, batch_size: int, strategy: str, seed: int, **rest):
        self.batch_size = batch_size
        self.drop_last = rest.get("drop_last", True)
        self.seed = seed
        self.epoch = 0
        self.sampling = sampling
        self.in_order = strategy == "sequential"
        self.samplers: list[GlobalBatchSampler] = []
        ends = np.cumsum([*sources.values()]).tolist()
        self.starts = [0, *ends[:-1]]
        for number, (name, start, end) in enumerate(zip(sources, self.starts, ends, strict=True)):
            own = _restricted(rest, slice(start, end))
            try:
                sampler = GlobalBatchSampler(
                    end - start, batch_size, strategy, seed=seed + number * SEEDS_APART, **own
                )
            except UserError as error:
                raise UserError(f"source {name}: {error}") from None
            self.samplers.append(sampler)
        available = {name: len(sampler) for name, sampler in zip(sources, self.samplers, strict=True)}
        self.counts = batches_of(available, sampling)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch whose batches the next iteration yields."""
        self.epoch = epoch
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[list[int]]:
        batches = [iter(sampler) for sampler in self.samplers]
        for source in self._order():
            rows = next(batches[source])
            yield GlobalRows((self.starts[source] + row for row in rows), self.epoch)

    def _order(self) -> list[int]:
        """Returns the source number of each batch in the epoch."""
        if self.sampling == "round_robin":
            return [*range(len(self.samplers))] * self.counts[0]
        order = np.repeat(np.arange(len(self.samplers)), self.counts)
        if self.in_order:
            return order.tolist()
        return np.random.default_rng([self.seed, self.epoch]).permutation(order).tolist()


def batches_of(available: Mapping[str, int], sampling: str) -> list[int]:
    """Returns how many batches an epoch takes from each source, in the order of `available`.

    Args:
        available: the number of batches in each source, keyed by name.
        sampling: see `SourceSampler`.

    Raises:
        UserError: a fraction is invalid.
    """
    if sampling == "proportional":
        return [*available.values()]
    if sampling == "round_robin":
        return [min(available.values())] * len(available)
    shares = _shares(available, sampling)
    total = int(min(available[name] / share for name, share in shares.items()) + 1e-9)
    counts = {name: min(available[name], int(total * share + 0.5)) for name, share in shares.items()}
    if not all(counts.values()):
        empty = min(counts, key=counts.get)
        raise UserError(
            f"source_sampling={sampling}: an epoch of {total} batches has none from {empty}; increase its share"
        )
    return [counts[name] for name in available]


def _shares(available: Mapping[str, int], sampling: str) -> dict[str, float]:
    """Parses fractions such as "general=0.2" and returns each source's fraction of the batches. They add up to 1."""
    shares = {}
    for part in sampling.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        sources = ", ".join(available)
        if name not in available:
            raise UserError(
                f"source_sampling={sampling}: no source {name!r}; the sources are {sources}{nearest(name, available)}"
            )
        if name in shares:
            raise UserError(f"source_sampling={sampling}: list each source once; the sources are {sources}")
        try:
            shares[name] = float(value)
        except ValueError:
            shares[name] = np.nan
        if not 0 < shares[name] < 1:
            raise UserError(f"source_sampling={sampling}: the share of {name} must be a number between 0 and 1")
    left = 1 - sum(shares.values())
    others = {name: count for name, count in available.items() if name not in shares}
    if (others and left <= 0) or (not others and abs(left) > 1e-6):
        raise UserError(f"source_sampling={sampling}: the shares of all sources must add up to 1")
    for name, count in others.items():
        shares[name] = left * count / sum(others.values())
    return shares


def _restricted(arguments: Mapping, rows: slice) -> dict:
    """Reduces the per-row arrays among the arguments of `GlobalBatchSampler` to the rows of one source."""
    own = dict(arguments)
    if len(own.get("text_ids", ())):
        own["text_ids"] = tuple(ids[rows] for ids in own["text_ids"])
    for name in ("lengths", "languages"):
        if own.get(name) is not None:
            own[name] = own[name][rows]
    if own.get("similar") is not None:
        own["similar"] = {**own["similar"], "pairs": own["similar"]["pairs"][rows]}
    return own
