"""The BM25 estimator: it slices one sparse matrix of term counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.neighbours import Neighbours, cached_neighbours, nearest_by_terms
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, Rows, as_array
from soft_trainer.estimators.bm25_scores import IDFS, bm25_weights, count_terms

SCOPES = ("batch", "corpus")


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
    ):
        if idf not in IDFS:
            raise UserError(f"idf={idf!r}: use one of {', '.join(IDFS)}")
        if scope not in SCOPES:
            raise UserError(f"scope={scope!r}: use one of {', '.join(SCOPES)}")
        self.column, self.document_column = column, document_column or column
        self.k1, self.b, self.idf, self.scope, self.average_length = k1, b, idf, scope, average_length

    def check(self, dataset) -> None:
        """Raises UserError if a column is missing or lacks values."""
        for name in {self.column, self.document_column}:
            _column(dataset, name)

    def fit(self, dataset) -> None:
        """Counts the tokens of every row, once. A text column is split at white space."""
        terms: dict = {}
        self._queries = count_terms(_tokens(dataset, self.column), terms)
        if self.document_column == self.column:
            self._documents = self._queries
        else:
            self._documents = count_terms(_tokens(dataset, self.document_column), terms)
            self._queries.resize(self._documents.shape)
        self._average_length, self._term_idf = self.average_length, None
        if self.scope == "corpus":
            if self.average_length is None:
                self._average_length = self._documents.sum() / len(dataset)
            having = np.bincount(self._documents.indices, minlength=self._documents.shape[1])
            self._term_idf = IDFS[self.idf](len(dataset), having)

    @property
    def compares_codes(self) -> bool:
        """True if queries are scored against codes, False if against the codes' queries."""
        return self.document_column != self.column

    def neighbours(
        self,
        k: int,
        text_ids: Sequence[np.ndarray] = (),
        progress: str | None = None,
        rows: int | None = None,
        codes: int | None = None,
    ) -> Neighbours:
        """The k rows whose documents score highest for each row's query, with the statistics of all rows."""
        weights = bm25_weights(self._documents, "lucene", self.k1, self.b)
        queries, documents = self._queries[:rows], weights[:codes]
        return cached_neighbours(
            None, "", lambda: nearest_by_terms(queries, documents, k, text_ids=text_ids, progress=progress)
        )

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """BM25 scores, Tensor[Q, C] in float64."""
        queries, documents = self._queries[as_array(query_rows)], self._documents[as_array(code_rows)]
        weights = bm25_weights(documents, self.idf, self.k1, self.b, self._average_length, self._term_idf)
        return torch.from_numpy((queries @ weights.T).toarray())


def _tokens(dataset, name: str) -> Iterator[Sequence]:
    return (text.split() if isinstance(text, str) else text for text in _column(dataset, name))


def _column(dataset, name: str) -> Sequence:
    """A column of token lists, or the column of texts (named without `_tokens`) where a data set has no tokens."""
    column = next((column for column in (name, name.removesuffix("_tokens")) if column in dataset.column_names), None)
    if column is None:
        raise UserError(f"BM25 reads column {name!r}, the training set has: {', '.join(dataset.column_names)}")
    values = dataset.select_columns(column).with_format("arrow")[:][column]
    if values.null_count:
        row = values.is_null().index(True).as_py() + 1
        raise UserError(f"BM25 reads column {column!r}, which has no value in row {row} of the training set")
    return dataset[column]
