"""Distillation over all pairs of sides, against plain loops in float64."""

import math

import numpy as np
import pytest
import torch
from scipy import sparse

from soft_trainer.comparisons import GlobalPairs
from soft_trainer.data.judgments import RightAnswers
from soft_trainer.objective import LOSSES, Objective

ALL = {"distill_weight": 0.7, "distill_pairs": "all"}
TEMPERATURE = 0.8


class Teacher:
    """An estimator with embeddings of its own."""

    def __init__(self, queries, codes):
        self.queries = queries
        self.codes = codes

    def similarity(self, query_rows, code_rows):
        return self.queries[query_rows] @ self.codes[code_rows].T

    def between_queries(self, query_rows, others):
        return self.queries[query_rows] @ self.queries[others].T

    def between_codes(self, code_rows, others):
        return self.codes[code_rows] @ self.codes[others].T


def embeddings(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator, dtype=torch.float64)


def plain_divergence(scores, similarity, targets):
    """KL of one row: sum of y log(y / p) over the targets."""
    if not targets:
        return 0.0
    of_teacher = [math.exp(similarity[place] / TEMPERATURE) for place in targets]
    of_encoder = [math.exp(scores[place]) for place in targets]
    value = 0.0
    for own, other in zip(of_teacher, of_encoder, strict=True):
        y = own / sum(of_teacher)
        value += y * math.log(y / (other / sum(of_encoder)))
    return value


# Of seven pairs, 1 and 4 have one query, 2 and 5 one code, and code 6 answers query 0 too.
QUERY_TEXTS = np.array([0, 1, 2, 3, 1, 5, 6], dtype=np.uint64)
CODE_TEXTS = np.array([0, 1, 2, 3, 4, 2, 6], dtype=np.uint64)
RELATED = {(1, 4), (2, 5), (0, 6)}


def pairs_of(own: slice, columns: torch.Tensor) -> GlobalPairs:
    right = sparse.eye_array(7, dtype=np.float32, format="lil")
    right[0, 6] = 1
    answers = RightAnswers(sparse.csr_array(right), QUERY_TEXTS, CODE_TEXTS)
    rows = np.arange(7)
    return GlobalPairs.of(rows, rows, columns, own, answers)


@pytest.mark.parametrize("own", [slice(0, 7), slice(2, 5)], ids=["all", "a part"])
def test_all_pairs_of_sides_against_plain_loops(own):
    columns = torch.tensor([0, 1, 2, 4, 5, 6, 7])  # column 3 is an additional negative
    pairs = pairs_of(own, columns)
    queries = embeddings(7, 0)
    codes = embeddings(8, 1)
    teacher = Teacher(embeddings(7, 2), embeddings(7, 3))
    comparisons = pairs.compare(lambda q, c: q @ c.T, queries, codes, pairs.similarity(teacher))

    own_codes = codes[columns]
    blocks = [
        (own_codes @ queries.T, teacher.codes @ teacher.queries.T),
        (queries @ queries.T, teacher.queries @ teacher.queries.T),
        (own_codes @ own_codes.T, teacher.codes @ teacher.codes.T),
    ]
    rows = range(7)[own]
    for comparison, (scores, similarity) in zip(comparisons, blocks, strict=True):
        total = 0.0
        for row in rows:
            targets = [place for place in range(7) if place != row and tuple(sorted((row, place))) not in RELATED]
            total += plain_divergence(scores[row].tolist(), similarity[row].tolist(), targets)
        assert comparison.divergence(TEMPERATURE).item() == pytest.approx(total / len(rows), abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_mean_of_the_four_divergences_is_added_to_every_loss(loss):
    pairs = pairs_of(slice(0, 7), torch.arange(7))
    queries = embeddings(7, 0).requires_grad_()
    codes = embeddings(7, 1).requires_grad_()
    teacher = Teacher(embeddings(7, 2), embeddings(7, 3))
    settings = {"loss": loss, "distill_temperature": TEMPERATURE}
    comparisons = pairs.compare(lambda q, c: q @ c.T, queries, codes, pairs.similarity(teacher))
    similarity = teacher.queries @ teacher.codes.T
    given = queries @ codes.T, torch.arange(7), similarity
    without = Objective(**settings)(*given)
    query_code = Objective(**settings, distill_weight=1.0)(*given) - without
    every = [query_code, *(each.divergence(TEMPERATURE) for each in comparisons)]
    value = Objective(**settings, **ALL)(*given, comparisons=comparisons)
    torch.testing.assert_close(value, without + 0.7 * sum(every) / 4, rtol=0, atol=1e-12)
    assert min(each.item() for each in every) > 0.1

    def of_embeddings(queries, codes):
        comparisons = pairs.compare(lambda q, c: q @ c.T, queries, codes, pairs.similarity(teacher))
        return Objective(**settings, **ALL)(queries @ codes.T, *given[1:], comparisons=comparisons)

    assert torch.autograd.gradcheck(of_embeddings, (queries, codes))


def test_a_teacher_that_the_encoder_equals_teaches_nothing():
    pairs = pairs_of(slice(0, 7), torch.arange(7))
    queries = embeddings(7, 0)
    codes = embeddings(7, 1)
    similarity = pairs.similarity(Teacher(queries, codes))
    for comparison in pairs.compare(lambda q, c: q @ c.T / TEMPERATURE, queries, codes, similarity):
        assert comparison.divergence(TEMPERATURE).item() == pytest.approx(0, abs=1e-12)
