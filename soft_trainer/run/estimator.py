"""Creates the estimator that a run's options select."""

from __future__ import annotations

from collections.abc import Sequence

from soft_trainer.estimators.registry import make_estimator
from soft_trainer.options.fields import DataArguments


def choose_estimator(
    arguments: DataArguments, query_columns: Sequence[str] = ("docstring_tokens",), trust_remote_code: bool = False
):
    """Creates the estimator that `--estimator` selects, or returns None for "none". See `make_estimator`.

    Args:
        query_columns: the columns of the queries. BM25 reads the first one.
        trust_remote_code: run the code that comes with the encoder of `--estimator_model`.
    """
    return make_estimator(
        arguments.estimator or "none",
        arguments.estimator_model,
        arguments.estimator_cache_dir,
        trust_remote_code,
        column=query_columns[0],
        document_column=arguments.bm25_document_column,
        idf=arguments.bm25_idf,
        scope=arguments.bm25_scope,
    )
