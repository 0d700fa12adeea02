"""Batches of similar rows: each row once, near neighbours together, and reproducible."""

import numpy as np
import pytest

from soft_trainer.training.clusters import similar_batches

ROWS, K = 600, 16


def points() -> np.ndarray:
    """Points in the plane, in 40 clusters."""
    generator = np.random.default_rng(0)
    return generator.uniform(-9, 9, (40, 2))[generator.integers(0, 40, ROWS)] + generator.normal(size=(ROWS, 2)) / 4


def nearest(k: int = K) -> np.ndarray:
    distances = np.linalg.norm(points()[:, None] - points()[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    return np.argsort(distances, axis=1, kind="stable")[:, :k]


def batches(seed: int = 0, **options) -> list[list[int]]:
    options = {"neighbours": nearest(), "batch_size": 32} | options
    return one_to_one(generator=np.random.default_rng(seed), **options)


def one_to_one(neighbours: np.ndarray, *arguments, **options) -> list[list[int]]:
    """Calls `similar_batches` for pairs in which pair i has query i and code i."""
    rows = np.arange(len(neighbours))
    return similar_batches(np.stack([rows, rows], axis=1), neighbours, *arguments, **options)


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
def test_every_row_is_used_within_ten_epochs():
    assert {row for seed in range(10) for row in flat(batches(seed))} == set(range(ROWS))


def hardest(found: list[list[int]], count: int) -> float:
    """Returns the mean distance between a row and the nearest `count` other rows in its batch."""
    values = []
    for batch in found:
        distances = np.linalg.norm(points()[batch][:, None] - points()[batch][None], axis=2)
        values.append(np.sort(distances, axis=1)[:, 1 : count + 1].mean())
    return float(np.mean(values))


def test_batches_hold_near_neighbours():
    alike = batches()
    random = one_to_one(np.full((ROWS, 1), -1), 32, np.random.default_rng(0))
    # The best possible result: each row with its seven nearest rows.
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
    assert one_to_one(nearest()[:20] % 20, 32, np.random.default_rng(0)) == []
    (short,) = one_to_one(nearest()[:20] % 20, 32, np.random.default_rng(0), drop_last=False)
    assert sorted(short) == list(range(20))


def test_a_code_of_several_queries_is_reached_through_its_first_free_pair():
    # Queries 0 to 3 have code 0, queries 4 to 7 code 1. Query 8 is near code 0, query 9 near code 1.
    pairs = np.array([*((query, query // 4) for query in range(8)), (8, 2), (9, 3)])
    neighbours = np.full((10, 1), -1)
    neighbours[8] = 0
    neighbours[9] = 1
    for seed in range(20):
        found = similar_batches(pairs, neighbours, 2, np.random.default_rng(seed), group_size=2)
        assert sorted(flat(found)) == list(range(10))
        batch_of = {row: set(batch) for batch in found for row in batch}
        reached = [batch_of[8] & {0, 1, 2, 3}, batch_of[9] & {4, 5, 6, 7}]
        assert any(reached)  # for one of the queries, all pairs of the near code may already be in other groups


def test_several_codes_of_a_query_are_separate_pairs():
    pairs = np.array([(0, 0), (0, 1), (1, 2), (1, 3)])
    neighbours = np.array([[2], [0]])
    found = similar_batches(pairs, neighbours, 2, np.random.default_rng(1), group_size=2)
    assert sorted(flat(found)) == [0, 1, 2, 3]
