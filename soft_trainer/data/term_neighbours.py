"""Finds the documents most similar to each query by a product of sparse matrices, such as BM25's.

Up to `EXACT_ROWS` documents, every product is computed. Beyond that, a query only visits the documents of its rarest
terms, and the best of these are scored with all terms. The number of visits is the smallest that finds `RECALL` of the
nearest documents of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from soft_trainer.data.neighbours import EXACT_ROWS, Neighbours, exact_neighbours, progress_bar, recall_of
from soft_trainer.terminal import print_on_main

COMMON = 0.05  # share of the documents above which a term is multiplied as a dense column
SAMPLE = 256  # queries by which the number of visits is chosen
RECALL = 0.92  # share of their neighbours that must be found
VISITS = 2_000  # documents that a query visits at first; raised until `RECALL` is reached
CANDIDATES = 4  # documents for each neighbour that are scored with all terms
VISITED_AT_ONCE = 1 << 19


def nearest_by_terms(
    queries: sparse.csr_matrix,
    documents: sparse.csr_matrix,
    k: int,
    *,
    text_ids: Sequence[np.ndarray] = (),
    exact_up_to: int = EXACT_ROWS,
    seed: int = 0,
    progress: str | None = None,
) -> Neighbours:
    """Returns the nearest documents of each row. A document that scores 0 or less is not a neighbour.

    Args:
        queries: term counts, [n, terms].
        documents: weights of the terms, [m, terms], m >= n; the document of row i is document i.
        exact_up_to: the number of documents up to which all products are computed.
        seed: of the sample.
        k, text_ids, progress: as in `nearest_rows`.
    """
    queries, documents = (side.tocsr().astype(np.float32) for side in (queries, documents))
    rows, total = np.arange(queries.shape[0]), documents.shape[0]
    if total <= exact_up_to:
        return exact_neighbours(_products(queries, documents), rows, total, k, text_ids, progress, above=0.0)
    postings, having = documents.T.tocsr(), np.bincount(documents.indices, minlength=documents.shape[1])
    sample = np.sort(np.random.default_rng(seed).choice(rows, min(SAMPLE, len(rows)), replace=False))

    def products(block: np.ndarray) -> Tensor:
        return torch.from_numpy((queries[block] @ postings).toarray())

    expected = exact_neighbours(products, sample, total, k, text_ids, None, above=0.0).rows
    visits = VISITS
    while True:
        rarest = _rarest_terms(queries, having, visits)
        search = partial(_through_rare_terms, queries, rarest, documents, postings, k, text_ids)
        recall = recall_of(search(sample).rows, expected)
        if visits >= total or recall >= RECALL:
            break
        visits += visits // 2 + 1
    print_on_main(f"neighbours among {total:,} texts: recall@{k} {recall:.3f} on {len(sample)} rows")
    parts = []
    step = max(1, VISITED_AT_ONCE // visits)
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool, progress_bar(progress, len(rows), "row") as bar:
        for part in pool.map(search, (rows[start : start + step] for start in range(0, len(rows), step))):
            parts.append(part)
            bar.update(len(part.own))
    return Neighbours.joined(parts)


def _products(queries: sparse.csr_matrix, documents: sparse.csr_matrix) -> Callable[[np.ndarray], Tensor]:
    """Returns a function that multiplies some rows with all documents.

    A few terms account for most entries of a sparse product; as dense columns they multiply several times faster.
    """
    common = np.bincount(documents.indices, minlength=documents.shape[1]) > COMMON * documents.shape[0]
    rare = sparse.diags_array((~common).astype(np.float32))
    dense = [torch.from_numpy(side[:, common].toarray()) for side in (queries, documents)]
    rare_queries, postings = (queries @ rare).tocsr(), (documents @ rare).T.tocsr()
    for matrix in (rare_queries, postings):
        matrix.eliminate_zeros()

    def score(rows: np.ndarray) -> Tensor:
        products = torch.from_numpy((rare_queries[rows] @ postings).toarray())
        return products.addmm_(dense[0][rows], dense[1].T)

    return score


def _rarest_terms(queries: sparse.csr_matrix, having: np.ndarray, visits: int) -> sparse.csr_matrix:
    """Keeps only each query's rarest terms: one, and more while the earlier ones have fewer than `visits` documents.

    Args:
        having: int64[terms], the number of documents that contain each term.
    """
    counts = np.diff(queries.indptr)
    owners, size = np.repeat(np.arange(queries.shape[0]), counts), having[queries.indices]
    order = np.lexsort((size, owners))  # the owners are in order already
    visited = np.cumsum(size[order]) - size[order]
    before = visited - np.repeat(visited[np.minimum(queries.indptr[:-1], len(visited) - 1)], counts)
    kept = order[before < visits]
    entries = queries.data[kept], (owners[kept], queries.indices[kept])
    return sparse.csr_matrix(entries, shape=queries.shape)


def _through_rare_terms(
    queries: sparse.csr_matrix,
    rarest: sparse.csr_matrix,
    documents: sparse.csr_matrix,
    postings: sparse.csr_matrix,
    k: int,
    text_ids: Sequence[np.ndarray],
    rows: np.ndarray,
) -> Neighbours:
    """Returns the neighbours of some rows among the documents that contain one of their rarest terms."""
    visited = (rarest[rows] @ postings).tocsr()
    places, codes = np.repeat(np.arange(len(rows)), np.diff(visited.indptr)), visited.indices
    allowed = codes != rows[places]
    for ids in text_ids:
        known = codes < len(ids)
        allowed &= ~known | (ids[np.where(known, codes, 0)] != ids[rows[places]])
    scores = np.where(allowed, visited.data, -np.inf)
    best = [
        _largest(scores[start:end], CANDIDATES * k) + start
        for start, end in zip(visited.indptr[:-1], visited.indptr[1:], strict=True)
    ]
    chosen = np.concatenate(best)
    chosen = chosen[allowed[chosen]]
    places, codes = places[chosen], codes[chosen]
    scores = _pair_scores(queries[rows], documents, places, codes)
    order = np.lexsort((codes, -scores, places))
    places, codes, scores = places[order], codes[order], scores[order]
    rank = np.arange(len(places)) - np.searchsorted(places, places)
    kept = (rank < k) & (scores > 0)
    found = np.full((len(rows), k), -1), np.full((len(rows), k), -np.inf, np.float32)
    for values, taken in zip(found, (codes, scores), strict=True):
        values[places[kept], rank[kept]] = taken[kept]
    return Neighbours(*found, _pair_scores(queries[rows], documents, np.arange(len(rows)), rows))


def _largest(scores: np.ndarray, number: int) -> np.ndarray:
    """Returns the positions of the largest scores, in any order."""
    if len(scores) <= number:
        return np.arange(len(scores))
    return np.argpartition(scores, len(scores) - number)[-number:]


def _pair_scores(
    queries: sparse.csr_matrix, documents: sparse.csr_matrix, places: np.ndarray, codes: np.ndarray
) -> np.ndarray:
    """Returns the product of each pair of a query and a document, float32[pairs]."""
    terms = np.unique(queries.indices)
    column = np.full(queries.shape[1], len(terms), np.int64)
    column[terms] = np.arange(len(terms))
    dense = np.zeros((queries.shape[0], len(terms) + 1), np.float32)  # the last column is for other terms
    dense[:, :-1] = queries[:, terms].toarray()
    lengths = np.diff(documents.indptr)[codes]
    pairs = np.repeat(np.arange(len(codes)), lengths)
    first = np.cumsum(lengths) - lengths
    entries = np.arange(len(pairs)) + np.repeat(documents.indptr[codes] - first, lengths)
    products = dense[places[pairs], column[documents.indices[entries]]] * documents.data[entries]
    return np.bincount(pairs, products, len(codes)).astype(np.float32)
