"""Ranks a whole corpus for every query, on all processes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from soft_trainer import distributed
from soft_trainer.data.split import Judgments, Split
from soft_trainer.encoders.encoding import comparable, shorten
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.ranking import Ranking, rank_codes, retrieval_metrics
from soft_trainer.evaluation.retrieval import (
    RetrievalOutput,
    answer_pairs,
    by_query,
    means,
    mrr_by_dims,
)


def rank_corpus(
    queries: Tensor, codes: Tensor, split: Split, encoder: EncoderProfile, dims: Iterable[int]
) -> RetrievalOutput:
    """Ranks the corpus for every query and computes metrics, for full embeddings and for their leading dimensions.

    Args:
        queries, codes: the embeddings of the queries and of the corpus, to be compared by dot product.
        dims: the numbers of leading dimensions to measure in addition to full embeddings.
    """
    judgments = split.judgments
    pool_size = len(split.corpus)
    ranking, of_queries = by_query(_rank_answers(queries, codes, judgments, encoder.score_scale), judgments)
    shorter = {}
    for dim in dims:
        sides = [comparable(encoder, shorten(encoder, side, dim)) for side in (queries, codes)]
        shorter[dim], _ = by_query(_rank_answers(*sides, judgments, encoder.score_scale), judgments)
    metrics = retrieval_metrics(ranking.ranks, pool_size) | means(of_queries) | mrr_by_dims(shorter, pool_size)
    return RetrievalOutput(ranking, metrics, shorter, of_queries)


def _rank_answers(queries: Tensor, codes: Tensor, judgments: Judgments, score_scale: float) -> Ranking:
    """Returns the ranks of all relevant codes. Each process ranks its share of them and receives the ranks of all."""
    rows, targets = answer_pairs(judgments)
    shard = distributed.shard(len(rows), *distributed.rank_and_world_size())
    asked = queries[rows[shard].to(queries.device)]
    local = rank_codes(asked, codes, targets[shard], score_scale=score_scale)
    return Ranking(*(distributed.gather(part) for part in (local.ranks, local.top_indices, local.top_scores)))
