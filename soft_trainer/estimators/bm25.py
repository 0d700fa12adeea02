"""The BM25 estimator, which slices one sparse matrix of term counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from scipy import sparse
from torch import Tensor

from soft_trainer.data.array_cache import DEFAULT_FOLDER
from soft_trainer.data.neighbours import Neighbours, cached_neighbours
from soft_trainer.data.term_neighbours import nearest_by_terms
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, Rows, as_array
from soft_trainer.estimators.bm25_scores import IDFS, bm25_weights

SCOPES = ("batch", "corpus")
SPLIT_AT_ONCE = 1 << 14  # texts


class BM25Estimator(Estimator):
    """BM25 scores of one row's tokens against another's (Section 3.2, "BM25").

    By default it scores queries against queries: a code is as relevant as its own query. A token that occurs k times
    in the query counts k times.

    Args:
        column: the tokens of the query side, lists of str or of int ids.
        document_column: the tokens scored against; `code_tokens` is the paper's other reading. Default: `column`.
        k1, b: BM25's saturation and length normalisation.
        idf: "okapi" (rank_bm25's, a negative idf is raised to a quarter of the mean), "robertson" (the published
            formula, negative for a token in over half of the documents) or "lucene" (always positive).
        scope: "batch" takes document frequencies and mean length from `code_rows` alone, as published; "corpus" from
            the whole training set.
        average_length: mean document length; by default that of the scope.
        cache_dir: the folder that keeps neighbours for the next run; None keeps them in memory only.

    Raises:
        UserError: an unknown idf or scope, or (in `fit`) a missing column.
    """

    alpha, beta, temperature = 1.5, 0.5, 1.0
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
        self.column, self.document_column = column, document_column or column
        self.k1, self.b, self.idf, self.scope, self.average_length = k1, b, idf, scope, average_length
        self.cache_dir = cache_dir

    def check(self, dataset) -> None:
        """Raises UserError if a column is missing or lacks values."""
        for name in {self.column, self.document_column}:
            _column(dataset, name)

    def fit(self, dataset) -> None:
        """Counts the tokens of every row, once. A text column is split at white space."""
        columns = [_column(dataset, name) for name in dict.fromkeys((self.column, self.document_column))]
        counts = count_arrow_terms([_token_lists(column) for column in columns])
        self._queries, self._documents = counts[0], counts[-1]
        self._average_length, self._term_idf = self.average_length, None
        if self.scope == "corpus":
            if self.average_length is None:
                self._average_length = self._documents.sum(dtype=np.float64) / len(dataset)
            having = np.bincount(self._documents.indices, minlength=self._documents.shape[1])
            self._term_idf = IDFS[self.idf](len(dataset), having)

    @property
    def compares_codes(self) -> bool:
        """True if queries are scored against codes, False if against the codes' queries."""
        return self.document_column != self.column

    def neighbours(self, k: int, text_ids=(), progress=None, rows=None, codes=None) -> Neighbours:
        """Finds the k rows whose documents score highest for each row's query, with the statistics of all rows."""
        weights = bm25_weights(self._documents, "lucene", self.k1, self.b)
        queries, documents = self._queries[:rows], weights[:codes]
        build = partial(nearest_by_terms, queries, documents, k, text_ids=text_ids, progress=progress)
        return cached_neighbours(self.cache_dir, [queries, documents, *text_ids], k, build)

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes BM25 scores, Tensor[Q, C] in float64."""
        queries, documents = self._queries[as_array(query_rows)], self._documents[as_array(code_rows)]
        weights = bm25_weights(documents, self.idf, self.k1, self.b, self._average_length, self._term_idf)
        return torch.from_numpy((queries @ weights.T).toarray())


def _column(dataset, name: str) -> pa.ChunkedArray:
    """Returns a column of token lists, or the column of texts (named without `_tokens`) if there are no tokens."""
    column = next((column for column in (name, name.removesuffix("_tokens")) if column in dataset.column_names), None)
    if column is None:
        raise UserError(f"BM25 reads column {name!r}, the training set has: {', '.join(dataset.column_names)}")
    values = dataset.select_columns(column).with_format("arrow")[:][column]
    if values.null_count:
        row = values.is_null().index(True).as_py() + 1
        raise UserError(f"BM25 reads column {column!r}, which has no value in row {row} of the training set")
    return values


def _token_lists(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns lists of tokens; texts are split at white space."""
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return values
    lists, parts = pa.list_(pa.string()), []
    for start in range(0, len(values), SPLIT_AT_ONCE):
        texts = values.slice(start, SPLIT_AT_ONCE).to_pylist()
        # Arrow's own notion of white space differs from Python's in control characters.
        parts.append(pa.array([text.split() for text in texts], lists))
    return pa.chunked_array(parts, lists)


def count_arrow_terms(columns: Sequence[pa.ChunkedArray]) -> list[sparse.csr_matrix]:
    """Counts the tokens of each row of columns of token lists, float32[rows, terms] each.

    The terms are those of all columns, in the order of their first appearance.
    """
    kind = columns[0].type.value_type
    # `flatten` heeds the slice of an array, and leaves nothing out because no row is null.
    flat = [pa.chunked_array([chunk.flatten() for chunk in column.chunks], kind) for column in columns]
    tokens = pa.chunked_array([chunk for column in flat for chunk in column.chunks], kind)
    encoded = tokens.dictionary_encode(null_encoding="encode").chunks  # one dictionary; an empty chunk may be missing
    terms = max(len(encoded[-1].dictionary) if encoded else 0, 1)
    numbers = np.concatenate([np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in encoded)])
    parts, counts = np.split(numbers, np.cumsum([len(column) for column in flat[:-1]])), []
    for column, indices in zip(columns, parts, strict=True):
        starts = np.cumsum(np.r_[0, pc.list_value_length(column).to_numpy()])
        ones = np.ones(len(indices), np.float32)
        counts.append(sparse.csr_matrix((ones, indices, starts), shape=(len(column), terms)))
        counts[-1].sum_duplicates()
    return counts
