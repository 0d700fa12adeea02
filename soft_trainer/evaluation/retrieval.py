"""What is retrieved by what: queries, their own codes in a codebase, and how well they were found."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import ArrayLike
from torch import Tensor

from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking


@dataclass(frozen=True)
class RetrievalOutput:
    """What `SoftInfoNCETrainer.predict` returns: the ranking of every query's own code, and the metrics of it."""

    ranking: Ranking
    metrics: dict[str, float]

    @property
    def ranks(self) -> Tensor:
        """The rank of each query's own code, LongTensor[Q], 1 is best."""
        return self.ranking.ranks

    @property
    def top_indices(self) -> Tensor:
        """Rows of the codebase that came first, LongTensor[Q, k], best first."""
        return self.ranking.top_indices


@dataclass(frozen=True)
class GradedRanking:
    """Where the relevant codes of each query came.

    Args:
        ranking: of each of Q queries; its rank is that of the relevant code that came first.
        pairs (`LongTensor[Q]`): the (query, code) pair that this code is of.
        ndcg (`float64[Q]`): normalised discounted cumulative gain of the first k places, from 0 to 1.
    """

    ranking: Ranking
    pairs: Tensor
    ndcg: np.ndarray


def target_rows(dataset: Dataset, codebase: Dataset) -> Tensor:
    """The row of each query's own code in the codebase, LongTensor[Q], by `url`.

    Raises:
        UserError: a query whose url is not in the codebase.
    """
    places = {url: row for row, url in enumerate(codebase["url"][:])}
    urls = dataset["url"][:]
    missing = [url for url in urls if url not in places]
    if missing:
        raise UserError(f"{len(missing)} queries have a url that is not in the codebase, the first: {missing[0]}")
    return torch.tensor([places[url] for url in urls])


def graded_ranking(ranking: Ranking, queries: ArrayLike, grades: ArrayLike, k: int = 10) -> GradedRanking:
    """From the rank of every (query, relevant code) pair to one rank and one nDCG@k for each query.

    A grade g in place p gains (2^g - 1) / log2(p + 1), which is divided by what the best order of the query's relevant
    codes would gain. Ties are broken against us: among codes that score the same, the irrelevant ones come first, then
    those of lower grades.

    Args:
        ranking: of the P pairs, as `rank_codes` gives it: 1 + codes that score higher + others that score the same.
        queries (`int[P]`): the query of each pair, numbered from 0 without gaps.
        grades (`float[P]`): its relevance, above 0.
        k (`int`, *optional*, defaults to 10): places that count.

    Raises:
        UserError: arrays that do not fit, a grade that is not above 0, or a query number without a pair.
    """
    queries, grades = np.asarray(queries), np.asarray(grades, dtype=np.float64)
    ranks = ranking.ranks.numpy(force=True)
    if not len(ranks) == len(queries) == len(grades) > 0 or not (grades > 0).all():
        raise UserError(f"{len(ranks)} ranks need as many queries and grades above 0, and at least one")
    number = int(queries.max()) + 1
    if len(np.unique(queries)) != number:
        raise UserError("queries must be numbered from 0 without gaps")
    places = _places(ranks, queries, grades)
    ideal = _running(np.lexsort((-grades, queries)), queries) + 1
    gained, possible = (_gain(order, queries, grades, k) for order in (places, ideal))
    order = np.lexsort((places, queries))
    first = order[np.searchsorted(queries[order], np.arange(number))]
    pairs = torch.from_numpy(first)
    top = (part.cpu()[pairs] for part in (ranking.top_indices, ranking.top_scores))
    return GradedRanking(Ranking(torch.from_numpy(places[first]), *top), pairs, gained / possible)


def average_precision(ranking: Ranking, queries: ArrayLike) -> np.ndarray:
    """Average precision of each query, float64[Q]: the mean over its relevant codes of the precision at their places.

    Its mean over queries is MAP. Ties are broken against us: among codes that score the same, the irrelevant ones come
    first.

    Args:
        ranking: of the P pairs, as `graded_ranking` takes it.
        queries (`int[P]`): the query of each pair, numbered from 0 without gaps.

    Raises:
        UserError: arrays that do not fit, or a query number without a pair.
    """
    queries, ranks = np.asarray(queries), ranking.ranks.numpy(force=True)
    if not len(ranks) == len(queries) > 0:
        raise UserError(f"{len(ranks)} ranks need as many queries, and at least one")
    counts = np.bincount(queries)
    if not counts.all():
        raise UserError("queries must be numbered from 0 without gaps")
    places = _places(ranks, queries, np.ones(len(ranks)))
    relevant = _running(np.lexsort((places, queries)), queries) + 1
    return np.bincount(queries, relevant / places) / counts


def _places(ranks: np.ndarray, queries: np.ndarray, grades: np.ndarray) -> np.ndarray:
    """The place of each pair's code, int64[P]: relevant codes that score the same share a rank, the last of theirs."""
    order = np.lexsort((-grades, ranks, queries))
    tie = np.unique(np.stack([queries, ranks]), axis=1, return_inverse=True)[1].reshape(-1)
    return ranks - _running(order, tie)


def _running(order: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """How many members of its own group come before each one in `order`, which keeps groups together; int64[P]."""
    sorted_groups = groups[order]
    begins = np.flatnonzero(np.r_[True, sorted_groups[1:] != sorted_groups[:-1]])
    counts = np.diff(np.r_[begins, len(order)])
    running = np.empty(len(order), dtype=np.int64)
    running[order] = np.arange(len(order)) - np.repeat(begins, counts)
    return running


def _gain(places: np.ndarray, queries: np.ndarray, grades: np.ndarray, k: int) -> np.ndarray:
    """Discounted cumulative gain of each query, float64[Q]."""
    gains = np.where(places <= k, (np.exp2(grades) - 1) / np.log2(places + 1), 0.0)
    return np.bincount(queries, gains)
