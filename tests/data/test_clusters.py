"""Batches of similar rows: every row once, near neighbours together, others apart, determined by the generator."""

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


@pytest.mark.parametrize("options", [{}, {"group_size": 5}, {"group_size": 99}, {"random_share": 0.3}, {"apart": 3}])
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
    random = similar_batches(nearest(), 32, np.random.default_rng(0), random_share=1.0)
    # The best possible result: each row with its true nearest seven.
    distances = np.sort(np.linalg.norm(points()[:, None] - points()[None], axis=2), axis=1)
    best = distances[:, 1:8].mean()
    assert hardest(alike, 7) < 2.5 * best < 0.4 * hardest(random, 7)
    assert hardest(alike, 7) < hardest(batches(random_share=0.5), 7) < hardest(random, 7)
    neighbours = nearest()
    groups = [batch[start : start + 8] for batch in alike for start in range(0, 16, 8)]
    held = np.mean([np.isin(group[1:], neighbours[group].ravel()).mean() for group in groups])
    assert held > 0.95


def test_a_share_of_random_rows_is_in_every_batch():
    # Each row's only neighbour is its partner, so the pairs that share a batch are the rows not drawn at random.
    partner = (np.arange(640) ^ 1)[:, None]
    for share in (0.0, 0.25, 1.0):
        found = similar_batches(partner, 32, np.random.default_rng(0), group_size=2, random_share=share)
        met = [np.isin(partner[batch, 0], batch).sum() for batch in found]
        # A row drawn at random is separated from its partner, so the share of pairs is the square of the rest.
        assert np.mean(met) == pytest.approx(32 * (1 - share) ** 2, abs=4)


def together(found: list[list[int]], rows: int) -> np.ndarray:
    batch_of = np.full(rows, -1)
    for number, batch in enumerate(found):
        batch_of[batch] = number
    return batch_of


@pytest.mark.parametrize("apart", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_nearest_never_share_a_batch(seed, apart):
    found = batches(seed, apart=apart, drop_last=False)
    batch_of = together(found, ROWS)
    assert (batch_of[nearest(apart)] != batch_of[:, None]).all()
    assert sorted(flat(found)) == list(range(ROWS))
    near = nearest()[:, apart:]
    without = together(similar_batches(near, 32, np.random.default_rng(seed), random_share=1.0), ROWS)
    assert (batch_of[near] == batch_of[:, None]).mean() > 2 * (without[near] == without[:, None]).mean()


def test_equal_texts_never_share_a_batch():
    generator = np.random.default_rng(1)
    texts = [generator.integers(0, 300, ROWS).astype(np.uint64), np.arange(ROWS, dtype=np.uint64) // 10]
    found = batches(text_ids=texts)
    assert all(len(set(ids[batch].tolist())) == len(batch) for ids in texts for batch in found)
    assert [len(batch) for batch in found] == [32] * 18


def test_a_text_with_more_copies_than_batches_shortens_them():
    texts = np.r_[np.zeros(100), np.arange(1, ROWS - 99)].astype(np.uint64)
    found = batches(text_ids=[texts], drop_last=False)
    assert all((texts[batch] == 0).sum() == 1 for batch in found)
    assert set(range(100, ROWS)) <= set(flat(found))
    assert len(flat(found)) == len(set(flat(found))) == ROWS - 100 + len(found)


def test_rows_with_few_neighbours_or_none():
    neighbours = nearest().copy()
    neighbours[::2, 3:] = -1
    neighbours[::5] = -1
    assert sorted(flat(batches(neighbours=neighbours, drop_last=False, apart=2))) == list(range(ROWS))
    assert sorted(flat(batches(neighbours=np.full((ROWS, 1), -1), drop_last=False))) == list(range(ROWS))
    assert similar_batches(nearest()[:20] % 20, 32, np.random.default_rng(0)) == []
    (short,) = similar_batches(nearest()[:20] % 20, 32, np.random.default_rng(0), drop_last=False)
    assert sorted(short) == list(range(20))
