"""BM25 with only NumPy and SciPy: one formula for similarities in training and for lexical search.

We do not use rank_bm25 or bm25s, because a batch's statistics change with every batch. Both would build an index for
each step: for 256 queries that takes 83 and 12 times as long (`benchmarks/bm25.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from scipy import sparse

from soft_trainer.mining.rules import identifier_words

OKAPI_EPSILON = 0.25  # rank_bm25's: a negative idf becomes this share of the mean idf


def _okapi(total: int, having: np.ndarray) -> np.ndarray:
    idf = np.log(total - having + 0.5) - np.log(having + 0.5)
    occurs = having > 0  # the mean is over the terms that occur
    mean = idf[occurs].mean() if occurs.any() else 0.0
    return np.where(idf < 0, OKAPI_EPSILON * mean, idf)


# The weight of a term that `having` of `total` documents contain.
IDFS = {
    "okapi": _okapi,
    "robertson": lambda total, having: np.log((total - having + 0.5) / (having + 0.5)),
    "lucene": lambda total, having: np.log1p((total - having + 0.5) / (having + 0.5)),
}


def split_identifiers(tokens: Sequence[str]) -> list[str]:
    """Splits the tokens of code or text into words; a string or comment in one token gives its words."""
    return [word for token in tokens for word in identifier_words(token)]


def count_terms(
    texts: Iterable[Sequence[Hashable]], terms: dict[Hashable, int], grow: bool = True
) -> sparse.csr_matrix:
    """Counts the terms of each text, float64[texts, terms].

    Args:
        texts: the terms of each text, in any order.
        terms: the column of each term. New terms are added, in the order of their first appearance.
        grow: False ignores new terms instead.
    """
    indices, indptr = [], [0]
    for text in texts:
        if grow:
            indices.extend(terms.setdefault(term, len(terms)) for term in text)
        else:
            indices.extend(terms[term] for term in text if term in terms)
        indptr.append(len(indices))
    counts = sparse.csr_matrix(
        (np.ones(len(indices)), np.asarray(indices, dtype=np.int64), np.asarray(indptr, dtype=np.int64)),
        shape=(len(indptr) - 1, max(len(terms), 1)),
    )
    counts.sum_duplicates()
    return counts


def bm25_weights(
    counts: sparse.csr_matrix,
    idf: str = "lucene",
    k1: float = 1.2,
    b: float = 0.75,
    average_length: float | None = None,
    term_idf: np.ndarray | None = None,
) -> sparse.csr_matrix:
    """Computes each term's contribution to the score of each document: scores are `query_counts @ weights.T`.

    Args:
        counts (`[D, T]`): term counts of the documents, in any precision.
        idf: a name of `IDFS`.
        k1, b: saturation of a term's count, and normalisation of a document's length (0 to 1).
        average_length: mean length; by default that of these documents.
        term_idf (`float64[T]`): weight of each term; by default `idf` of these documents.
    """
    lengths = np.diff(np.r_[0.0, np.cumsum(counts.data, dtype=np.float64)][counts.indptr])
    average = lengths.mean() if average_length is None else average_length
    norms = np.repeat(k1 * (1 - b + b * lengths / max(average, 1e-12)), np.diff(counts.indptr))
    if term_idf is None:
        # Only for terms in these documents, since a batch has few of the training set's terms.
        _, term, having = np.unique(counts.indices, return_inverse=True, return_counts=True)
        entry_idf = IDFS[idf](counts.shape[0], having)[term]
    else:
        entry_idf = term_idf[counts.indices]
    weights = counts.copy()
    weights.data = entry_idf * counts.data * (k1 + 1) / (counts.data + norms)
    return weights
