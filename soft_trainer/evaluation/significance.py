"""Tests whether one system ranks the same queries better than another, and by how much.

Each query contributes the difference between the two systems' reciprocal ranks. The mean of these differences is the
difference in MRR. Only the differences, `ArrayLike[Q]`, are resampled. The results are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from soft_trainer.errors import UserError

RESAMPLES = 10_000
TAIL = 0.025  # the probability outside a 95 % interval, on each side
_NUMBERS = 2**22  # resampled numbers in memory at once, 32 MB


class Interval(NamedTuple):
    """A 95 % confidence interval for the mean difference a - b between systems a and b."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two systems, a and b, on the same queries."""

    delta: float  # the MRR of a minus the MRR of b
    interval: Interval  # the paired bootstrap interval of `delta`
    p: float  # the two-sided p-value of the randomisation test, not corrected for multiple comparisons
    wins: int  # the number of queries that a ranks better
    losses: int
    ties: int


def difference_text(delta: float, interval: Interval, digits: int = 4) -> str:
    """Formats a difference in MRR with its interval: `+0.0120 (+0.0070 to +0.0165)`."""
    return f"{delta:+.{digits}f} ({interval.low:+.{digits}f} to {interval.high:+.{digits}f})"


def reciprocal_ranks(ranks: ArrayLike) -> np.ndarray:
    """Converts ranks, which start at 1, to reciprocal ranks, float64[Q]. Raises UserError for a rank below 1."""
    ranks = np.asarray(ranks, dtype=np.float64)
    if not (ranks >= 1).all():
        raise UserError("ranks: expected numbers of 1 or more")
    return 1 / ranks


def paired_bootstrap(differences: ArrayLike) -> Interval:
    """Computes the percentile bootstrap interval of the mean difference from 10,000 resamples of the queries."""
    batch = max(1, _NUMBERS // len(differences))
    rng = np.random.default_rng(0)
    settings = {"n_resamples": RESAMPLES, "confidence_level": 1 - 2 * TAIL, "method": "percentile"}
    interval = stats.bootstrap((differences,), np.mean, batch=batch, rng=rng, **settings).confidence_interval
    return Interval(float(interval.low), float(interval.high))


def stratified_bootstrap(strata: Sequence[ArrayLike]) -> Interval:
    """Computes the percentile bootstrap interval of the mean difference over the queries of several sets and seeds.

    Each resample draws both seeds and queries within every set, because both would vary in a repeated experiment.
    SciPy's `bootstrap` resamples only one dimension.

    Args:
        strata: for each set, the differences of S seeds and Q queries, float64[S, Q].
    """
    generator = np.random.default_rng(0)
    sums = np.zeros(RESAMPLES)
    queries = 0
    for differences in map(np.asarray, strata):
        seeds, number = differences.shape
        drawn_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
        batch = max(1, _NUMBERS // number)
        for start in range(0, RESAMPLES, batch):
            block = slice(start, min(start + batch, RESAMPLES))
            drawn_queries = generator.multinomial(number, np.full(number, 1 / number), block.stop - start)
            sums[block] += np.einsum("rs,sr->r", drawn_seeds[block], differences @ drawn_queries.T)
        queries += number
    low, high = np.quantile(sums / queries, [TAIL, 1 - TAIL])
    return Interval(float(low), float(high))


def randomisation_test(differences: ArrayLike, n_resamples: int = RESAMPLES) -> float:
    """Computes the two-sided p-value of the null hypothesis that two systems differ only by chance.

    Under this hypothesis, a query's two values are exchangeable, so the sign of their difference is random. The test
    is equivalent to SciPy's `permutation_test` on paired samples, but drawing signs is ten times faster. The smallest
    possible p-value is 2 / (n_resamples + 1).

    Args:
        differences: the difference between the two systems on each query.
    """
    differences = np.asarray(differences)
    difference = differences[differences != 0]  # a tie has no sign
    if len(difference) == 0:
        return 1.0
    generator = np.random.default_rng(0)
    result = stats.monte_carlo_test(
        difference,
        lambda size: difference * (1 - 2 * generator.integers(0, 2, size, dtype=np.int8)),
        np.sum,
        n_resamples=n_resamples,
        batch=max(1, _NUMBERS // len(difference)),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Corrects p-values for multiple comparisons by Holm's method, which bounds the probability of any false finding.

    The smallest p-value is multiplied by the number of comparisons, the next by one less, and so on. Each result is at
    least as large as the one before. SciPy offers only `false_discovery_control`, which bounds the expected proportion
    of false findings.
    """
    order = np.argsort(p_values)
    steps = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    return np.minimum(np.maximum.accumulate(steps), 1.0)[np.argsort(order)]


def compare_paired(a: ArrayLike, b: ArrayLike) -> Comparison:
    """Compares systems a and b on one value per query, such as the reciprocal rank averaged over several runs.

    Raises:
        UserError: there are fewer than two queries, or the systems have different numbers of queries.
    """
    a = np.asarray(a, dtype=np.float64)
    b = np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise UserError(f"Two systems must rank the same queries: got {a.size} and {b.size} values.")
    if a.size < 2:
        raise UserError(f"A paired test needs at least two queries, not {a.size}.")
    difference = a - b
    return Comparison(
        delta=float(difference.mean()),
        interval=paired_bootstrap(difference),
        p=randomisation_test(difference),
        wins=int((difference > 0).sum()),
        losses=int((difference < 0).sum()),
        ties=int((difference == 0).sum()),
    )
