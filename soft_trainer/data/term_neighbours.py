"""Finds the documents most similar to each query by a product of sparse matrices, such as BM25's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from soft_trainer.data.neighbours import Neighbours, exact_neighbours

COMMON = 0.1  # share of the documents above which a term is multiplied as a dense column
ENTRIES = 1 << 22  # scores that a thread holds at once


def nearest_by_terms(
    queries: sparse.csr_matrix,
    documents: sparse.csr_matrix,
    k: int,
    *,
    text_ids: Sequence[np.ndarray] = (),
    progress: str | None = None,
) -> Neighbours:
    """Returns the nearest documents of each row, exactly. A document that scores 0 or less is not a neighbour.

    A few terms account for most entries of a sparse product; as dense columns they multiply several times faster.

    Args:
        queries: term counts, [n, terms].
        documents: weights of the terms, [m, terms], m >= n; the document of row i is document i.
        k, text_ids, progress: as in `nearest_rows`.
    """
    queries, documents = (side.tocsr().astype(np.float32) for side in (queries, documents))
    total = documents.shape[0]
    common = np.bincount(documents.indices, minlength=documents.shape[1]) > COMMON * total
    rare = sparse.diags_array((~common).astype(np.float32))
    dense = [torch.from_numpy(side[:, common].toarray()) for side in (queries, documents)]
    rare_queries, postings = (queries @ rare).tocsr(), (documents @ rare).T.tocsr()
    for matrix in (rare_queries, postings):
        matrix.eliminate_zeros()

    def score(rows: np.ndarray) -> Tensor:
        products = torch.from_numpy((rare_queries[rows] @ postings).toarray())
        return products.addmm_(dense[0][rows], dense[1].T)

    rows, threads = np.arange(queries.shape[0]), torch.get_num_threads()
    options = {"above": 0.0, "entries": ENTRIES, "threads": threads}
    return exact_neighbours(score, rows, total, k, text_ids, progress, **options)
