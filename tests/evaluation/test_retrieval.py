"""Several relevant codes a query: the rank of the first, nDCG, average precision, and ties that count against us."""

import itertools
import math

import numpy as np
import pytest
import torch

from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking, rank_codes
from soft_trainer.evaluation.retrieval import average_precision, graded_ranking


def by_hand(scores, grades, k):
    """The worst first place and the worst nDCG over every order that the scores allow; codes of one query."""
    firsts, values = [], []
    gains = [2**grade - 1 for grade in grades]
    ideal = sum(gain / math.log2(place + 1) for place, gain in enumerate(sorted(gains, reverse=True)[:k], 1))
    for order in itertools.permutations(range(len(scores))):
        if any(scores[a] < scores[b] for a, b in itertools.pairwise(order)):
            continue
        firsts.append(min(place for place, code in enumerate(order, 1) if grades[code] > 0))
        dcg = sum(gains[code] / math.log2(place + 1) for place, code in enumerate(order[:k], 1))
        values.append(dcg / ideal)
    return max(firsts), min(values)


def graded(scores, grades, k=10):
    """`graded_ranking` of queries with these scores over the codes; scores and grades float[Q, C]."""
    scores, grades = np.asarray(scores, dtype=float), np.asarray(grades, dtype=float)
    queries, codes = np.nonzero(grades)
    embeddings = torch.tensor(scores, dtype=torch.float64)
    ranking = rank_codes(embeddings[queries], torch.eye(scores.shape[1]).double(), torch.tensor(codes), top_k=3)
    return graded_ranking(ranking, queries, grades[queries, codes], k), codes


@pytest.mark.parametrize("k", [2, 10])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_and_ndcg_are_those_of_the_worst_order_that_the_scores_allow(seed, k):
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 3, (5, 6))
    grades = generator.integers(0, 4, (5, 6)) * (generator.random((5, 6)) < 0.6)
    grades[:, 0] = np.maximum(grades[:, 0], 1)
    found, codes = graded(scores, grades, k)
    for query in range(5):
        rank, ndcg = by_hand(scores[query], grades[query], k)
        assert int(found.ranking.ranks[query]) == rank
        assert found.ndcg[query] == pytest.approx(ndcg, abs=1e-12)
        # The pair named is a relevant code of the best score among the relevant ones.
        code = codes[found.pairs[query]]
        assert scores[query, code] == scores[query][grades[query] > 0].max()


def test_ndcg_of_a_known_case():
    # Grades 3, 0, 2, 1 in places 1 to 4, as in textbooks with gains 7, 0, 3, 1.
    found, _ = graded([[4, 3, 2, 1]], [[3, 0, 2, 1]])
    dcg = 7 + 3 / math.log2(4) + 1 / math.log2(5)
    assert found.ndcg[0] == pytest.approx(dcg / (7 + 3 / math.log2(3) + 1 / math.log2(4)), abs=1e-15)


def test_the_best_order_gives_exactly_one_and_places_beyond_k_nothing():
    codes = np.arange(20)
    found, _ = graded([20 - codes, codes], [[3, 3, 2, 1, 1] + [0] * 15] * 2)
    assert found.ndcg.tolist() == [1.0, 0.0]
    assert found.ranking.ranks.tolist() == [1, 16]


def test_one_relevant_code_a_query_has_the_rank_that_it_had():
    scores = np.random.default_rng(0).integers(0, 4, (7, 9))
    targets = np.arange(7)
    found, _ = graded(scores, np.eye(7, 9))
    assert found.ranking.ranks.tolist() == (scores >= scores[targets, targets][:, None]).sum(1).tolist()
    expected = [1 / math.log2(rank + 1) for rank in found.ranking.ranks.tolist()]
    assert found.ndcg.tolist() == pytest.approx(expected, abs=1e-15)
    assert found.ranking.top_indices.shape == (7, 3)


@pytest.mark.parametrize(
    ("queries", "grades", "words"),
    [([0], [1.0, 2.0], "2 ranks"), ([0, 0], [1.0, 0.0], "above 0"), ([0, 2], [1.0, 1.0], "without gaps")],
)
def test_what_does_not_fit_is_refused(queries, grades, words):
    ranking = Ranking(torch.tensor([1, 2]), torch.zeros(2, 1).long(), torch.zeros(2, 1))
    with pytest.raises(UserError, match=words):
        graded_ranking(ranking, queries, grades)


def precise(scores, relevant):
    """`average_precision` of queries with these scores over the codes; scores and relevant [Q, C]."""
    scores, relevant = np.asarray(scores, dtype=float), np.asarray(relevant)
    queries, codes = np.nonzero(relevant)
    embeddings = torch.tensor(scores, dtype=torch.float64)
    ranking = rank_codes(embeddings[queries], torch.eye(scores.shape[1]).double(), torch.tensor(codes), top_k=3)
    return average_precision(ranking, queries)


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_that_of_the_worst_order_that_the_scores_allow(seed):
    generator = np.random.default_rng(seed)
    scores, relevant = generator.integers(0, 3, (5, 6)), generator.random((5, 6)) < 0.5
    relevant[:, 0] = True
    values = precise(scores, relevant)
    for query in range(5):
        worst = 1.0
        for order in itertools.permutations(range(6)):
            if any(scores[query, a] < scores[query, b] for a, b in itertools.pairwise(order)):
                continue
            places = [place for place, code in enumerate(order, 1) if relevant[query, code]]
            worst = min(worst, np.mean([number / place for number, place in enumerate(places, 1)]))
        assert values[query] == pytest.approx(worst, abs=1e-12)


def test_average_precision_of_known_cases():
    # Relevant in places 1, 3 and 5; then one code a query, whose average precision is its reciprocal rank.
    assert precise([[6, 5, 4, 3, 2, 1]], [[1, 0, 1, 0, 1, 0]]) == pytest.approx([(1 + 2 / 3 + 3 / 5) / 3])
    assert precise([[3, 2, 1], [1, 2, 3]], [[0, 1, 0], [1, 0, 0]]) == pytest.approx([1 / 2, 1 / 3])


def test_average_precision_refuses_what_does_not_fit():
    ranking = Ranking(torch.tensor([1, 2]), torch.zeros(2, 1).long(), torch.zeros(2, 1))
    with pytest.raises(UserError, match="2 ranks"):
        average_precision(ranking, [0])
    with pytest.raises(UserError, match="without gaps"):
        average_precision(ranking, [0, 2])
