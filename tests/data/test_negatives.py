"""Extra negatives of rows: the ratio against a plain loop, draws by seed, epoch and row, and the columns they add."""

import numpy as np
import pytest
import torch

from soft_trainer.data.negatives import Negatives, below_ratio, draw, from_neighbours, own_columns
from soft_trainer.data.neighbours import Neighbours, exact_neighbours
from soft_trainer.errors import UserError

ROWS = 40


def negatives(rows: int = ROWS, seed: int = 0, scores: bool = True) -> Negatives:
    """Zero to nine candidates per row, some of them outside the training rows."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 10, rows)
    lists = [-np.sort(-generator.normal(size=count)) for count in counts]
    codes = [generator.choice(rows + 5, count, replace=False) for count in counts]
    values, own = np.concatenate(lists).astype(np.float32), generator.normal(size=rows).astype(np.float32)
    if not scores:
        values, own = np.full_like(values, np.nan), np.full_like(own, np.nan)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return Negatives(starts, np.concatenate(codes), values, own, [{"code": f"code {i}"} for i in range(5)])


def as_lists(table: Negatives) -> list[list[tuple]]:
    """(code, score) of every candidate, row by row; a code-only row by its text."""
    names = [*range(len(table)), *(row["code"] for row in table.code_only)]
    ranges = zip(table.starts[:-1], table.starts[1:], strict=True)
    return [[(names[table.codes[i]], float(table.scores[i])) for i in range(a, b)] for a, b in ranges]


@pytest.mark.parametrize("ratio", [0.9, 1.5, -0.5])
def test_the_ratio_against_a_plain_loop(ratio):
    table = negatives()
    expected = []
    for own, candidates in zip(table.own.tolist(), as_lists(table), strict=True):
        expected.append([(code, score) for code, score in candidates if score <= own - (1 - ratio) * abs(own)])
    left = below_ratio(table, ratio)
    assert as_lists(left) == expected
    assert left.own is table.own and any(not candidates for candidates in expected)
    assert set(left.codes[left.codes >= ROWS]) == set(range(ROWS, ROWS + len(left.code_only)))


def test_a_ratio_that_leaves_nothing_is_named():
    with pytest.raises(UserError, match=r"^negative_ratio=-99: none of \d+ similar codes"):
        below_ratio(negatives(), -99.0)


def drawn(table, number, rows, seed=0, epoch=0) -> list[list[int]]:
    codes, owners = draw(table, number, np.array(rows), seed, epoch)
    return [codes[owners == place].tolist() for place in range(len(rows))]


def test_a_draw_is_a_function_of_seed_epoch_and_row():
    table = negatives()
    rows = list(range(ROWS))
    whole = drawn(table, 3, rows, seed=1, epoch=2)
    assert drawn(table, 3, rows[::-1], seed=1, epoch=2) == whole[::-1]
    assert [drawn(table, 3, [row], seed=1, epoch=2)[0] for row in rows] == whole
    for row in rows:
        candidates = table.codes[table.starts[row] : table.starts[row + 1]].tolist()
        assert len(whole[row]) == len(set(whole[row])) == min(3, len(candidates))
        assert set(whole[row]) <= set(candidates)
    assert drawn(table, 3, rows, seed=1, epoch=3) != whole != drawn(table, 3, rows, seed=2, epoch=2)


def test_every_candidate_is_drawn_equally_often():
    table = Negatives(np.array([0, 4]), np.arange(4), np.zeros(4, np.float32), np.zeros(1, np.float32))
    codes = [draw(table, 1, [0], 0, epoch)[0][0] for epoch in range(3000)]
    np.testing.assert_allclose(np.bincount(codes, minlength=4) / 3000, [1 / 4] * 4, atol=0.03)


def test_candidates_of_neighbours_are_ragged_and_of_equal_texts_the_nearest_stays():
    neighbours = Neighbours(
        np.array([[1, 3, 2], [3, -1, -1], [-1, -1, -1], [0, -1, -1]]),
        np.array([[3, 2, 1], [5, -np.inf, -np.inf], [-np.inf] * 3, [1, -np.inf, -np.inf]], np.float32),
        np.array([9, 8, 7, 6], np.float32),
    )
    table = from_neighbours(neighbours, np.arange(4))
    assert as_lists(table) == [[(1, 3.0), (3, 2.0), (2, 1.0)], [(3, 5.0)], [], [(0, 1.0)]]
    assert table.own.tolist() == [9, 8, 7, 6]
    table = from_neighbours(neighbours, np.array([10, 11, 11, 12], np.uint64))
    assert as_lists(table) == [[(1, 3.0), (3, 2.0)], [(3, 5.0)], [], [(0, 1.0)]]


def test_mined_by_a_similarity_they_are_the_nearest_that_are_not_right():
    scores = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    queries = np.array([0, 0, 2, 3, 4, 5, 6, 7, 8], np.uint64)
    codes = np.array([0, 1, 2, 3, 4, 5, 2, 8, 8], np.uint64)
    found = exact_neighbours(lambda block: scores[block], np.arange(9), 9, 4, text_ids=[queries, codes])
    table = from_neighbours(found, codes)
    for row, candidates in enumerate(as_lists(table)):
        right = {code for code in range(9) if codes[code] == codes[row] or queries[code] == queries[row]}
        order = [code for code in scores[row].argsort(descending=True).tolist() if code not in right][:4]
        order = [code for i, code in enumerate(order) if codes[code] not in codes[order[:i]]]
        assert [code for code, _ in candidates] == order
        assert table.own[row] == scores[row, row]


def test_added_columns_are_distinct_and_no_rows_of_the_batch():
    rows = np.array([4, 9, 2])
    added, drawn_for = own_columns(rows, np.array([7, 9, 30, 7, 4, 30, 1]), np.array([0, 0, 1, 1, 2, 2, 2]))
    assert added.tolist() == [7, 30, 1]
    assert drawn_for.tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    added, drawn_for = own_columns(rows, np.empty(0, np.int64), np.empty(0, np.int64))
    assert added.shape == (0,) and drawn_for.shape == (3, 0)
