"""Counts terms in texts, as sparse matrices, and weighs the counts by BM25."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import sparse

from soft_trainer.source.names import identifier_words

SPLIT_AT_ONCE = 1 << 14  # the number of texts to split at once
OKAPI_EPSILON = 0.25  # as in rank_bm25, a negative idf is replaced by this fraction of the mean idf


def _okapi(total: int, having: np.ndarray) -> np.ndarray:
    idf = np.log(total - having + 0.5) - np.log(having + 0.5)
    occurs = having > 0  # the mean is over the terms that occur
    mean = idf[occurs].sum() / max(occurs.sum(), 1)
    return np.where(idf < 0, OKAPI_EPSILON * mean, idf)


# Functions that return the idf of a term that occurs in `having` of `total` documents.
IDFS = {
    "okapi": _okapi,
    "robertson": lambda total, having: np.log((total - having + 0.5) / (having + 0.5)),
    "lucene": lambda total, having: np.log1p((total - having + 0.5) / (having + 0.5)),
}


def as_arrow(texts: Iterable[list[str]]) -> pa.ChunkedArray:
    """Converts lists of tokens to an Arrow array, in blocks to save memory."""
    texts = iter(texts)
    kind = pa.list_(pa.string())
    parts = iter(lambda: list(islice(texts, SPLIT_AT_ONCE)), [])
    return pa.chunked_array([pa.array(part, kind) for part in parts], kind)


def split_identifiers(tokens: Sequence[str]) -> list[str]:
    """Splits the tokens of code or text into words: `getUserName` becomes `get`, `user` and `name`."""
    return list(chain.from_iterable(map(identifier_words, tokens)))


def count_terms(columns: Sequence[pa.ChunkedArray]) -> list[sparse.csr_matrix]:
    """Counts the tokens in each row of several columns of token lists.

    All columns share the same vocabulary of terms, in order of first occurrence.

    Returns:
        A sparse matrix of counts for each column, float32[rows, terms].
    """
    kind = columns[0].type.value_type
    flat = [pc.list_flatten(column) for column in columns]
    tokens = pa.chunked_array(list(chain.from_iterable(column.chunks for column in flat)), kind)
    encoded = tokens.dictionary_encode(null_encoding="encode").chunks  # one dictionary; an empty chunk may be missing
    terms = max(len(encoded[-1].dictionary) if encoded else 0, 1)
    numbers = np.concatenate([np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in encoded)])
    parts = np.split(numbers, np.cumsum([len(column) for column in flat[:-1]]))
    counts = []
    for column, indices in zip(columns, parts, strict=True):
        starts = np.cumsum(np.r_[0, pc.list_value_length(column).to_numpy()])
        ones = np.ones(len(indices), np.float32)
        counts.append(sparse.csr_matrix((ones, indices, starts), shape=(len(column), terms)))
        counts[-1].sum_duplicates()
    return counts


def bm25_weights(
    counts: sparse.csr_matrix,
    idf: str = "lucene",
    k1: float = 1.2,
    b: float = 0.75,
    average_length: float | None = None,
    term_idf: np.ndarray | None = None,
) -> sparse.csr_matrix:
    """Computes the BM25 weight of each term in each document, so that `query_counts @ weights.T` gives the scores.

    Args:
        counts (`[D, T]`): the term counts of the documents, in any precision.
        idf: a key of `IDFS`.
        k1: the saturation parameter for term counts.
        b: the strength of the length normalisation, from 0 to 1.
        average_length: the mean length of a document. By default, the mean in `counts`.
        term_idf (`float64[T]`): the idf of each term. By default, computed from `counts` with `idf`.
    """
    lengths = np.diff(np.r_[0.0, np.cumsum(counts.data, dtype=np.float64)][counts.indptr])
    if average_length is None:
        average_length = lengths.mean()
    norms = np.repeat(k1 * (1 - b + b * lengths / max(average_length, 1e-12)), np.diff(counts.indptr))
    if term_idf is None:
        # Compute the idf only of terms that occur, because a batch contains few of the training set's terms.
        _, term, having = np.unique(counts.indices, return_inverse=True, return_counts=True)
        entry_idf = IDFS[idf](counts.shape[0], having)[term]
    else:
        entry_idf = term_idf[counts.indices]
    weights = counts.copy()
    weights.data = entry_idf * counts.data * (k1 + 1) / (counts.data + norms)
    return weights
