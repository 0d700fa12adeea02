"""Paired tests: coverage of intervals, false positives, and agreement with other implementations."""

import itertools

import numpy as np
import pytest
from refusals import refused
from scipy import stats

from soft_trainer.evaluation.significance import (
    compare_crossed,
    compare_paired,
    holm,
    paired_bootstrap,
    randomisation_test,
    reciprocal_ranks,
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


# ---- Seeds and queries ----


def test_one_seed_is_a_paired_t_test_and_seeds_without_residuals_are_one_over_seeds():
    a, b = (1 / ranks for ranks in simulated_ranks(np.random.default_rng(0), 300, gain=0.1))
    by_seed = np.array([0.01, 0.03, 0.02, 0.05])
    for differences, expected in (
        ((a - b)[None], stats.ttest_rel(a, b)),
        (np.repeat(by_seed[:, None], 50, axis=1), stats.ttest_1samp(by_seed, 0)),
    ):
        result, interval = compare_crossed([differences]), expected.confidence_interval()
        assert [result.p, *result.interval] == pytest.approx([expected.pvalue, *interval], abs=1e-9)


def test_strata_count_by_their_queries_and_equal_differences_have_no_interval():
    result = compare_crossed([np.full((3, 30), 1.0), np.full((2, 10), 0.0)])
    assert (*result.interval, result.p) == (0.75, 0.75, 0) and (result.wins, result.ties) == (30, 10)
    assert compare_crossed([np.zeros((2, 10))]).p == 1


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
@pytest.mark.parametrize("spread", [0, 0.005, 0.02])  # of the seeds; 0.12 of the queries, 0.15 of both together
@pytest.mark.parametrize("sets", [[2536], [500, 300]])
def test_a_true_null_hypothesis_is_rejected_in_at_most_eight_percent(seeds, spread, sets):
    """The complement is the coverage, because the interval consists of the differences whose p is 0.05 or more."""
    generator = np.random.default_rng(1)
    rejected = missed = 0
    for _ in range(500):
        # Runs on separate sets have seeds that differ.
        strata = []
        for queries in sets:
            of_seeds = generator.normal(0, spread if seeds > 1 else 0, (seeds, 1))
            of_queries = generator.normal(0, 0.12, (1, queries))
            strata.append(of_seeds + of_queries + generator.normal(0, 0.15, (seeds, queries)))
        result = compare_crossed(strata)
        rejected += result.p < 0.05
        missed += not result.interval.low <= 0 <= result.interval.high
    assert rejected == missed <= 0.085 * 500  # 0.08, and the deviation of 500 draws
