"""Relevance by ids and by a matrix give the same answers."""

import numpy as np
import pytest

from soft_trainer.data.split import Relevance, RelevantCodes


def both_forms(seed: int, ids: int = 5) -> tuple[Relevance, Relevance]:
    """Returns the same relevance of 7 queries and 9 functions by ids and as a matrix."""
    generator = np.random.default_rng(seed)
    by_ids = Relevance.by_ids(
        generator.integers(0, ids, 7).astype(np.int32), generator.integers(0, ids, 9).astype(np.int32)
    )
    return by_ids, Relevance.of(by_ids.matrix)


def by_texts(relevance: Relevance) -> RelevantCodes:
    """Returns a look-up in which two rows share each text."""
    return RelevantCodes(relevance, np.arange(7) // 2, np.arange(9) // 2)


ANSWERS = {
    "shape": lambda relevance: np.array(relevance.shape),
    "counts": lambda relevance: relevance.counts(),
    "pairs": lambda relevance: relevance.pairs(),
    "select": lambda relevance: relevance.select(np.array([6, 2, 0]), np.array([8, 1])).matrix.toarray(),
    "of_queries": lambda relevance: (
        relevance.of_queries(np.array([0, 0, 1, 2, 2, 2, 3])).matrix.toarray()
    ),
    "joined": lambda relevance: Relevance.joined([relevance, relevance]).matrix.toarray(),
    "among": lambda relevance: by_texts(relevance).among(np.arange(7), np.arange(9)),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("seed", range(4))
def test_both_forms_give_the_same_answers(name, seed):
    by_ids, matrix = both_forms(seed, ids=1 if seed == 3 else 5)
    np.testing.assert_array_equal(ANSWERS[name](by_ids), ANSWERS[name](matrix))


def test_joined_forms_may_differ():
    by_ids, matrix = both_forms(0)
    mixed = Relevance.joined([by_ids, matrix])
    np.testing.assert_array_equal(mixed.matrix.toarray(), Relevance.joined([matrix, matrix]).matrix.toarray())


@pytest.mark.parametrize("seed", range(4))
def test_every_look_up_gives_the_same_answers(seed):
    codes = by_texts(both_forms(seed)[0])
    expected = codes.among(np.arange(7), np.arange(9)).numpy()
    assert sorted(np.stack(codes.everywhere(np.arange(7)), axis=1).tolist()) == np.argwhere(expected).tolist()
    np.testing.assert_array_equal(codes.contain(np.arange(7), np.tile(np.arange(9), (7, 1))), expected)
