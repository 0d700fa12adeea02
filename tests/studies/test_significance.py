"""Paired tests: coverage, false alarms, agreement with other implementations."""

import itertools

import numpy as np
import pytest

from soft_trainer.errors import UserError
from soft_trainer.studies.significance import compare, holm, paired_bootstrap, randomisation_test, reciprocal_ranks


def simulated_ranks(rng, queries, gain=0.0):
    """Ranks of two systems on the same queries: alike, with a long tail; the first better by `gain`."""
    difficulty = rng.normal(size=queries)
    scores = (difficulty + shift + 0.7 * rng.normal(size=queries) for shift in (-gain, 0.0))
    return [np.floor(np.exp(np.maximum(0, score))) for score in scores]


def test_interval_agrees_with_a_plain_bootstrap():
    rng = np.random.default_rng(0)
    a, b = (1 / ranks for ranks in simulated_ranks(rng, 300))
    means = [rng.choice(a - b, 300).mean() for _ in range(20_000)]
    interval = paired_bootstrap(a, b)
    assert [interval.low, interval.high] == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=1e-3)


def test_p_agrees_with_all_exchanges():
    rng = np.random.default_rng(1)
    a, b = rng.random(10), rng.random(10) - 0.15
    signs = np.array(list(itertools.product((-1, 1), repeat=10)))
    means = (signs * (a - b)).mean(1)
    exact = (np.abs(means) >= abs((a - b).mean()) - 1e-12).mean()
    assert randomisation_test(a, b, n_resamples=50_000) == pytest.approx(exact, abs=0.01)


def test_p_agrees_with_plain_exchanges_of_ranks():
    rng = np.random.default_rng(4)
    a, b = (1 / ranks for ranks in simulated_ranks(rng, 300, gain=0.12))
    exchanged = rng.random((5_000, 300)) < 0.5
    means = (np.where(exchanged, b, a) - np.where(exchanged, a, b)).mean(1)
    plain = (np.abs(means) >= abs((a - b).mean()) - 1e-12).mean()
    assert 0.01 < plain < 0.5
    assert randomisation_test(a, b) == pytest.approx(plain, abs=0.015)


@pytest.mark.slow
def test_interval_covers_a_true_difference_over_simulations():
    rng = np.random.default_rng(5)
    a, b = (1 / ranks for ranks in simulated_ranks(rng, 2_000_000, gain=0.2))
    truth, covered = (a - b).mean(), 0
    for _ in range(1000):
        a, b = (1 / ranks for ranks in simulated_ranks(rng, 200, gain=0.2))
        interval = paired_bootstrap(a, b, n_resamples=500)
        covered += interval.low <= truth <= interval.high
    assert truth > 0.02 and 930 <= covered <= 970


@pytest.mark.slow
def test_interval_covers_the_truth_and_p_is_uniform_over_simulations():
    rng = np.random.default_rng(2)
    covered, p_values = 0, []
    for _ in range(1000):
        a, b = (1 / ranks for ranks in simulated_ranks(rng, 200))
        interval = paired_bootstrap(a, b, n_resamples=1000)
        covered += interval.low <= 0 <= interval.high
        p_values.append(randomisation_test(a, b, n_resamples=1000))
    assert 930 <= covered <= 970
    assert 0.035 <= np.mean(np.array(p_values) <= 0.05) <= 0.065


def test_the_same_seed_gives_the_same_result():
    a, b = (1 / ranks for ranks in simulated_ranks(np.random.default_rng(3), 50))
    assert paired_bootstrap(a, b, seed=5) == paired_bootstrap(a, b, seed=5) != paired_bootstrap(a, b, seed=6)
    assert randomisation_test(a, b, seed=5) == randomisation_test(a, b, seed=5)


def test_comparison_of_ranks():
    better, worse = np.array([1, 1, 2, 3, 1] * 20), np.array([2, 1, 4, 2, 3] * 20)
    result = compare(better, worse)
    assert result.delta == pytest.approx((1 / 2 + 0 + 1 / 4 - 1 / 6 + 2 / 3) / 5)
    assert (result.wins, result.losses, result.ties) == (60, 20, 20)
    assert result.interval.low > 0 and result.interval.low < result.delta < result.interval.high
    assert result.p == pytest.approx(2 / 10_001)
    assert compare(worse, better).delta == -result.delta
    same = compare(better, better)
    assert (same.delta, same.p, same.ties) == (0, 1, 100)


def test_max_rank_counts_zero_beyond():
    assert reciprocal_ranks([1, 4, 1001], max_rank=1000).tolist() == [1, 0.25, 0]
    assert compare([1, 2000], [1, 3000], max_rank=1000).ties == 2


def test_holm():
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]).tolist() == [1, 1]


def test_what_is_no_pair_is_refused():
    with pytest.raises(UserError, match="the same queries"):
        compare([1, 2, 3], [1, 2])
    with pytest.raises(UserError, match="two queries or more"):
        compare([1], [1])
    with pytest.raises(UserError, match="Ranks begin at 1"):
        compare([0, 1], [1, 1])
