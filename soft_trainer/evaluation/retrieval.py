"""Matches queries with their codes, and turns ranks of several relevant codes into one result per query."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from soft_trainer.evaluation.ranking import Ranking


@dataclass(frozen=True)
class RetrievalOutput:
    """The output of `SoftInfoNCETrainer.predict`: the ranking of every query's own code, and its metrics.

    `shorter` has the rankings by fewer dimensions, for an encoder with Matryoshka embeddings.
    """

    ranking: Ranking
    metrics: dict[str, float]
    shorter: dict[int, Ranking] = field(default_factory=dict)

    @property
    def ranks(self) -> Tensor:
        """The rank of each query's own code, LongTensor[Q], 1 is best."""
        return self.ranking.ranks

    @property
    def top_indices(self) -> Tensor:
        """Rows of the best codes in the corpus, LongTensor[Q, k], best first."""
        return self.ranking.top_indices


@dataclass(frozen=True)
class GradedRanking:
    """The ranking and nDCG of queries with several relevant codes.

    Args:
        ranking: one rank for each of Q queries, that of its best relevant code.
        pairs (`LongTensor[Q]`): the (query, code) pair that holds this code.
        ndcg (`float64[Q]`): normalised discounted cumulative gain of the first k ranks, from 0 to 1.
    """

    ranking: Ranking
    pairs: Tensor
    ndcg: np.ndarray


def graded_ranking(ranking: Ranking, queries: ArrayLike, grades: ArrayLike, k: int = 10) -> GradedRanking:
    """Turns the ranks of all (query, relevant code) pairs into one rank and one nDCG@k for each query.

    A grade g at rank p gains (2^g - 1) / log2(p + 1). The sum is divided by that of the best order of the query's
    relevant codes. Ties count against the query: among codes that score the same, the irrelevant ones come first, then
    those of lower grades.

    Args:
        ranking: the ranking of P pairs from `rank_codes`.
        queries (`int[P]`): the query of each pair, numbered from 0 without gaps.
        grades (`float[P]`): the relevance of each pair's code, above 0.
        k (`int`, *optional*, defaults to 10): number of ranks that count.
    """
    queries, grades = np.asarray(queries), np.asarray(grades, dtype=np.float64)
    ranks = ranking.ranks.numpy(force=True)
    number = int(queries.max()) + 1
    places = _places(ranks, queries, grades)
    ideal = _running(np.lexsort((-grades, queries)), queries) + 1
    gained, possible = (_gain(order, queries, grades, k) for order in (places, ideal))
    order = np.lexsort((places, queries))
    first = order[np.searchsorted(queries[order], np.arange(number))]
    pairs = torch.from_numpy(first)
    top = (part.cpu()[pairs] for part in (ranking.top_indices, ranking.top_scores))
    return GradedRanking(Ranking(torch.from_numpy(places[first]), *top), pairs, gained / possible)


def average_precision(ranking: Ranking, queries: ArrayLike) -> np.ndarray:
    """Computes each query's average precision, float64[Q]: the mean precision at the ranks of its relevant codes.

    The mean over queries is MAP. Ties count against the query: among codes that score the same, the irrelevant ones
    come first.

    Args:
        ranking: the ranking of the P pairs, as for `graded_ranking`.
        queries (`int[P]`): the query of each pair, numbered from 0 without gaps.
    """
    queries, ranks = np.asarray(queries), ranking.ranks.numpy(force=True)
    places = _places(ranks, queries, np.ones(len(ranks)))
    relevant = _running(np.lexsort((places, queries)), queries) + 1
    return np.bincount(queries, relevant / places) / np.bincount(queries)


def _places(ranks: np.ndarray, queries: np.ndarray, grades: np.ndarray) -> np.ndarray:
    """Returns the place of each pair's code, int64[P]; in `ranking`, relevant codes that tie share the last rank."""
    order = np.lexsort((-grades, ranks, queries))
    tie = np.unique(np.stack([queries, ranks]), axis=1, return_inverse=True)[1].reshape(-1)
    return ranks - _running(order, tie)


def _running(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Counts the earlier members of the same group, int64[P]. `order` keeps groups together."""
    sorted_groups = groups[order]
    begins = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
    counts = np.diff(np.r_[begins, len(order)])
    running = np.empty(len(order), dtype=np.int64)
    running[order] = np.arange(len(order)) - np.repeat(begins, counts)
    return running


def _gain(places: np.ndarray, queries: np.ndarray, grades: np.ndarray, k: int) -> np.ndarray:
    """Computes the discounted cumulative gain of each query, float64[Q]."""
    gains = np.where(places <= k, (np.exp2(grades) - 1) / np.log2(places + 1), 0.0)
    return np.bincount(queries, gains)


def mean_over_sets(metrics: dict[str, float], prefix: str, keys: tuple[str, ...]) -> dict[str, float]:
    """Averages over the sets every metric that all of them have, leaving out counts and times."""
    names = [name.removeprefix(f"{prefix}_{keys[0]}_") for name in metrics if name.startswith(f"{prefix}_{keys[0]}_")]
    left_out = ("pool_size", "queries", "runtime", "per_second")
    means = {}
    for name in names:
        values = [metrics.get(f"{prefix}_{key}_{name}") for key in keys]
        if not name.endswith(left_out) and None not in values:
            means[f"{prefix}_{name}"] = float(np.mean(values))
    return means
