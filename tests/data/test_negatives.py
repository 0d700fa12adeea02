"""Extra negatives of rows: limits against plain loops, draws by seed, epoch and row, and the columns they add."""

import math

import numpy as np
import pytest
import torch

from soft_trainer.data.negatives import NegativeChoice, Negatives, draw, from_neighbours, limited, own_columns
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


LIMITS = {
    "none": {},
    "ranks": {"ranks": (1, 4)},
    "no end": {"ranks": (2, None)},
    "highest": {"max_score": 0.3},
    "margin": {"margin": 0.2},
    "ratio": {"ratio": 0.9},
    "all": {"ranks": (1, 8), "max_score": 1.0, "margin": -0.5, "ratio": 1.5},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_limits_against_a_plain_loop(limits):
    table = negatives()
    first, last = limits.get("ranks", (0, None))
    expected = []
    for own, candidates in zip(table.own.tolist(), as_lists(table), strict=True):
        kept = candidates[first:last]
        kept = [(code, score) for code, score in kept if score <= limits.get("max_score", math.inf)]
        kept = [(code, score) for code, score in kept if score <= own - limits.get("margin", -math.inf)]
        if "ratio" in limits:
            kept = [(code, score) for code, score in kept if score <= own - (1 - limits["ratio"]) * abs(own)]
        expected.append(kept)
    left = limited(table, NegativeChoice(1, **limits))
    assert as_lists(left) == expected
    assert left.own is table.own and any(not candidates for candidates in expected)
    assert set(left.codes[left.codes >= ROWS]) == set(range(ROWS, ROWS + len(left.code_only)))


def test_limits_that_leave_nothing_and_numbers_that_no_row_has():
    for choice, words in (
        (
            NegativeChoice(1, max_score=-99.0),
            r"none of \d+ candidate negatives is left by negative_max_score=-99.0: l",
        ),
        (NegativeChoice(10), "negatives_per_query=10: no row has more than 9 candidate negatives$"),
        (NegativeChoice(4, ranks=(2, 5)), "negatives_per_query=4: no row has more than 3 .* by negative_ranks=2,5"),
    ):
        with pytest.raises(UserError, match=f"^{words}"):
            limited(negatives(), choice)


@pytest.mark.parametrize("option", ["max_score", "margin", "ratio", "temperature"])
def test_scores_that_are_not_known_limit_nothing(option):
    with pytest.raises(UserError, match=f"^negative_{option}=0.5: the negatives come without scores"):
        limited(negatives(scores=False), NegativeChoice(1, **{option: 0.5}))
    table = limited(negatives(scores=False), NegativeChoice(2, ranks=(1, 5), temperature=0))
    row = int(table.counts.argmax())
    nearest = table.codes[table.starts[row] :][:2].tolist()
    assert draw(table, NegativeChoice(2, temperature=0), [row], 0, 0)[0].tolist() == nearest


def drawn(table, choice, rows, seed=0, epoch=0) -> list[list[int]]:
    codes, owners = draw(table, choice, np.array(rows), seed, epoch)
    return [codes[owners == place].tolist() for place in range(len(rows))]


@pytest.mark.parametrize("temperature", [None, 0, 0.5])
def test_a_draw_is_a_function_of_seed_epoch_and_row(temperature):
    table, choice = negatives(), NegativeChoice(3, temperature=temperature)
    rows = list(range(ROWS))
    whole = drawn(table, choice, rows, seed=1, epoch=2)
    assert drawn(table, choice, rows[::-1], seed=1, epoch=2) == whole[::-1]
    assert [drawn(table, choice, [row], seed=1, epoch=2)[0] for row in rows] == whole
    for row in rows:
        candidates = table.codes[table.starts[row] : table.starts[row + 1]].tolist()
        assert len(whole[row]) == len(set(whole[row])) == min(3, len(candidates))
        assert set(whole[row]) <= set(candidates)
    others = drawn(table, choice, rows, seed=1, epoch=3), drawn(table, choice, rows, seed=2, epoch=2)
    assert [other == whole for other in others] == [temperature == 0] * 2


def test_temperature_decides_how_often_a_candidate_is_drawn():
    scores = np.array([2.0, 1.0, 0.0, -9.0], np.float32)
    table = Negatives(np.array([0, 4]), np.arange(4), scores, np.zeros(1, np.float32))

    def shares(temperature):
        choice = NegativeChoice(1, temperature=temperature)
        codes = [draw(table, choice, [0], 0, epoch)[0][0] for epoch in range(3000)]
        return np.bincount(codes, minlength=4) / 3000

    expected = np.exp(scores / 2) / np.exp(scores / 2).sum()
    np.testing.assert_allclose(shares(2.0), expected, atol=0.03)
    np.testing.assert_allclose(shares(None), [1 / 4] * 4, atol=0.03)
    assert shares(0)[0] == 1


def test_candidates_of_neighbours_are_ragged_and_of_equal_texts_the_nearest_stays():
    neighbours = Neighbours(
        np.array([[1, 3, 2], [3, -1, -1], [-1, -1, -1]]),
        np.array([[3, 2, 1], [5, -np.inf, -np.inf], [-np.inf] * 3], np.float32),
        np.array([9, 8, 7], np.float32),
    )
    table = from_neighbours(neighbours, np.arange(4), [{"code": "further"}])
    assert as_lists(table) == [[(1, 3.0), ("further", 2.0), (2, 1.0)], [("further", 5.0)], []]
    assert table.own.tolist() == [9, 8, 7]
    table = from_neighbours(neighbours, np.array([10, 11, 11, 12], np.uint64), [{"code": "further"}])
    assert as_lists(table) == [[(1, 3.0), ("further", 2.0)], [("further", 5.0)], []]


def test_mined_by_a_similarity_they_are_the_nearest_that_are_not_right():
    scores = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    queries, codes = np.array([0, 0, 2, 3, 4, 5], np.uint64), np.array([0, 1, 2, 3, 4, 5, 2, 8, 8], np.uint64)
    found = exact_neighbours(lambda block: scores[block], np.arange(6), 9, 4, text_ids=[queries, codes])
    table = from_neighbours(found, codes, [{"code": f"code {i}"} for i in range(3)])
    for row, candidates in enumerate(as_lists(table)):
        right = {
            code for code in range(9) if codes[code] == codes[row] or (code < 6 and queries[code] == queries[row])
        }
        order = [code for code in scores[row].argsort(descending=True).tolist() if code not in right][:4]
        order = [code for i, code in enumerate(order) if codes[code] not in codes[order[:i]]]
        assert [code for code, _ in candidates] == [code if code < 6 else f"code {code - 6}" for code in order]
        assert table.own[row] == scores[row, row]


def test_added_columns_are_distinct_and_no_rows_of_the_batch():
    rows = np.array([4, 9, 2])
    added, drawn_for = own_columns(rows, np.array([7, 9, 30, 7, 4, 30, 1]), np.array([0, 0, 1, 1, 2, 2, 2]))
    assert added.tolist() == [7, 30, 1]
    assert drawn_for.tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    added, drawn_for = own_columns(rows, np.empty(0, np.int64), np.empty(0, np.int64))
    assert added.shape == (0,) and drawn_for.shape == (3, 0)
