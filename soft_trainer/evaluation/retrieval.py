"""Evaluates retrieval, with support for several relevant functions per query, grades, and Matryoshka embeddings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from soft_trainer.data.column_names import OWN_ID, TEXT_ID
from soft_trainer.data.split import Judgments, Split
from soft_trainer.encoders.encoding import comparable, shorten
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking, rank_codes, retrieval_metrics
from soft_trainer.system import distributed
from soft_trainer.system.files import written_aside
from soft_trainer.system.fingerprints import rows_fingerprint

TAG = "soft_trainer"  # the name of the system, the last field of a line in a run file
CUT = 10  # the ranks that count for nDCG
MAP = "map"
UNRANKED = "queries_in_corpus"  # the number of queries that are also in the corpus, and not ranked for themselves
NDCG = "ndcg@10"


@dataclass(frozen=True)
class RetrievalOutput:
    """The output of `SoftInfoNCETrainer.predict`: rankings and metrics.

    Args:
        ranking: the rank of each query's best-ranked relevant function, and the top functions.
        metrics: the metrics of this ranking, keyed by name.
        by_query: the average precision and nDCG of each query, float64[Q] each.
        label_ids: the corpus index of each query's best relevant function, int64[Q], as in `PredictionOutput`.
    """

    ranking: Ranking
    metrics: dict[str, float]
    by_query: dict[str, np.ndarray] = field(default_factory=dict)
    label_ids: np.ndarray | None = None

    def __repr__(self) -> str:
        figures = [f"{name}={value:.4f}" for name, value in self.metrics.items() if name.endswith("mrr")]
        return f"RetrievalOutput({', '.join([f'queries={len(self.ranks)}', *figures])})"

    @property
    def ranks(self) -> Tensor:
        """The rank of each query's best-ranked relevant function, LongTensor[Q], starting at 1."""
        return self.ranking.ranks

    @property
    def top_indices(self) -> Tensor:
        """The corpus indices of each query's top functions, LongTensor[Q, k], best first."""
        return self.ranking.top_indices

    @property
    def predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """The ranks and the top indices as arrays, which `compute_metrics` gets, as in `PredictionOutput`."""
        return self.ranks.numpy(force=True), self.top_indices.numpy(force=True)

    def write_run_file(self, path: str | Path, split: Split) -> str:
        """Writes each query's top functions for trec_eval, ranx or ir-measures, and the judgments to `PATH.qrels`.

        A line is `query Q0 function rank score tag`, or `query 0 function grade` for a judgment. Queries and functions
        have the ids of their source. Without ids, or if ids repeat, they are numbered: `q1`, `c1`.

        Set `top_k` in `predict` to list more than ten functions. Mean average precision needs the whole corpus.

        Args:
            split: the split that was ranked.

        Returns:
            A line that states how many functions are listed for each query, and how many queries have a tie.

        Raises:
            UserError: an id contains white space, or a grade is not an integer.
        """
        ids = []
        if OWN_ID in split.queries.column_names:
            ids = split.queries[OWN_ID][:]
        queries = _written_ids(ids, len(split.queries), "q")
        codes = _written_ids(split.corpus["url"][:], len(split.corpus), "c")
        judged = split.judgments.relevant.tocoo()
        if (judged.data % 1).any():
            raise UserError(
                f"{path}: the format holds integer grades, but a grade is {judged.data[judged.data % 1 > 0][0]}"
            )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        tied = 0
        with written_aside(path) as aside, open(aside, "w", encoding="utf-8") as file:
            top = zip(self.ranking.top_indices.tolist(), self.ranking.top_scores.numpy(force=True), strict=True)
            for query, (columns, scores) in enumerate(top):
                relevant = np.isin(columns, split.judgments.relevant[query].indices)
                tied += int((scores[relevant][:, None] == scores).sum() > relevant.sum())
                for rank, (column, score) in enumerate(zip(columns, scores, strict=True), 1):
                    if score > -np.inf:  # otherwise, the function is the query itself, which is not ranked
                        file.write(f"{queries[query]} Q0 {codes[column]} {rank} {score!s} {TAG}\n")
        with written_aside(f"{path}.qrels") as aside, open(aside, "w", encoding="utf-8") as file:
            for query, code, grade in zip(judged.row, judged.col, judged.data, strict=True):
                file.write(f"{queries[query]} 0 {codes[code]} {int(grade)}\n")
        depth = self.ranking.top_indices.shape[1]
        line = f"{path} and {path}.qrels: the first {depth:,} of {len(codes):,} functions for each query"
        if depth < len(codes):
            line += ", so MAP will be too low"
        if tied:
            line += (
                f"; {tied:,} of {len(queries):,} queries have a relevant function with the score of another function"
            )
        return line


def _written_ids(ids: list[str], number: int, letter: str) -> list[str]:
    """Returns the ids, or numbers if there are no ids, some are hashes of texts, or some repeat."""
    if len({*ids}) < number or any(each.startswith(TEXT_ID) for each in ids):
        return [f"{letter}{row}" for row in range(1, number + 1)]
    for each in ids:
        if not each or len(each.split()) > 1 or each != each.strip():
            raise UserError(f"the id {each!r} has a blank, which separates fields in a run file: set --id_column")
    return ids


def rank_corpus(
    queries: Tensor, codes: Tensor, split: Split, encoder: EncoderProfile, dims: Iterable[int], top_k: int = 10
) -> RetrievalOutput:
    """Ranks the corpus for every query and computes metrics, for full and for truncated embeddings.

    Args:
        queries, codes: the embeddings of the queries and of the corpus, to be compared by dot product.
        dims: the truncated embedding sizes to measure in addition to full embeddings.
        top_k: the number of top functions to return for each query.
    """
    judgments = split.judgments
    pool_size = len(split.corpus)
    unranked = split.unranked()
    ranked = _rank_answers(queries, codes, judgments, encoder.score_scale, unranked, top_k)
    ranking, of_queries = by_query(ranked, judgments)
    metrics = retrieval_metrics(ranking.ranks, pool_size) | means(of_queries)
    for dim in dims:
        sides = [comparable(encoder, shorten(encoder, side, dim)) for side in (queries, codes)]
        shorter, _ = by_query(_rank_answers(*sides, judgments, encoder.score_scale, unranked), judgments)
        metrics[shorter_metric(dim)] = retrieval_metrics(shorter.ranks, pool_size)["mrr"]
    if unranked is not None:
        metrics[UNRANKED] = int((unranked >= 0).sum())
    return RetrievalOutput(ranking, metrics, of_queries)


def _rank_answers(
    queries: Tensor,
    codes: Tensor,
    judgments: Judgments,
    score_scale: float,
    unranked: np.ndarray | None,
    top_k: int = 10,
) -> Ranking:
    """Ranks every query's relevant functions. Each process ranks a shard and receives the ranks from all shards."""
    rows, targets = answer_pairs(judgments)
    shard = distributed.shard(len(rows), *distributed.rank_and_world_size())
    asked = queries[rows[shard].to(queries.device)]
    excluded = None
    if unranked is not None:
        excluded = torch.from_numpy(unranked)[rows[shard]]
    local = rank_codes(asked, codes, targets[shard], top_k, score_scale, excluded=excluded)
    return Ranking(*map(distributed.gather, (local.ranks, local.top_indices, local.top_scores)))


def answer_pairs(judgments: Judgments) -> tuple[Tensor, Tensor]:
    """Returns the query index and the code index of each relevant pair, LongTensor[P] each, ordered by query."""
    queries, codes = torch.from_numpy(judgments.stored.pairs()).T
    return queries, codes


def best_answers(judgments: Judgments) -> np.ndarray:
    """Returns the index of each query's relevant function with the highest grade (the first in a tie), int64[Q]."""
    judged = judgments.relevant.tocoo()
    pairs = pd.DataFrame({"query": judged.row, "grade": judged.data})
    return judged.col[pairs.groupby("query")["grade"].idxmax()].astype(np.int64)


def by_query(ranking: Ranking, judgments: Judgments) -> tuple[Ranking, dict[str, np.ndarray]]:
    """Reduces the ranks of all relevant functions to each query's best rank, and computes average precision and nDCG.

    In nDCG, the gain of a function at rank p is its grade divided by log2(p + 1). The sum over the first ten ranks is
    divided by the best possible sum. Ties are broken against the query: among functions with the same score,
    irrelevant functions come first, then functions with lower grades.

    Args:
        ranking: the ranking of the P pairs from `answer_pairs`. Every query has at least one pair.

    Returns:
        The ranking of the Q queries by their best-ranked relevant functions. Then a dict with the average precision
        (`map`) and nDCG (`ndcg@10`) of each query, float64[Q] each.
    """
    judged = judgments.relevant.tocoo()
    pairs = pd.DataFrame({"query": judged.row, "grade": judged.data.astype(np.float64)})
    pairs["rank"] = ranking.ranks.numpy(force=True)
    by_grade = pairs.sort_values("grade", ascending=False, kind="stable")
    # Relevant functions with the same score all have the last one's rank.
    pairs["position"] = pairs["rank"] - by_grade.groupby(["query", "rank"]).cumcount()
    first = torch.tensor(pairs.groupby("query")["position"].idxmin().to_numpy())
    ranks = torch.tensor(pairs["position"].to_numpy())[first]
    best = Ranking(ranks, ranking.top_indices.cpu()[first], ranking.top_scores.cpu()[first])
    gains = pairs["grade"]
    sums = []
    for position in (pairs["position"], by_grade.groupby("query").cumcount().sort_index() + 1):  # found, and ideal
        discounted = np.where(position <= CUT, gains / np.log2(position + 1), 0.0)
        sums.append(np.bincount(pairs["query"], discounted))
    gained, possible = sums
    # The order of functions that tie affects only the last digit, through the order of the sum.
    position = pairs["rank"] - pairs.groupby(["query", "rank"]).cumcount()
    number = position.groupby(pairs["query"]).rank(method="first")
    precision = np.bincount(pairs["query"], number / position) / np.bincount(pairs["query"])
    return best, {MAP: precision, NDCG: gained / possible}


def means(measured: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Averages each measure, an array over the queries, and returns the means keyed by name."""
    return {name: float(values.mean()) for name, values in measured.items()}


def by_corpus(sets: Mapping[str, Split]) -> list[dict[str, Split]]:
    """Groups evaluation sets whose corpora have equal rows, so that each corpus is encoded once."""
    groups = defaultdict(dict)
    for name, split in sets.items():
        groups[rows_fingerprint(split.corpus)][name] = split
    return list(groups.values())


def mean_over_sets(metrics: dict[str, float], prefix: str, keys: tuple[str, ...]) -> dict[str, float]:
    """Averages the metrics that every set has, except counts and times.

    Args:
        metrics: metrics named `PREFIX_KEY_NAME`.
        keys: the names of the sets.

    Returns:
        The means, named `PREFIX_NAME`.
    """
    start = f"{prefix}_{keys[0]}_"
    excluded = ("pool_size", "queries", UNRANKED, "runtime", "per_second")
    means = {}
    for metric in metrics:
        if not metric.startswith(start):
            continue
        name = metric.removeprefix(start)
        values = [metrics.get(f"{prefix}_{key}_{name}") for key in keys]
        if not name.endswith(excluded) and all(isinstance(value, Real | Tensor) for value in values):
            means[f"{prefix}_{name}"] = float(np.mean(values))
    return means


# ---- Matryoshka embeddings: the MRR of truncated embeddings, such as `mrr_256` ----


def shorter_metric(dim: int) -> str:
    """Returns the name of the MRR with embeddings truncated to `dim` dimensions: `mrr_256`."""
    return f"mrr_{dim}"


def shorter_titles(metrics: Iterable[str]) -> dict[str, str]:
    """Returns table titles for the MRRs of truncated embeddings in `metrics`, keyed by name, most dimensions first."""
    dims = []
    for name in metrics:
        if match := re.fullmatch(r"mrr_(\d+)", name):
            dims.append(int(match[1]))
    return {shorter_metric(dim): f"MRR, {dim} dimensions" for dim in sorted(dims, reverse=True)}
