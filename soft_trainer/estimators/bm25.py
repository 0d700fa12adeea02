"""BM25 between the queries of a batch, by slicing one sparse matrix of counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, Rows, as_array

OKAPI_EPSILON = 0.25  # rank_bm25's: a negative idf becomes this share of the mean idf

IDFS = {
    "okapi": lambda total, having: _floored(np.log(total - having + 0.5) - np.log(having + 0.5), having),
    "robertson": lambda total, having: np.log((total - having + 0.5) / (having + 0.5)),
    "lucene": lambda total, having: np.log1p((total - having + 0.5) / (having + 0.5)),
}
SCOPES = ("batch", "corpus")


def _floored(idf: np.ndarray, having: np.ndarray) -> np.ndarray:
    """rank_bm25's idf: its mean is over the terms that occur at all."""
    occurs = having > 0
    mean = idf[occurs].mean() if occurs.any() else 0.0
    return np.where(idf < 0, OKAPI_EPSILON * mean, idf)


class BM25Estimator(Estimator):
    """BM25 scores of one row's tokens against another's (Section 3.2, "BM25").

    Query against query by default: a code is as relevant as its own query is. A token that occurs k times in the
    query counts k times.

    Args:
        column: the tokens of the query side, lists of str or of int ids.
        document_column: the tokens scored against; `code_tokens` is the paper's other reading. Default: `column`.
        k1, b: BM25's saturation and length normalisation.
        idf: "okapi" (rank_bm25's, a negative idf is raised to a quarter of the mean), "robertson" (the published
            formula, negative for a token in over half of the documents) or "lucene" (always positive).
        scope: "batch" takes document frequencies and mean length from `code_rows` alone, as published; "corpus" from
            the whole training set.
        average_length: mean document length, where it should not come from the scope.

    Raises:
        UserError: an unknown idf or scope, or (in `fit`) a missing column.
    """

    alpha, beta, temperature = 1.5, 0.5, 1.0
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
        """Raise UserError for a column that is not there or lacks values."""
        for name in {self.column, self.document_column}:
            _column(dataset, name)

    def fit(self, dataset) -> None:
        """Count the tokens of every row, once. A text column is split at white space."""
        terms: dict = {}
        self._queries = _count(_column(dataset, self.column), terms)
        if self.document_column == self.column:
            documents = self._queries
        else:
            documents = _count(_column(dataset, self.document_column), terms)
        shape = (len(dataset), len(terms))
        self._queries.resize(shape)
        documents.resize(shape)
        self._documents = documents.tocsr()
        self._lengths = np.asarray(documents.sum(1)).ravel()
        if self.scope == "corpus":
            self._corpus_idf = IDFS[self.idf](len(dataset), np.bincount(documents.indices, minlength=len(terms)))
            self._corpus_length = self._lengths.mean() if self.average_length is None else self.average_length

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """BM25 scores, Tensor[Q, C] in float64."""
        queries, documents = self._queries[as_array(query_rows)], self._documents[as_array(code_rows)]
        lengths = self._lengths[as_array(code_rows)]
        if self.scope == "corpus":
            idf, average = self._corpus_idf[documents.indices], self._corpus_length
        else:
            idf = self._batch_idf(documents)
            average = lengths.mean() if self.average_length is None else self.average_length
        norms = self.k1 * (1 - self.b + self.b * lengths / max(average, 1e-12))
        norms = np.repeat(norms, np.diff(documents.indptr))
        documents.data = idf * documents.data * (self.k1 + 1) / (documents.data + norms)
        return torch.from_numpy((queries @ documents.T).toarray())

    def _batch_idf(self, documents: sparse.csr_matrix) -> np.ndarray:
        """The idf of every stored entry, from these documents alone."""
        _, term, having = np.unique(documents.indices, return_inverse=True, return_counts=True)
        return IDFS[self.idf](documents.shape[0], having)[term]


def _column(dataset, name: str) -> Sequence:
    """A column of token lists, or of the text that it is made of where a data set has no tokens."""
    found = next((column for column in (name, name.removesuffix("_tokens")) if column in dataset.column_names), None)
    if found is None:
        raise UserError(f"BM25 reads column {name!r}, the training set has: {', '.join(dataset.column_names)}")
    texts = dataset[found]
    empty = next((row for row, tokens in enumerate(texts) if tokens is None), None)
    if empty is not None:
        raise UserError(f"BM25 reads column {found!r}, which has no value in row {empty + 1} of the training set")
    return texts


def _count(texts: Sequence, terms: dict) -> sparse.csr_matrix:
    """Term counts by row; `terms` numbers the tokens in the order of their first appearance."""
    indices, indptr = [], [0]
    for tokens in texts:
        tokens = tokens.split() if isinstance(tokens, str) else tokens
        indices.extend(terms.setdefault(token, len(terms)) for token in tokens)
        indptr.append(len(indices))
    counts = sparse.csr_matrix(
        (np.ones(len(indices)), np.asarray(indices, dtype=np.int64), np.asarray(indptr, dtype=np.int64)),
        shape=(len(indptr) - 1, max(len(terms), 1)),
    )
    counts.sum_duplicates()
    return counts
