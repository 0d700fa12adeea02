"""Batches of similar rows: every row once, near neighbours together, determined by the generator."""

import numpy as np
import pytest

from soft_trainer.data.clusters import similar_batches

ROWS, K = 600, 16


def points() -> np.ndarray:
    """Rows in the plane, in 40 clusters."""
    generator = np.random.default_rng(0)
    return generator.uniform(-9, 9, (40, 2))[generator.integers(0, 40, ROWS)] + generator.normal(size=(ROWS, 2)) / 4


def nearest(k: int = K) -> np.ndarray:
    distances = np.linalg.norm(points()[:, None] - points()[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    return np.argsort(distances, axis=1, kind="stable")[:, :k]


def batches(seed: int = 0, **options) -> list[list[int]]:
    options = {"neighbours": nearest(), "batch_size": 32} | options
    return similar_batches(generator=np.random.default_rng(seed), **options)


def flat(found: list[list[int]]) -> list[int]:
    return [row for batch in found for row in batch]


@pytest.mark.parametrize("options", [{}, {"group_size": 5}, {"group_size": 99}])
def test_every_row_comes_once_an_epoch(options):
    found = batches(**options)
    assert [len(batch) for batch in found] == [32] * 18
    assert len(set(flat(found))) == 18 * 32
    found = batches(drop_last=False, **options)
    assert [len(batch) for batch in found] == [32] * 18 + [24]
    assert sorted(flat(found)) == list(range(ROWS))


def test_the_generator_alone_decides():
    assert batches(3) == batches(3) != batches(4)
    assert all(type(row) is int for row in flat(batches()))


@pytest.mark.slow
def test_every_row_is_left_out_in_some_epoch_only():
    assert {row for seed in range(10) for row in flat(batches(seed))} == set(range(ROWS))


def hardest(found: list[list[int]], count: int) -> float:
    """The mean distance of a row to the nearest `count` others of its batch."""
    values = []
    for batch in found:
        distances = np.linalg.norm(points()[batch][:, None] - points()[batch][None], axis=2)
        values.append(np.sort(distances, axis=1)[:, 1 : count + 1].mean())
    return float(np.mean(values))


def test_batches_hold_near_neighbours():
    alike = batches()
    random = similar_batches(np.full((ROWS, 1), -1), 32, np.random.default_rng(0))
    # The best possible result: each row with its true nearest seven.
    distances = np.sort(np.linalg.norm(points()[:, None] - points()[None], axis=2), axis=1)
    best = distances[:, 1:8].mean()
    assert hardest(alike, 7) < 2.5 * best < 0.4 * hardest(random, 7)
    neighbours = nearest()
    groups = [batch[start : start + 8] for batch in alike for start in range(0, 16, 8)]
    held = np.mean([np.isin(group[1:], neighbours[group].ravel()).mean() for group in groups])
    assert held > 0.95


def test_rows_with_few_neighbours_or_none():
    neighbours = nearest().copy()
    neighbours[::2, 3:] = -1
    neighbours[::5] = -1
    assert sorted(flat(batches(neighbours=neighbours, drop_last=False))) == list(range(ROWS))
    assert sorted(flat(batches(neighbours=np.full((ROWS, 1), -1), drop_last=False))) == list(range(ROWS))
    assert similar_batches(nearest()[:20] % 20, 32, np.random.default_rng(0)) == []
    (short,) = similar_batches(nearest()[:20] % 20, 32, np.random.default_rng(0), drop_last=False)
    assert sorted(short) == list(range(20))
