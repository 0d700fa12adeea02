"""Hard negatives: the ratio against a plain loop, draws by seed, epoch and query, and added columns."""

import numpy as np
import pytest
from datasets import Dataset
from scipy import sparse

from soft_trainer.data.load import training_split
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.estimators.neighbours import Neighbours
from soft_trainer.options.fields import SoftInfoNCEOptions
from soft_trainer.training.negatives import HardNegatives, below_ratio, negatives_to_draw

QUERIES = 40


def rows_with(negatives: list) -> Split:
    """Makes a split with a column of negatives."""
    rows = [{"query": f"q{n}", "code": f"c{n}", "negatives": texts} for n, texts in enumerate(negatives)]
    return training_split(rows)


NAMED = rows_with([["x", "y"], ["z"], []])
MANY = rows_with([[f"x{n}" for n in range(9)], ["y"]])
QUERY, CODES = Dataset.from_dict({"docstring": ["q"]}), Dataset.from_dict({"code": ["c", "d"]})
GRADED = Split.from_grades(QUERY, CODES, [(0, 0), (0, 1)], [1, 0])
NONE = training_split([{"query": "q", "code": "c"}])


@pytest.mark.parametrize(
    ("split", "given", "number", "counts"),
    [
        (NAMED, None, 2, [2, 1, 0]),
        (NAMED, 0, 0, [2, 1, 0]),
        (NAMED, 1, 1, [2, 1, 0]),
        (NAMED.first(1), None, 2, [2]),
        (NAMED.select(np.array([2, 0])), None, 2, [0, 2]),
        (MANY, None, 4, [9, 1]),
        (MANY, 7, 7, [9, 1]),
        (GRADED, None, 0, None),
        (GRADED, 2, 2, [1]),
        (NONE, None, 0, None),
        (NONE, 2, 2, None),
        (Split.joined({"a": GRADED, "b": NAMED, "c": NONE}), None, 2, [0, 2, 1, 0, 0]),
        (Split.joined({"a": GRADED, "b": NAMED, "c": NONE}), 3, 3, [1, 2, 1, 0, 0]),
    ],
)
def test_named_negatives_are_the_default_and_grades_of_zero_are_not(split, given, number, counts):
    found, negatives = negatives_to_draw(SoftInfoNCEOptions(negatives_per_query=given), split.judgments)
    assert found == number
    assert counts == (None if negatives is None else np.diff(negatives.indptr).tolist())


def candidates(seed: int = 0) -> sparse.csr_matrix:
    """Draws zero to nine candidates for each query, among slightly more codes than queries."""
    generator = np.random.default_rng(seed)
    codes = [generator.choice(QUERIES + 5, count, replace=False) for count in generator.integers(0, 10, QUERIES)]
    starts = np.cumsum([0, *map(len, codes)])
    return sparse.csr_matrix((np.ones(starts[-1]), np.concatenate(codes), starts), shape=(QUERIES, QUERIES + 5))


def neighbours() -> Neighbours:
    """Makes up to eight neighbours for each query, nearest first."""
    generator = np.random.default_rng(0)
    scores = -np.sort(-generator.normal(size=(QUERIES, 8)).astype(np.float32), axis=1)
    rows = np.stack([generator.choice(QUERIES, 8, replace=False) for _ in range(QUERIES)])
    fewer = np.arange(8) >= generator.integers(0, 9, QUERIES)[:, None]
    rows[fewer] = -1
    scores[fewer] = -np.inf
    return Neighbours(rows, scores, generator.normal(size=QUERIES).astype(np.float32))


def as_lists(matrix: sparse.csr_matrix) -> list[list[tuple]]:
    """Returns the (code, score) of each query's candidates, in order, as a list for each query."""
    return [
        list(zip(matrix.indices[start:end].tolist(), matrix.data[start:end].tolist(), strict=True))
        for start, end in zip(matrix.indptr[:-1], matrix.indptr[1:], strict=True)
    ]


@pytest.mark.parametrize("ratio", [0.9, 1.5, -0.5])
def test_the_ratio_against_a_plain_loop(ratio):
    found = neighbours()
    expected = []
    for own, rows, scores in zip(found.own.tolist(), found.rows.tolist(), found.scores.tolist(), strict=True):
        limit = own - (1 - ratio) * abs(own)
        expected.append([(row, s) for row, s in zip(rows, scores, strict=True) if row >= 0 and s <= limit])
    assert as_lists(below_ratio(found, ratio, np.arange(QUERIES))) == expected
    assert any(not each for each in expected)


def test_of_equal_texts_the_nearest_stays():
    found = Neighbours(
        np.array([[1, 3, 2], [3, -1, -1], [-1, -1, -1], [0, -1, -1]]),
        np.array([[3, 2, 1], [5, -np.inf, -np.inf], [-np.inf] * 3, [1, -np.inf, -np.inf]], np.float32),
        np.array([9, 8, 7, 6], np.float32),
    )
    left = below_ratio(found, 1.0, np.arange(4))
    assert as_lists(left) == [[(1, 3.0), (3, 2.0), (2, 1.0)], [(3, 5.0)], [], [(0, 1.0)]]
    left = below_ratio(found, 1.0, np.array([10, 11, 11, 12]))
    assert as_lists(left) == [[(1, 3.0), (3, 2.0)], [(3, 5.0)], [], [(0, 1.0)]]


def test_a_ratio_that_leaves_nothing_is_named():
    with pytest.raises(UserError, match=r"^negative_ratio=-99: none of the \d+ similar functions"):
        below_ratio(neighbours(), -99.0, np.arange(QUERIES))


def test_a_draw_is_a_function_of_seed_epoch_and_query():
    table = candidates()

    def drawn(seed=0, epoch=0) -> list[list[int]]:
        own = HardNegatives(table, 3, seed)
        return [own.draw(query, epoch).tolist() for query in range(QUERIES)]

    whole = drawn(1, 2)
    assert drawn(1, 2) == whole
    for query, codes in enumerate(whole):
        known = table.indices[table.indptr[query] : table.indptr[query + 1]].tolist()
        assert len(codes) == len(set(codes)) == min(3, len(known)) and set(codes) <= set(known)
    assert drawn(1, 3) != whole != drawn(2, 2)


def test_every_candidate_is_drawn_equally_often():
    own = HardNegatives(sparse.csr_matrix(np.ones((1, 4))), 1, 0)
    codes = [own.draw(0, epoch)[0] for epoch in range(3000)]
    np.testing.assert_allclose(np.bincount(codes, minlength=4) / 3000, [1 / 4] * 4, atol=0.03)


def test_added_columns_are_distinct_and_no_codes_of_the_batch():
    lists = [[7, 9], [30, 7], [4, 30, 1]]
    starts = np.cumsum([0, *map(len, lists)])
    table = sparse.csr_matrix((np.ones(7), np.concatenate(lists), starts), shape=(3, 31))
    batch = np.arange(3), np.array([4, 9, 2])
    assert HardNegatives(table, 3, 0).columns(*batch, 0).tolist() == [7, 30, 1]
    assert HardNegatives(sparse.csr_matrix((3, 31)), 3, 0).columns(*batch, 0).shape == (0,)
