"""Finds each query's highest-scoring documents by multiplying sparse matrices, such as BM25 weights."""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from soft_trainer.estimators.neighbours import Excluded, Neighbours, blocks, exact_neighbours, recall_of, threads
from soft_trainer.system import distributed
from soft_trainer.system.terminal import print_on_main

EXACT_ROWS = 1 << 17  # up to this many documents, every query is compared with all of them
COMMON = 0.1  # a term in a larger fraction of the documents is multiplied as a dense column
ENTRIES = 1 << 22  # scores that a thread keeps in memory at once
VISITED = 1 << 11  # the initial limit on the documents that contain a query's rarest terms
BLOCK = 64  # queries that a thread scores at once
# The limit is doubled until, for a sample of this many queries, this fraction of the neighbours is found.
SAMPLE = 256
RECALL = 0.9


def nearest_by_terms(
    queries: sparse.csr_matrix,
    documents: sparse.csr_matrix,
    k: int,
    excluded: Excluded,
    *,
    exact_up_to: int = EXACT_ROWS,
    progress: str | None = None,
) -> Neighbours:
    """Finds the k documents with the highest scores for each query. Documents must score above 0.

    With more than `exact_up_to` documents, only documents that contain one of the query's rarest terms are scored. The
    number of these terms is chosen to find 90 % of the neighbours of a sample of queries, and the recall is printed.

    Args:
        queries: [n, terms], term counts.
        documents: [m, terms], term weights.
        k, excluded, progress: see `nearest_rows`.
    """
    queries = queries.tocsr().astype(np.float32)
    documents = documents.tocsr().astype(np.float32)
    rows = np.arange(queries.shape[0])
    if documents.shape[0] <= exact_up_to:
        return _compare_all(queries, documents, rows, k, excluded, progress)
    sample = np.sort(np.random.default_rng(0).choice(rows, min(SAMPLE, len(rows)), replace=False))
    expected = _compare_all(queries, documents, sample, k, excluded).rows
    postings = documents.T.tocsr()
    visited = VISITED
    while True:
        rare = _rarest(queries, postings, visited)
        sides = rare, postings, queries, documents
        recall = recall_of(_compare_some(*sides, sample, k, excluded).rows, expected)
        if recall >= RECALL or rare.nnz == queries.nnz:
            break
        visited *= 2
    print_on_main(f"neighbours among {documents.shape[0]:,} texts: recall@{k} {recall:.3f} on {len(sample)} queries")
    return _compare_some(*sides, rows, k, excluded, progress)


def _compare_all(queries, documents, rows: np.ndarray, k: int, excluded, progress: str | None = None) -> Neighbours:
    """Finds the neighbours of the queries `rows` by scoring all documents. Frequent terms become dense columns."""
    total = documents.shape[0]
    common = np.bincount(documents.indices, minlength=documents.shape[1]) > COMMON * total
    rare = sparse.diags_array((~common).astype(np.float32))
    dense = [torch.from_numpy(side[:, common].toarray()) for side in (queries, documents)]
    rare_queries = (queries @ rare).tocsr()
    postings = (documents @ rare).T.tocsr()
    for matrix in (rare_queries, postings):
        matrix.eliminate_zeros()

    def score(block: np.ndarray) -> Tensor:
        products = torch.from_numpy((rare_queries[block] @ postings).toarray())
        return products.addmm_(dense[0][block], dense[1].T)

    options = {"above": 0.0, "entries": ENTRIES, "at_once": distributed.cores()}
    return exact_neighbours(score, rows, total, k, excluded, progress, **options)


def _rarest(queries: sparse.csr_matrix, postings: sparse.csr_matrix, visited: int) -> sparse.csr_matrix:
    """Keeps each query's rarest terms, up to `visited` documents in total, but always at least one term."""
    row = np.repeat(np.arange(queries.shape[0]), np.diff(queries.indptr))
    having = np.diff(postings.indptr)[queries.indices]
    order = np.lexsort((having, row))
    before = np.cumsum(having[order]) - having[order]
    first = queries.indptr[row[order]]
    kept = np.zeros(queries.nnz, bool)
    within = before - before[first] + having[order]
    kept[order] = (within <= visited) | (np.arange(queries.nnz) == first)
    starts = np.r_[0, np.cumsum(kept)][queries.indptr]
    return sparse.csr_matrix((queries.data[kept], queries.indices[kept], starts), shape=queries.shape)


def _compare_some(rare, postings, queries, documents, rows, k, excluded, progress: str | None = None) -> Neighbours:
    """Finds the neighbours of the queries `rows` among documents with a term in `rare`. Scores all terms."""

    def nearest(block: np.ndarray) -> Neighbours:
        """Finds the neighbours of a block of queries."""
        found = rare[block] @ postings
        query = np.zeros(queries.shape[1], np.float32)
        near = np.full((len(block), k), -1)
        scores = np.full((len(block), k), -np.inf, np.float32)
        own = np.asarray(queries[block].multiply(documents[excluded.own[block]]).sum(1)).ravel()
        for position, row in enumerate(block):
            entries = slice(*queries.indptr[row : row + 2])
            query[queries.indices[entries]] = queries.data[entries]
            columns = found.indices[slice(*found.indptr[position : position + 2])]
            columns = columns[~excluded.contain(block[position : position + 1], columns[None])[0]]
            values = documents[columns] @ query
            best = np.arange(len(values))
            if len(values) > k:
                best = np.flatnonzero(values >= np.partition(values, -k)[-k])  # with all ties for rank k
            best = best[np.lexsort((columns[best], -values[best]))][:k]
            near[position, : len(best)] = columns[best]
            scores[position, : len(best)] = values[best]
            query[queries.indices[entries]] = 0
        return Neighbours(near, scores, own)

    with threads(distributed.cores()) as pool:
        return Neighbours.joined(pool.map(nearest, blocks(rows, 1, BLOCK)), progress, len(rows))
