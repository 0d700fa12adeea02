"""Several relevant codes per query: the best rank, nDCG, average precision, and ties broken against the query."""

import itertools
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import refused
from scipy import sparse

from soft_trainer.data.row_checks import check_split
from soft_trainer.data.split import Judgments, Split
from soft_trainer.evaluation.ranking import Ranking, rank_codes
from soft_trainer.evaluation.retrieval import NDCG, RetrievalOutput, answer_pairs, by_query, mean_over_sets


def orders(scores):
    """Returns every order of the codes that is consistent with their scores, given ties."""
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            yield order


def by_hand(scores, gains):
    """Returns one query's worst best rank, nDCG and average precision over all orders that ties allow."""
    firsts, values, precisions = [], [], []
    k = 10
    ideal = sum(gain / math.log2(position + 1) for position, gain in enumerate(sorted(gains, reverse=True)[:k], 1))
    for order in orders(scores):
        positions = [position for position, code in enumerate(order, 1) if gains[code] > 0]
        firsts.append(positions[0])
        dcg = sum(gains[code] / math.log2(position + 1) for position, code in enumerate(order[:k], 1))
        values.append(dcg / ideal)
        precisions.append(np.mean([number / position for number, position in enumerate(positions, 1)]))
    return max(firsts), min(values), min(precisions)


def graded(scores, grades):
    """Calls `by_query` for queries with these scores and grades, float[Q, C]."""
    scores, grades = np.asarray(scores, dtype=float), np.asarray(grades, dtype=float)
    judgments = Judgments(sparse.csr_matrix(grades.astype(np.float32)), graded=True)
    queries, codes = answer_pairs(judgments)
    embeddings = torch.tensor(scores, dtype=torch.float64)
    ranking = rank_codes(embeddings[queries], torch.eye(scores.shape[1]).double(), codes, top_k=3)
    return by_query(ranking, judgments)


def test_metrics_are_those_of_the_worst_order_that_the_scores_allow():
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 3, (30, 6))
    grades = generator.integers(0, 4, (30, 6)) * (generator.random((30, 6)) < 0.6)
    grades[:, 0] = np.maximum(grades[:, 0], 1)
    ranking, measured = graded(scores, grades)
    for query in range(30):
        rank, ndcg, precision = by_hand(scores[query], grades[query])
        assert int(ranking.ranks[query]) == rank
        assert measured[NDCG][query] == pytest.approx(ndcg, abs=1e-12)
        assert measured["map"][query] == pytest.approx(precision, abs=1e-12)


def test_plain_pairs_have_a_map_equal_to_mrr_and_an_ndcg_of_one_relevant_function():
    scores = np.array([[3, 2, 1], [1, 3, 2], [1, 1, 1]])
    ranking, measured = graded(scores, np.eye(3)[[0, 0, 1]])
    assert ranking.ranks.tolist() == [1, 3, 3]
    assert measured["map"] == pytest.approx([1, 1 / 3, 1 / 3])
    assert measured["ndcg@10"] == pytest.approx([1, 0.5, 0.5])


def test_the_best_order_gives_exactly_one_and_places_beyond_ten_nothing():
    codes = np.arange(20)
    ranking, found = graded([20 - codes, codes], [[3, 3, 2, 1, 1] + [0] * 15] * 2)
    assert found["ndcg@10"].tolist() == [1.0, 0.0]
    assert ranking.ranks.tolist() == [1, 16]


def test_the_mean_over_sets_is_of_numbers_that_all_of_them_have():
    metrics = {"eval_a_mrr": 0.5, "eval_b_mrr": np.float32(1), "eval_a_alone": 1, "eval_a_queries": 3}
    metrics["eval_b_queries"] = 3
    metrics |= {f"eval_{key}_{name}": value for key in "ab" for name, value in (("note", "x"), ("ranks", [1, 2]))}
    assert mean_over_sets(metrics, "eval", ("a", "b")) == {"eval_mrr": 0.75}


def test_a_set_whose_codes_share_an_id_is_refused_before_its_pairs_are_listed():
    rows = Dataset.from_dict({"docstring": ["x"] * 100_000, "code": ["y"] * 100_000, "url": ["u"] * 100_000})
    with refused("people, row 1 shares its id with 100,000 functions"):
        check_split(Split.from_pairs(rows), "people")


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"test_mrr": 0.25, "test_recall@1": 0.1, "test_runtime": 3.0}, ", test_mrr=0.2500"),
        ({"mrr": 1.0, "mrr_64": 0.5}, ", mrr=1.0000"),
        ({}, ""),
    ],
)
def test_an_output_is_one_short_line_in_a_notebook(metrics, shown):
    ranking = Ranking(torch.arange(1, 2501), torch.zeros(2500, 10), torch.zeros(2500, 10))
    assert repr(RetrievalOutput(ranking, metrics)) == f"RetrievalOutput(queries=2500{shown})"
