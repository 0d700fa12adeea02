"""Evaluation: matches queries with a corpus, checks both before training, and ranks the corpus on all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments

from soft_trainer import distributed
from soft_trainer.data.columns import ANY_COLUMNS, ColumnNames, has_code
from soft_trainer.data.judgments import Judgments, Split
from soft_trainer.data.layouts.codesearchnet import corpus_of
from soft_trainer.data.python_rows import as_evaluations, as_rows
from soft_trainer.data.row_checks import check_targets
from soft_trainer.encoders.encoding import comparable, shorten
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking, rank_codes, retrieval_metrics
from soft_trainer.evaluation.retrieval import (
    RetrievalOutput,
    answer_pairs,
    by_query,
    check_answers,
    means,
    mrr_by_dims,
)

Corpora = Dataset | Mapping[str, Dataset] | None


def evaluation_split(
    queries, corpora: Corpora, key: str | None = None, name: str = "eval_dataset", columns: ColumnNames = ANY_COLUMNS
) -> Split:
    """Returns queries together with their corpus and relevant codes.

    Args:
        queries: rows with a query and the `url` of its code, or with a query and a code, or a `Split`, which has its
            own corpus.
        corpora: rows with `url` and a code, or a dict of them. If None, the corpus consists of the queries' positives.
        key: the key of the corpus if `corpora` is a dict.
        name: the name of the queries for messages.
        columns: the names of the rows' columns, if they are not recognised.

    Raises:
        UserError: the corpus is missing, or it contains no relevant code to a query.
    """
    queries = as_rows(queries, name)
    if isinstance(queries, Split):
        check_answers(queries, name)
        return queries
    if not isinstance(corpora, Mapping):
        corpora = {key: corpora}
    if key not in corpora:
        raise UserError(f"codebase: no corpus for {key!r}, only for {', '.join(map(repr, corpora))}")
    queries, corpus = as_evaluations(queries, corpora[key], columns)
    if corpus is None and queries is not None and has_code(queries):
        corpus = corpus_of([queries])
    if corpus is None:
        raise UserError("evaluation needs a corpus: pass codebase= (a Dataset with url and code)")
    check_targets(queries, corpus, name)
    return Split.from_urls(queries, corpus)


def check_evaluations(args: TrainingArguments, sets, corpora: Corpora) -> None:
    """Checks before training that evaluation will work.

    Args:
        sets: queries as in `evaluation_split`, or a dict of them.

    Raises:
        UserError: a set is empty, its queries have no corpus, or the corpus contains no relevant code to a query.
    """
    if args.eval_strategy == "no" and not args.eval_on_start:
        return
    if sets is None:
        raise UserError("eval_strategy, eval_on_start: pass eval_dataset= (rows with url and a query)")
    if not isinstance(sets, Mapping):
        evaluation_split(sets, corpora)
        return
    for key, queries in sets.items():
        evaluation_split(queries, corpora, key, f"eval_dataset[{key!r}]")


def rank_corpus(
    queries: Tensor, codes: Tensor, split: Split, encoder: EncoderProfile, dims: Iterable[int], top_k: int
) -> RetrievalOutput:
    """Ranks the corpus for every query and computes metrics, for full embeddings and for their leading dimensions.

    Args:
        queries, codes: the embeddings of the queries and of the corpus, to be compared by dot product.
        dims: the numbers of leading dimensions to measure in addition to full embeddings.
        top_k: the number of codes to return for each query.
    """
    judgments = split.judgments
    pool_size = len(split.corpus)
    ranking, of_queries = by_query(_rank_answers(queries, codes, judgments, top_k, encoder.score_scale), judgments)
    shorter = {}
    for dim in dims:
        sides = [comparable(encoder, shorten(encoder, side, dim)) for side in (queries, codes)]
        shorter[dim], _ = by_query(_rank_answers(*sides, judgments, top_k, encoder.score_scale), judgments)
    metrics = retrieval_metrics(ranking.ranks, pool_size) | means(of_queries) | mrr_by_dims(shorter, pool_size)
    return RetrievalOutput(ranking, metrics, shorter, of_queries)


def _rank_answers(queries: Tensor, codes: Tensor, judgments: Judgments, top_k: int, score_scale: float) -> Ranking:
    """Returns the ranks of all relevant codes. Each process ranks its share of them and receives the ranks of all."""
    rows, targets = answer_pairs(judgments)
    shard = distributed.shard(len(rows), *distributed.rank_and_world_size())
    asked = queries[rows[shard].to(queries.device)]
    local = rank_codes(asked, codes, targets[shard], top_k=top_k, score_scale=score_scale)
    return Ranking(*(distributed.gather(part) for part in (local.ranks, local.top_indices, local.top_scores)))
