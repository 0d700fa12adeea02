"""Defines `Relevance`: which functions are relevant to which queries, as grades of groups of functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import sparse


@dataclass(frozen=True)
class Relevance:
    """Stores which of C functions are relevant to which of Q queries. `by_ids` and `of` make it.

    Functions with the same id are one group. As a matrix of functions, one id with 20,000 rows would take 3.2 GB, so
    such a matrix is made only when `matrix` is read.

    Args:
        grades (`csr[Q, groups]`): the grade of each relevant group, above 0, or 1 if there are no grades.
        group (`int[C]`): the group of each function.
    """

    grades: sparse.csr_matrix
    group: np.ndarray

    @classmethod
    def by_ids(cls, queries: np.ndarray, codes: np.ndarray) -> Relevance:
        """A function is relevant to the queries with the same id.

        Args:
            queries (`int32[Q]`), codes (`int32[C]`): each row's id as a number. Equal ids have equal numbers.
        """
        groups = int(max(queries.max(initial=-1), codes.max(initial=-1))) + 1
        return cls(marks(numbered(queries), (len(queries), groups)), codes)

    @classmethod
    def of(cls, relevant: sparse.csr_matrix | Relevance) -> Relevance:
        """Wraps the grades of relevant functions, csr[Q, C]. A `Relevance` is returned unchanged."""
        if isinstance(relevant, Relevance):
            return relevant
        return cls(relevant, np.arange(relevant.shape[1]))

    @classmethod
    def joined(cls, parts: Sequence[Relevance]) -> Relevance:
        """Concatenates several sources, of which none shares an id with another."""
        groups = []
        start = 0
        for part in parts:
            groups.append(part.group + start)
            start += part.grades.shape[1]
        return cls(sparse.block_diag([part.grades for part in parts], format="csr"), np.concatenate(groups))

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and functions, (Q, C)."""
        return self.grades.shape[0], len(self.group)

    @cached_property
    def matrix(self) -> sparse.csr_matrix:
        """The grade of each relevant function, above 0, or 1 if there are no grades, csr[Q, C]."""
        return self.grades[:, self.group].sorted_indices()

    def counts(self) -> np.ndarray:
        """Returns the number of relevant functions of each query, int64[Q]."""
        return (self.grades != 0).astype(np.int64) @ np.bincount(self.group, minlength=self.grades.shape[1])

    def pairs(self) -> np.ndarray:
        """Returns the (query, code) pairs, int64[P, 2], ordered by query."""
        return np.stack(self.matrix.nonzero(), axis=1).astype(np.int64)

    def select(self, queries: np.ndarray, codes: np.ndarray) -> Relevance:
        """Returns the relevance between selected queries and functions (int64 indices), in the indices' order."""
        return Relevance(self.grades[queries], self.group[codes])

    def of_queries(self, query_of: np.ndarray) -> Relevance:
        """Combines the relevant functions of rows with the same query; `query_of` numbers each row's query."""
        rows = marks(numbered(query_of)[:, ::-1], (int(query_of.max(initial=-1)) + 1, len(query_of)))
        grades = (rows @ self.grades).tocsr()
        grades.data[:] = 1  # a function may be relevant through several rows
        return Relevance(grades, self.group)

    def of_texts(
        self, query_texts: np.ndarray, code_texts: np.ndarray, shape: tuple[int, int]
    ) -> tuple[sparse.csr_matrix, sparse.csr_matrix | None]:
        """Returns which texts of functions are relevant to which texts of queries.

        Args:
            query_texts (`int64[Q]`), code_texts (`int64[C]`): the number of each row's text.
            shape: the numbers of distinct texts.

        Returns:
            csr[query texts, code texts] and None. If functions with the same id have different texts, instead
            csr[query texts, groups] and csr[code texts, groups].
        """
        queries, groups = self.grades.nonzero()
        number = self.grades.shape[1]
        versions = pd.DataFrame({"text": code_texts, "group": self.group}).drop_duplicates()
        if versions["group"].duplicated().any():
            relevant = marks(np.stack([query_texts[queries], groups], axis=1), (shape[0], number))
            return relevant, marks(versions.to_numpy(), (shape[1], number))
        text_of = np.full(number, -1)
        text_of[versions["group"]] = versions["text"]
        pairs = np.stack([query_texts[queries], text_of[groups]], axis=1)
        return marks(pairs[pairs[:, 1] >= 0], shape), None


def numbered(values: np.ndarray) -> np.ndarray:
    """Returns (position, value) pairs, int64[n, 2]."""
    return np.stack([np.arange(len(values)), values], axis=1)


def matrix_of(pairs: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Makes a sparse matrix with int32 indices from values at (row, column) pairs. Sums repeated pairs."""
    indices = pairs.astype(np.int32)
    matrix = sparse.csr_matrix((values, (indices[:, 0], indices[:, 1])), shape=shape)
    matrix.sort_indices()
    return matrix


def marks(pairs: np.ndarray, shape: tuple[int, int]) -> sparse.csr_matrix:
    """Returns a sparse matrix with a positive value at each (row, column) pair."""
    return matrix_of(pairs, np.ones(len(pairs), dtype=np.float32), shape)
