"""Turns rankings into results: of several relevant codes per query, by first dimensions, and over several sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics


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
    """The ranking of queries with several relevant codes, and how well all of these are found.

    Args:
        ranking: one rank for each of Q queries, that of its best relevant code.
        pairs (`LongTensor[Q]`): the (query, code) pair that holds this code.
        ndcg (`float64[Q]`): normalised discounted cumulative gain of the first k ranks, from 0 to 1.
        average_precision (`float64[Q]`): the mean precision at the ranks of the relevant codes; its mean is MAP.
    """

    ranking: Ranking
    pairs: Tensor
    ndcg: np.ndarray
    average_precision: np.ndarray


def graded_ranking(ranking: Ranking, queries: ArrayLike, grades: ArrayLike, k: int = 10) -> GradedRanking:
    """Turns the ranks of all (query, relevant code) pairs into one rank, nDCG@k and average precision for each query.

    A grade g at rank p gains (2^g - 1) / log2(p + 1). The sum is divided by that of the best order of the query's
    relevant codes. Ties count against the query: among codes that score the same, the irrelevant ones come first, then
    those of lower grades.

    Args:
        ranking: the ranking of P pairs from `rank_codes`.
        queries (`int[P]`): the query of each pair, numbered from 0 without gaps.
        grades (`float[P]`): the relevance of each pair's code, above 0.
        k (`int`, *optional*, defaults to 10): number of ranks that count for nDCG.
    """
    pairs = pd.DataFrame({"query": np.asarray(queries), "grade": np.asarray(grades, dtype=np.float64)})
    pairs["rank"] = ranking.ranks.numpy(force=True)
    by_grade = pairs.sort_values("grade", ascending=False, kind="stable")
    # Relevant codes that tie have one rank, the last of their places.
    pairs["place"] = pairs["rank"] - by_grade.groupby(["query", "rank"]).cumcount()
    pairs["best_place"] = by_grade.groupby("query").cumcount() + 1
    gains = np.exp2(pairs["grade"]) - 1
    gained, possible = (
        np.bincount(pairs["query"], np.where(places <= k, gains / np.log2(places + 1), 0.0))
        for places in (pairs["place"], pairs["best_place"])
    )
    # The order of codes that tie changes only the order of this sum, and with it the last digit.
    place = pairs["rank"] - pairs.groupby(["query", "rank"]).cumcount()
    found = place.groupby(pairs["query"]).rank(method="first")
    precision = np.bincount(pairs["query"], found / place) / np.bincount(pairs["query"])
    first = torch.tensor(pairs.groupby("query")["place"].idxmin().to_numpy())
    ranks = torch.tensor(pairs["place"].to_numpy())[first]
    top = (part.cpu()[first] for part in (ranking.top_indices, ranking.top_scores))
    return GradedRanking(Ranking(ranks, *top), first, gained / possible, precision)


def mean_over_sets(metrics: dict[str, float], prefix: str, keys: tuple[str, ...]) -> dict[str, float]:
    """Averages over the sets every number that all of them have, leaving out counts and times."""
    start = f"{prefix}_{keys[0]}_"
    left_out = ("pool_size", "queries", "runtime", "per_second")
    means = {}
    for name in (name.removeprefix(start) for name in metrics if name.startswith(start)):
        values = [metrics.get(f"{prefix}_{key}_{name}") for key in keys]
        if not name.endswith(left_out) and all(isinstance(value, Real | Tensor) for value in values):
            means[f"{prefix}_{name}"] = float(np.mean(values))
    return means


# ---- Matryoshka embeddings: the MRR by the first dimensions, such as `mrr_256`, in addition to `mrr` ----


def shorter_metric(dim: int) -> str:
    """Returns the name of the MRR by the first `dim` dimensions."""
    return f"mrr_{dim}"


def shorter_titles(metrics: Iterable[str]) -> dict[str, str]:
    """Finds the MRRs by first dimensions among `metrics`; returns name -> title, most dimensions first."""
    dims = {int(match[1]) for match in map(re.compile(r"mrr_(\d+)").fullmatch, metrics) if match}
    return {shorter_metric(dim): f"MRR by {dim} dimensions" for dim in sorted(dims, reverse=True)}


def mrr_by_dims(rankings: Mapping[int, Ranking], pool_size: int) -> dict[str, float]:
    """Computes the MRR of each ranking of `pool_size` codes; the rankings are keyed by their number of dimensions."""
    return {shorter_metric(dim): retrieval_metrics(each.ranks, pool_size)["mrr"] for dim, each in rankings.items()}
