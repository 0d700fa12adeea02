"""Defines `Split`: queries, a corpus of functions, and relevance judgments, for training and evaluation.

Only judgments connect queries with functions. Positions mean nothing. Rows are never merged, so every query row is
ranked against every row of the corpus.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from datasets import Dataset, concatenate_datasets
from scipy import sparse

from soft_trainer.data.array_cache import flat
from soft_trainer.data.column_names import CODE_COLUMNS, OWN_ID, QUERY_COLUMNS
from soft_trainer.data.listed import Listed
from soft_trainer.system.fingerprints import fingerprint, rows_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

NAMED = 1.0  # in `Judgments.negatives`: a column of the rows names the function as a negative of the query
JUDGED = 2.0  # the query has a grade of 0 for the function


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
        """Concatenates several parts, of which none shares an id with another."""
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


@dataclass(frozen=True)
class Judgments:
    """Relevance judgments for Q queries and C functions: which functions are relevant and which are negatives.

    Args:
        stored (`Relevance` or `csr[Q, C]`): the grade of each relevant function, above 0, or 1 if there are no grades.
        negatives (`csr[Q, C]`, *optional*): functions that do not answer a query, as `NAMED` or `JUDGED`.
        scored (`csr[Q, C]`, *optional*): the scores that came with the rows, of positives and negatives. A score may
            be 0.
        examples (`int64[P, 2]`, *optional*): the (query, code) pairs to train on. By default, all relevant pairs.
        graded: whether relevant functions have grades.
    """

    stored: Relevance
    negatives: sparse.csr_matrix | None = None
    scored: sparse.csr_matrix | None = None
    examples: np.ndarray | None = None
    graded: bool = False

    def __post_init__(self):
        object.__setattr__(self, "stored", Relevance.of(self.stored))

    @property
    def relevant(self) -> sparse.csr_matrix:
        """The grades of the relevant functions of each query, csr[Q, C]."""
        return self.stored.matrix

    def __len__(self) -> int:
        """Returns the number of pairs to train on."""
        if self.examples is not None:
            return len(self.examples)
        return int(self.stored.counts().sum())

    def pairs(self) -> np.ndarray:
        """Returns the (query, code) pairs to train on, int64[P, 2], in the order of the source's rows."""
        if self.examples is not None:
            return self.examples
        return self.stored.pairs()

    def among(self, queries: np.ndarray, codes: np.ndarray) -> Judgments:
        """Returns the judgments between selected queries and functions (int64 indices), in the indices' order."""
        parts = {"stored": self.stored.select(queries, codes)}
        for name in ("negatives", "scored"):
            if getattr(self, name) is not None:
                parts[name] = getattr(self, name)[queries][:, codes]
        if self.examples is not None:
            sides = []
            for chosen, size, numbers in zip((queries, codes), self.stored.shape, self.examples.T, strict=True):
                number_of = np.full(size, -1)
                number_of[chosen] = np.arange(len(chosen))
                sides.append(number_of[numbers])
            examples = np.stack(sides, axis=1)
            parts["examples"] = examples[(examples >= 0).all(axis=1)]
        return dataclasses.replace(self, **parts)

    @classmethod
    def joined(cls, parts: Sequence[Judgments]) -> Judgments:
        """Concatenates the judgments of several splits, whose rows do not judge each other."""
        matrices = {}
        for name in ("negatives", "scored"):
            if any(getattr(part, name) is not None for part in parts):
                blocks = [_or_empty(getattr(part, name), part.stored.shape) for part in parts]
                matrices[name] = sparse.block_diag(blocks, format="csr")
        examples = []
        start = np.zeros(2, dtype=np.int64)
        for part in parts:
            examples.append(part.pairs() + start)
            start += part.stored.shape
        stored = Relevance.joined([part.stored for part in parts])
        return cls(stored, **matrices, examples=np.concatenate(examples), graded=any(part.graded for part in parts))

    def named_negatives(self) -> sparse.csr_matrix | None:
        """Returns the negatives that columns of the rows name, csr[Q, C], or None if there are none."""
        if self.negatives is None:
            return None
        named = self.negatives.multiply(self.negatives == NAMED).tocsr()
        return named if named.nnz else None

    def scores(self) -> sparse.csr_matrix:
        """Returns the scores that came with the rows, of positives and negatives, csr[Q, C]. A score may be 0."""
        return _or_empty(self.scored, self.stored.shape)

    def scored_negatives(self) -> int:
        """Returns the number of negatives with a score."""
        if self.negatives is None:
            return 0
        known = self.scores().copy()
        known.data[:] = 1
        return known.multiply(self.negatives).nnz

    def first_queries(self) -> np.ndarray:
        """Returns the query of each function's first training pair, int64[C], or -1 if a function has no pair."""
        return self._first(0)

    def first_codes(self) -> np.ndarray:
        """Returns the code of each query's first training pair, int64[Q], or -1 if a query has no pair."""
        return self._first(1)

    def _first(self, side: int) -> np.ndarray:
        pairs = self.pairs()[::-1]  # reversed, because the last assignment wins
        first = np.full(self.stored.shape[1 - side], -1, dtype=np.int64)
        first[pairs[:, 1 - side]] = pairs[:, side]
        return first


@dataclass(frozen=True, repr=False)
class Split:
    """One split of a data set, such as train or test: queries, the corpus to search, and relevance judgments.

    Args:
        queries: one row per query. An index mapping is resolved.
        corpus: one row per function. An index mapping is resolved.
        judgments: which functions are relevant to which queries.
        called: the original names of renamed columns, keyed by their new names.

    Attributes:
        checked: True once `check_split` has found the rows usable for evaluation. A changed copy is not checked.
    """

    queries: Dataset
    corpus: Dataset
    judgments: Judgments
    called: Mapping[str, str] = field(default_factory=dict)
    checked: bool = field(default=False, init=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "queries", flat(self.queries))
        object.__setattr__(self, "corpus", flat(self.corpus))

    def mark_checked(self) -> None:
        """Records that the rows are usable for evaluation, so that they are not checked again."""
        object.__setattr__(self, "checked", True)

    def __len__(self) -> int:
        """Returns the number of queries."""
        return len(self.queries)

    def __repr__(self) -> str:
        sizes = f"{len(self):,} queries, {len(self.corpus):,} functions, {len(self.judgments):,} pairs"
        columns = []
        for side, rows in (("queries", self.queries), ("corpus", self.corpus)):
            names = [f"{name} ({self.called[name]!r})" if name in self.called else name for name in rows.column_names]
            columns.append(f"{side}: {', '.join(names)}")
        return f"Split({sizes}; {'; '.join(columns)})"

    def to_pandas(self) -> pd.DataFrame:
        """Returns a data frame with one query and relevant function per row, and their `grade` if there are grades."""
        sides = dataclasses.replace(
            self, queries=_without(self.queries, CODE_COLUMNS), corpus=_without(self.corpus, QUERY_COLUMNS)
        )
        pairs = sides.to_pairs().to_pandas()
        if self.judgments.graded:
            queries, codes = self.judgments.pairs().T
            return pairs.assign(grade=np.asarray(self.judgments.relevant[queries, codes]).ravel())
        return pairs

    @classmethod
    def from_pairs(cls, rows: Dataset, listed: Listed | None = None) -> Split:
        """Makes a split from rows that each have a query and a relevant function.

        Rows with the same `url` are versions of one function, so each of their functions is relevant to all of their
        queries. Negatives that are not the function of any row are added to the end of the corpus.

        Args:
            listed: what rows have besides a query and a function: further positives, negatives and scores.

        Raises:
            UserError: a negative is the url of no row.
        """
        urls = _column(rows, "url")
        ids = _numbered(urls)
        queries = _without(rows, CODE_COLUMNS)
        corpus = _without(rows, QUERY_COLUMNS)
        if listed is None:
            return cls(queries, corpus, Judgments(Relevance.by_ids(ids, ids), examples=numbered(np.arange(len(rows)))))
        queries = listed.distinct_queries(queries)
        corpus, pairs = listed.with_negatives(corpus, urls)
        added = ids.max(initial=-1) + 1 + np.arange(len(corpus) - len(rows), dtype=np.int32)
        relevant = Relevance.by_ids(ids, np.concatenate([ids, added]))
        examples = numbered(listed.query_of)[:, ::-1]
        shape = (len(queries), len(corpus))
        every, first = np.unique(np.concatenate([examples, pairs]), axis=0, return_index=True)
        wrong = every[first >= len(examples)]
        scores = listed.scores[first]
        known = ~np.isnan(scores)
        judgments = Judgments(
            relevant.of_queries(listed.query_of),
            matrix_of(wrong, np.full(len(wrong), NAMED, np.float32), shape) if len(wrong) else None,
            matrix_of(every[known], scores[known], shape) if known.any() else None,
            examples,
        )
        return cls(queries, corpus, judgments)

    @classmethod
    def from_urls(cls, queries: Dataset, corpus: Dataset, listed: Listed | None = None) -> Split:
        """Makes a split from queries and a corpus. A function is relevant to the queries with the same `url`."""
        ids = _numbered(np.concatenate([_column(queries, "url"), _column(corpus, "url")]))
        relevant = Relevance.by_ids(ids[: len(queries)], ids[len(queries) :])
        if listed is not None:
            queries = listed.distinct_queries(queries)
            relevant = relevant.of_queries(listed.query_of)
        return cls(queries, corpus, Judgments(relevant))

    @classmethod
    def from_grades(cls, queries: Dataset, corpus: Dataset, pairs: np.ndarray, grades: Sequence[float]) -> Split:
        """Makes a split from queries, a corpus and graded pairs.

        Args:
            pairs (`int64[P, 2]`): distinct pairs of row indices in `queries` and `corpus`.
            grades (`float[P]`): the grade of each pair. A function is relevant if its grade is above 0, otherwise a
                negative.
        """
        pairs = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        grades = np.asarray(grades, dtype=np.float32)
        shape = (len(queries), len(corpus))
        positive = grades > 0
        relevant = matrix_of(pairs[positive], grades[positive], shape)
        negatives = None
        if not positive.all():
            negatives = matrix_of(pairs[~positive], np.full(int((~positive).sum()), JUDGED, np.float32), shape)
        judgments = Judgments(relevant, negatives, examples=pairs[positive], graded=True)
        return cls(queries, corpus, judgments)

    @classmethod
    def joined(cls, parts: Mapping[str, Split]) -> Split:
        """Concatenates splits with the same columns, such as one for each language.

        Equal ids in different parts do not make a function relevant. Equal texts still do (see `RelevantCodes`).
        """
        judgments = Judgments.joined([part.judgments for part in parts.values()])
        queries = concatenate_datasets([part.queries for part in parts.values()])
        corpus = concatenate_datasets([part.corpus for part in parts.values()])
        return cls(queries, corpus, judgments)

    def select(self, queries: np.ndarray | None = None, codes: np.ndarray | None = None) -> Split:
        """Selects queries and functions by int64 indices, in the order of the indices. None selects all.

        Judgments and pairs of other queries or functions are dropped.
        """
        sides = []
        numbers = []
        for rows, chosen in ((self.queries, queries), (self.corpus, codes)):
            sides.append(rows if chosen is None else rows.select(chosen))
            numbers.append(np.arange(len(rows)) if chosen is None else chosen)
        judgments = self.judgments.among(*numbers)
        return dataclasses.replace(self, queries=sides[0], corpus=sides[1], judgments=judgments)

    def keep(self, pairs: np.ndarray) -> Split:
        """Selects training pairs by their indices in `judgments.pairs()`, in ascending order.

        Queries without a remaining pair are dropped. A function is dropped if it has lost all of its pairs and is not
        a negative of a remaining query.
        """
        every = self.judgments.pairs()
        kept = every[pairs]
        queries = np.unique(kept[:, 0])
        codes = np.ones(len(self.corpus), dtype=bool)
        codes[every[:, 1]] = False
        codes[kept[:, 1]] = True
        if self.judgments.negatives is not None:
            codes[self.judgments.negatives[queries].indices] = True
        judgments = dataclasses.replace(self.judgments, examples=kept)
        return dataclasses.replace(self, judgments=judgments).select(queries, np.flatnonzero(codes))

    def fingerprint(self) -> str:
        """Hashes the queries, the corpus and the judgments."""
        judged = self.judgments
        judged = [judged.stored.grades, judged.stored.group, judged.negatives, judged.scored, judged.examples]
        return fingerprint(rows_fingerprint(self.queries), rows_fingerprint(self.corpus), judged)

    def unranked(self) -> np.ndarray | None:
        """Returns each query's own document, which is not ranked for the query unless it is judged relevant.

        In BEIR, a document with a query's id is the query itself, as in a search for similar functions.

        Returns:
            int64[Q], the document's row in the corpus, or -1 if there is none. None if no query has such a document.
        """
        if OWN_ID not in self.queries.column_names or "url" not in self.corpus.column_names:
            return None
        documents = pd.Index(self.corpus["url"][:]).get_indexer(self.queries[OWN_ID][:])
        queries = np.flatnonzero(documents >= 0)
        if not len(queries):
            return None
        judged = np.asarray(self.judgments.relevant[queries, documents[queries]]).ravel() > 0
        documents[queries[judged]] = -1
        return documents.astype(np.int64) if (documents >= 0).any() else None

    def first(self, pairs: int) -> Split:
        """Returns the split with only the first `pairs` training pairs."""
        return self.keep(np.arange(min(pairs, len(self.judgments))))

    def in_language(self, language: str) -> Split:
        """Returns the split with the column `language` of all queries and functions set to `language`."""
        sides = []
        for rows in (self.queries, self.corpus):
            sides.append(_without(rows, ["language"]).add_column("language", [language] * len(rows)))
        return dataclasses.replace(self, queries=sides[0], corpus=sides[1])

    def to_pairs(self) -> Dataset:
        """Returns the training pairs as a `Dataset` with a query and its code in each row."""
        queries, codes = self.judgments.pairs().T
        sides = []
        for rows, numbers in ((self.queries, queries), (_without(self.corpus, self.queries.column_names), codes)):
            if not np.array_equal(numbers, np.arange(len(rows))):
                rows = flat(rows.select(numbers))
            sides.append(rows)
        return concatenate_datasets(sides, axis=1)


class RelevantCodes:
    """Looks up queries' relevant functions, by judgments and by equal texts.

    A function is relevant to a query if the judgments contain a relevant pair with the same two texts. Texts are
    compared as the encoder reads them.

    Args:
        answers: the relevant pairs; see `relevant` in `Judgments`.
        query_texts (`uint64[Q]`), code_texts (`uint64[C]`): the ids of the texts. Equal texts have equal ids.
    """

    def __init__(self, answers: sparse.csr_matrix | Relevance, query_texts: np.ndarray, code_texts: np.ndarray):
        self.query_texts, known_queries = pd.factorize(query_texts)
        self.code_texts, known_codes = pd.factorize(code_texts)
        shape = (len(known_queries), len(known_codes))
        # Usually, `of_texts` is csr[query texts, code texts]. If functions with the same id have different texts, it
        # is csr[query texts, groups] instead, and `ids_of_texts` is csr[code texts, groups].
        self.of_texts, self.ids_of_texts = Relevance.of(answers).of_texts(self.query_texts, self.code_texts, shape)

    @property
    def key(self) -> list:
        """The arrays that determine the result of every look-up, for use in a cache key."""
        return [self.of_texts, self.ids_of_texts, self.query_texts, self.code_texts]

    def restricted(self, codes: np.ndarray) -> RelevantCodes:
        """Returns a look-up for selected functions only (int64 indices), renumbered in the order of the indices."""
        part = copy.copy(self)
        part.code_texts = self.code_texts[codes]
        vars(part).pop("_order", None)
        return part

    def contain(self, queries: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Tests whether each query's K functions are relevant to the query.

        Args:
            queries: int64[B], query indices.
            codes: int64[B, K], the indices of K functions for each query.

        Returns:
            bool[B, K], True where the code is relevant.
        """
        texts = np.repeat(self.query_texts[queries], codes.shape[1])
        if self.ids_of_texts is None:
            found = self.of_texts[texts, self.code_texts[codes.ravel()]]
        else:
            shared = self.of_texts[texts].multiply(self.ids_of_texts[self.code_texts[codes.ravel()]])
            found = shared.sum(axis=1)
        return np.asarray(found).reshape(codes.shape) > 0

    def among(self, queries: np.ndarray, codes: np.ndarray) -> Tensor:
        """Returns which of N functions are relevant to each of B queries, BoolTensor[B, N]."""
        import torch  # imported here, so that errors about rows do not wait for it

        texts = self.code_texts[codes]
        if self.ids_of_texts is not None:
            shared = self.of_texts[self.query_texts[queries]] @ self.ids_of_texts[texts].T
            return torch.from_numpy(shared.toarray() > 0)
        answers = np.zeros((len(queries), len(codes)), dtype=bool)
        answers[self._pairs_at(queries, texts, np.argsort(texts, kind="stable"))] = True
        return torch.from_numpy(answers)

    def everywhere(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns all relevant pairs of B queries: positions in `queries` and code indices, both int64[pairs]."""
        return self._pairs_at(queries, self.code_texts, self._order)

    def _pairs_at(self, queries: np.ndarray, texts: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the relevant pairs as positions in `queries` and in `texts`. `order` is the argsort of `texts`."""
        right = self.of_texts[self.query_texts[queries]]
        if self.ids_of_texts is not None:
            right = right @ self.ids_of_texts.T
        first = np.searchsorted(texts, right.indices, sorter=order)
        counts = np.searchsorted(texts, right.indices, side="right", sorter=order) - first
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        of_query = np.repeat(np.arange(len(queries)), np.diff(right.indptr))
        return np.repeat(of_query, counts), order[np.repeat(first, counts) + within]

    @cached_property
    def _order(self) -> np.ndarray:
        """The code indices, sorted by text id."""
        return np.argsort(self.code_texts, kind="stable")


def _or_empty(matrix: sparse.csr_matrix | None, shape: tuple[int, int]) -> sparse.csr_matrix:
    return sparse.csr_matrix(shape, dtype=np.float32) if matrix is None else matrix


def _without(rows: Dataset, columns: Sequence[str]) -> Dataset:
    return rows.remove_columns([name for name in columns if name in rows.column_names])


def _column(rows: Dataset, name: str) -> np.ndarray:
    """Returns a column's values, object[rows]. Missing or empty values are None. Without the column, all are None."""
    if name not in rows.column_names:
        return np.full(len(rows), None, dtype=object)
    values = pd.Series(rows[name][:], dtype=object)
    return values.where(values.astype(bool), None).to_numpy()


def _numbered(ids: np.ndarray) -> np.ndarray:
    """Replaces ids with numbers, int32[n]. Equal ids get equal numbers, and each None gets a unique number."""
    numbers, known = pd.factorize(ids)
    missing = numbers < 0
    numbers[missing] = len(known) + np.arange(missing.sum())
    return numbers.astype(np.int32)


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
