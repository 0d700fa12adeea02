"""Paired tests: coverage of intervals, false positives, and agreement with other implementations."""

import itertools

import numpy as np
import pytest
from refusals import refused

from soft_trainer.evaluation.significance import (
    compare_paired,
    holm,
    paired_bootstrap,
    randomisation_test,
    reciprocal_ranks,
    stratified_bootstrap,
)


def simulated_ranks(rng, queries, gain=0.0):
    """Draws long-tailed, correlated ranks of two systems on the same queries. The first system is better by `gain`."""
    difficulty = rng.normal(size=queries)
    scores = (difficulty + shift + 0.7 * rng.normal(size=queries) for shift in (-gain, 0.0))
    return [np.floor(np.exp(np.maximum(0, score))) for score in scores]


def test_interval_agrees_with_a_plain_bootstrap():
    rng = np.random.default_rng(0)
    a, b = (1 / ranks for ranks in simulated_ranks(rng, 300))
    means = rng.choice(a - b, (20_000, 300)).mean(1)
    interval = paired_bootstrap(a - b)
    assert [interval.low, interval.high] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=1e-3)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_p_agrees_with_all_exchanges(seed):
    a, b = (1 / ranks for ranks in simulated_ranks(np.random.default_rng(seed), 12, gain=0.3))
    signs = np.array(list(itertools.product((-1, 1), repeat=12)))
    exact = (np.abs((signs * (a - b)).mean(1)) >= abs((a - b).mean()) - 1e-12).mean()
    assert randomisation_test(a - b, n_resamples=50_000) == pytest.approx(exact, abs=0.01)


def test_comparison_of_ranks():
    better, worse = reciprocal_ranks([1, 1, 2, 3, 1] * 20), reciprocal_ranks([2, 1, 4, 2, 3] * 20)
    result = compare_paired(better, worse)
    assert result.delta == pytest.approx((1 / 2 + 0 + 1 / 4 - 1 / 6 + 2 / 3) / 5)
    assert (result.wins, result.losses, result.ties) == (60, 20, 20)
    assert result.interval.low > 0 and result.interval.low < result.delta < result.interval.high
    assert result.p == pytest.approx(2 / 10_001)
    assert compare_paired(worse, better).delta == -result.delta
    same = compare_paired(better, better)
    assert (same.delta, same.p, same.ties) == (0, 1, 100)


def test_what_cannot_be_compared_is_refused():
    for a, b, words in (([1, 2, 3], [1, 2], "the same queries"), ([1], [1], "at least two queries")):
        with refused(words):
            compare_paired(a, b)
    with refused("ranks: expected numbers of 1 or more"):
        reciprocal_ranks([0, 1])


def test_holm():
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]).tolist() == [1, 1]


def test_the_interval_is_over_queries_and_seeds_and_a_larger_set_counts_for_more():
    differences = np.random.default_rng(0).normal(0.1, 1, 300)
    alone = stratified_bootstrap([differences[None]])
    assert np.allclose(alone[:2], paired_bootstrap(differences)[:2], atol=0.01)
    # All queries are equal and the two seeds give +1 and -1, so a resampled mean is -1, 0 or 1.
    for second, expected in ((-1.0, (-1, 1)), (1.0, (1, 1))):
        interval = stratified_bootstrap([np.array([[1.0] * 50, [second] * 50])])
        assert (interval.low, interval.high) == expected
    interval = stratified_bootstrap([np.full((3, 30), 1.0), np.full((3, 10), 0.0)])
    assert interval.low == interval.high == pytest.approx(0.75)
