"""Implements the BM25 estimator.

The libraries rank_bm25 and bm25s would have to build an index in every step, because the statistics change with each
batch. For 256 queries, they take 83 and 12 times as long (`benchmarks/bm25.py`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from scipy import sparse
from torch import Tensor

from soft_trainer.data.array_cache import DEFAULT_FOLDER
from soft_trainer.data.split import Split
from soft_trainer.data.term_counts import IDFS, SPLIT_AT_ONCE, as_arrow, bm25_weights, count_terms
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import CodeValues, NeighbourEstimator, Rows, as_array, check_fitted
from soft_trainer.estimators.neighbours import Excluded, Neighbours, cached_neighbours
from soft_trainer.estimators.term_neighbours import nearest_by_terms

SCOPES = ("batch", "corpus")
STRINGS = (pa.string(), pa.large_string())


class BM25Estimator(NeighbourEstimator):
    """Estimates the similarity of queries and functions by the BM25 score of their tokens (Section 3.2, "BM25").

    By default, queries are scored against queries: the score of a function is the score of the query in its first
    training pair. A token that occurs k times in the query counts k times.

    Args:
        column: the column with the tokens of queries, as lists of strings or of integer ids. A column of text is split
            at whitespace.
        document_column: the column with the tokens of documents. By default, `column`. With `code_tokens`, queries are
            scored against functions, another possible reading of the paper.
        k1, b: the parameters of saturation and of length normalisation.
        idf: "okapi" (as in rank_bm25, a negative idf is raised to a quarter of the mean), "robertson" (the published
            formula, negative for a token in more than half of the documents) or "lucene" (always positive).
        scope: the documents to compute document frequencies and the mean length from. "batch" uses the
            documents of `code_rows`. "corpus" uses the whole training set. The published code takes frequencies from
            the batch and the mean length from the training set, which needs `average_length`.
        average_length: the mean length of a document. By default, the mean over the documents in scope.
        cache_dir: the folder in which to cache neighbours for later runs. None keeps them in memory only.

    Raises:
        UserError: the idf or scope is unknown. `check` and `fit` also raise UserError if a column is missing or
            contains neither tokens nor text.
    """

    alpha = 1.5
    beta = 0.5
    temperature = 1.0
    positive_temperature = 1.0
    in_workers = True

    def __init__(
        self,
        column: str = "docstring_tokens",
        document_column: str | None = None,
        k1: float = 1.2,
        b: float = 0.75,
        idf: str = "okapi",
        scope: str = "batch",
        average_length: float | None = None,
        cache_dir: str | Path | None = DEFAULT_FOLDER,
    ):
        for name, value, known in (("idf", idf, IDFS), ("scope", scope, SCOPES)):
            if value not in known:
                raise UserError(f"{name}={value!r}: use one of {', '.join(known)}")
        self.column = column
        self.document_column = document_column or column
        self.k1 = k1
        self.b = b
        self.idf = idf
        self.scope = scope
        self.average_length = average_length
        self.cache_dir = cache_dir

    def check(self, split: Split) -> None:
        """Raises UserError if a column is missing, has missing values, or contains neither tokens nor text."""
        self._columns(split)

    def _columns(self, split: Split) -> list[pa.ChunkedArray]:
        columns = [_column(split.queries, self.column, "query")]
        if self.compares_codes:
            columns.append(_column(split.corpus, self.document_column, "code"))
        return columns

    def fit(self, split: Split) -> None:
        """Counts the tokens of every query and, if functions are compared, of every function."""
        counts = count_terms([_token_lists(column) for column in self._columns(split)])
        self._queries = counts[0]
        self._documents = counts[-1]
        first = None if self.compares_codes else split.judgments.first_queries()
        self._code_values = CodeValues(first)
        self._average_length = self.average_length
        self._term_idf = None
        if self.scope == "corpus":
            documents = self._documents
            if first is not None:
                documents = documents[first[first >= 0]]
            if self.average_length is None:
                self._average_length = documents.sum(dtype=np.float64) / documents.shape[0]
            having = np.bincount(documents.indices, minlength=documents.shape[1])
            self._term_idf = IDFS[self.idf](documents.shape[0], having)

    @property
    def compares_codes(self) -> bool:
        """True if queries are scored against functions, False if they are scored against other queries."""
        return self.document_column != self.column

    def neighbours(
        self, k: int, excluded: Excluded, codes: np.ndarray | None = None, progress: str | None = None
    ) -> Neighbours:
        """Finds the k functions with the highest BM25 score for each query. Raises UserError before `fit`.

        The scores always use Lucene's idf and the statistics of all searched functions, regardless of `idf` and
        `scope`.
        """
        check_fitted(self, "_queries")

        def find(documents: sparse.csr_matrix, excluded: Excluded) -> Neighbours:
            weights = bm25_weights(documents, "lucene", self.k1, self.b)
            build = partial(nearest_by_terms, self._queries, weights, k, excluded, progress=progress)
            return cached_neighbours(self.cache_dir, [self._queries, weights, *excluded.key], k, build)

        return self._code_values.neighbours(self._documents, codes, excluded, find)

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes BM25 scores of C functions for Q queries, Tensor[Q, C] float64. Raises UserError before `fit`."""
        check_fitted(self, "_queries")
        queries = self._queries[as_array(query_rows)]
        documents = self._documents[self._code_values.rows(code_rows)]
        weights = bm25_weights(documents, self.idf, self.k1, self.b, self._average_length, self._term_idf)
        return torch.from_numpy((queries @ weights.T).toarray())


def _column(dataset: Dataset, name: str, side: str) -> pa.ChunkedArray:
    """Returns a column of tokens or text, such as `code_tokens`. If the column is missing, returns `code` instead.

    Raises:
        UserError: both columns are missing, or the column has missing values or contains neither tokens nor text.
    """
    column = next((column for column in (name, name.removesuffix("_tokens")) if column in dataset.column_names), None)
    if column is None:
        raise UserError(
            f"BM25 reads column {name!r}, but the {side} rows have only: {', '.join(dataset.column_names)}; set "
            f"{side}_column"
        )
    values = dataset.with_format("arrow", columns=[column])[:][column]
    if values.null_count:
        row = values.is_null().index(True).as_py() + 1
        raise UserError(f"BM25 reads column {column!r}, but row {row} of the training set has no value in this column")
    kind = values.type
    listed = isinstance(kind, pa.ListType | pa.LargeListType)
    if listed:
        kind = kind.value_type
    fits = kind in STRINGS
    fits |= listed and (pa.types.is_integer(kind) or pa.types.is_null(kind))  # all lists may be empty
    if not fits:
        raise UserError(f"BM25 reads column {column!r}, which contains {values.type}, not tokens or text")
    return values


def _token_lists(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Converts a column of text or token lists to token lists. Text is split at whitespace."""
    if values.type in STRINGS:
        slices = (values.slice(start, SPLIT_AT_ONCE) for start in range(0, len(values), SPLIT_AT_ONCE))
        # Arrow's function for splitting treats some control characters differently from Python.
        return as_arrow(text.split() for part in slices for text in part.to_pylist())
    if values.type.value_type == pa.large_string():
        return values.cast(pa.list_(pa.string()))  # all columns must have the same type
    return values
