"""Defines `Relevance`: which functions are relevant to which queries, stored as ids or as a matrix of grades."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import sparse


class Relevance:
    """Stores which of C functions are relevant to which of Q queries. `by_ids` and `of` make it.

    Most rows connect queries with functions by ids. As a matrix, one id with 20,000 rows would take 3.2 GB, so ids are
    turned into a matrix only when `matrix` is read.
    """

    def __init__(self, ids: tuple[np.ndarray, np.ndarray] | None, grades: sparse.csr_matrix | None):
        self._ids = ids
        self._grades = grades

    @classmethod
    def by_ids(cls, queries: np.ndarray, codes: np.ndarray) -> Relevance:
        """A function is relevant to the queries with the same id.

        Args:
            queries (`int32[Q]`), codes (`int32[C]`): each row's id as a number. Equal ids have equal numbers.
        """
        return cls((queries, codes), None)

    @classmethod
    def of(cls, relevant: sparse.csr_matrix | Relevance) -> Relevance:
        """Wraps the grades of relevant functions, csr[Q, C]. A `Relevance` is returned unchanged."""
        if isinstance(relevant, Relevance):
            return relevant
        return cls(None, relevant)

    @classmethod
    def joined(cls, parts: Sequence[Relevance]) -> Relevance:
        """Concatenates several sources, of which none shares an id with another."""
        if any(part._ids is None for part in parts):
            return cls(None, sparse.block_diag([part.matrix for part in parts], format="csr"))
        queries = []
        codes = []
        start = 0
        for part in parts:
            of_queries, of_codes = part._ids
            queries.append(of_queries + start)
            codes.append(of_codes + start)
            start += part._number
        return cls.by_ids(np.concatenate(queries).astype(np.int32), np.concatenate(codes).astype(np.int32))

    @property
    def has_ids(self) -> bool:
        """True if rows are connected by ids, and therefore have no grades."""
        return self._ids is not None

    @property
    def code_ids(self) -> np.ndarray | None:
        """The id of each function as a number, int32[C], or None if rows are not connected by ids."""
        return None if self._ids is None else self._ids[1]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and functions, (Q, C)."""
        if self._ids is None:
            return self._grades.shape
        return len(self._ids[0]), len(self._ids[1])

    @cached_property
    def matrix(self) -> sparse.csr_matrix:
        """The grade of each relevant function, above 0, or 1 if there are no grades, csr[Q, C]."""
        if self._ids is None:
            return self._grades
        sides = []
        for ids in self._ids:
            sides.append(marks(np.stack([np.arange(len(ids)), ids], axis=1), (len(ids), self._number)))
        equal = (sides[0] @ sides[1].T).tocsr()
        equal.sort_indices()
        return equal

    def counts(self) -> np.ndarray:
        """Returns the number of relevant functions of each query, int64[Q]."""
        if self._ids is None:
            return np.diff(self._grades.indptr).astype(np.int64)
        queries, codes = self._ids
        return np.bincount(codes, minlength=self._number)[queries]

    def pairs(self) -> np.ndarray:
        """Returns the (query, code) pairs, int64[P, 2], ordered by query."""
        queries, codes = self.matrix.nonzero()
        return np.stack([queries, codes], axis=1).astype(np.int64)

    def select(self, queries: np.ndarray, codes: np.ndarray) -> Relevance:
        """Returns the relevance between selected queries and functions (int64 indices), in the indices' order."""
        if self._ids is None:
            return Relevance.of(self._grades[queries][:, codes])
        of_queries, of_codes = self._ids
        return Relevance.by_ids(of_queries[queries], of_codes[codes])

    def of_queries(self, query_of: np.ndarray, queries: int) -> Relevance:
        """Combines the relevant functions of rows with the same query; `query_of` numbers each row's query."""
        if queries == len(query_of):
            return self
        rows = marks(np.stack([query_of, np.arange(len(query_of))], axis=1), (queries, len(query_of)))
        relevant = (rows @ self.matrix).tocsr()
        relevant.sort_indices()
        relevant.data[:] = 1  # a function may be relevant through several rows
        return Relevance.of(relevant)

    def repeated_code(self) -> tuple[int, int] | None:
        """Returns the first function whose id an earlier function has, and this earlier function, or None."""
        if self._ids is None:
            return None
        _, first, number = np.unique(self._ids[1], return_index=True, return_inverse=True)
        repeated = np.flatnonzero(first[number] != np.arange(len(number)))
        if not len(repeated):
            return None
        return int(repeated[0]), int(first[number[repeated[0]]])

    def content(self) -> list:
        """Returns the arrays that determine the relevance, for use in a fingerprint."""
        return self._grades if self._ids is None else [*self._ids]

    def of_texts(
        self, query_texts: np.ndarray, code_texts: np.ndarray, shape: tuple[int, int]
    ) -> tuple[sparse.csr_matrix, sparse.csr_matrix | None]:
        """Returns which texts of functions are relevant to which texts of queries.

        Args:
            query_texts (`int64[Q]`), code_texts (`int64[C]`): the number of each row's text.
            shape: the numbers of distinct texts.

        Returns:
            csr[query texts, code texts] and None. If functions with the same id have different texts, instead
            csr[query texts, ids] and csr[code texts, ids].
        """
        if self._ids is None:
            queries, codes = self._grades.nonzero()
            return marks(np.stack([query_texts[queries], code_texts[codes]], axis=1), shape), None
        ids, of_codes = self._ids
        versions = pd.DataFrame({"text": code_texts, "id": of_codes}).drop_duplicates()
        if versions["id"].duplicated().any():
            relevant = marks(np.stack([query_texts, ids], axis=1), (shape[0], self._number))
            return relevant, marks(versions.to_numpy(), (shape[1], self._number))
        text_of = np.full(self._number, -1)
        text_of[versions["id"]] = versions["text"]
        relevant = text_of[ids]
        queries = np.flatnonzero(relevant >= 0)
        return marks(np.stack([query_texts[queries], relevant[queries]], axis=1), shape), None

    @property
    def _number(self) -> int:
        """The number of distinct ids, as the largest id number plus 1."""
        return int(max(ids.max(initial=-1) for ids in self._ids)) + 1


def matrix_of(pairs: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Makes a sparse matrix with int32 indices from values at (row, column) pairs. Sums repeated pairs."""
    indices = pairs.astype(np.int32)
    matrix = sparse.csr_matrix((values, (indices[:, 0], indices[:, 1])), shape=shape)
    matrix.sort_indices()
    return matrix


def marks(pairs: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Returns a sparse matrix with a positive value at each (row, column) pair."""
    return matrix_of(pairs, np.ones(len(pairs), dtype=np.float32), shape)
