"""Lexical retrieval with BM25 over the same corpus: the baseline for a trained encoder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from soft_trainer.errors import UserError
from soft_trainer.estimators.bm25 import as_arrow, bm25_weights, count_terms, split_identifiers
from soft_trainer.evaluation.ranking import Ranking

_BLOCK = 64  # queries whose scores over the corpus are held at once
_SLOW = 1000  # with fewer queries there is no progress bar


def lexical_rankings(
    queries: Sequence[Sequence[str]],
    codes: Sequence[Sequence[str]],
    targets: Sequence[int] | Tensor,
    embeddings: tuple[Tensor, Tensor],
    top_k: int = 10,
) -> dict[str, Ranking]:
    """Ranks the corpus for every query with BM25 on the words of its tokens, alone and with an encoder's scores.

    Both sides are split into words in the same way (`split_identifiers`). A word's weight is Lucene's
    `ln(1 + (C - n + 0.5) / (n + 0.5))`, where n of C codes contain it; it is never negative. `k1` is 1.2,
    `b` 0.75. A word that occurs twice in a query counts twice. Ties count against the query's own code, even ties with
    codes that share no word with the query. Scores are float64, and codes with the same words score the same to the
    last bit.

    The second ranking is by the sum of both scores: each is standardised over a query's codes (mean 0, deviation 1),
    so that neither outweighs the other.

    Args:
        queries: tokens of each query's text, its docstring.
        codes: tokens of each function of the corpus.
        targets (`LongTensor[Q]`): row of each query's own code.
        embeddings (`Tensor[Q, d]` and `Tensor[C, d]`): of queries and codes, scored by their dot product.
        top_k (`int`, *optional*, defaults to 10): best codes to return, at most `C`.

    Returns:
        The rankings "lexical" and "combined".

    Raises:
        UserError: no code contains a word.
    """
    targets = torch.as_tensor(targets).numpy()
    code_counts, counts = count_terms([as_arrow(map(split_identifiers, side)) for side in (codes, queries)])
    if not code_counts.nnz:
        raise UserError(f"None of the {len(codes)} codes holds a word: there is nothing to search.")
    weights = bm25_weights(code_counts).T.tocsr()
    top_k = min(top_k, len(codes))
    parts = defaultdict(list)
    by_query, by_code = (side.to("cpu", torch.float64).numpy() for side in embeddings)
    for start in tqdm(range(0, len(queries), _BLOCK), "lexical BM25", disable=len(queries) < _SLOW or None):
        block = slice(start, start + _BLOCK)
        scores = (counts[block] @ weights).toarray()
        parts["lexical"].append(_rank(scores, targets[block], top_k))
        # Rounded, since equal codes should tie, and a matrix product may differ in its last bits.
        sums = np.round(_standardised(scores) + _standardised(by_query[block] @ by_code.T), 9)
        parts["combined"].append(_rank(sums, targets[block], top_k))
    return {name: Ranking(*map(torch.cat, zip(*blocks, strict=True))) for name, blocks in parts.items()}


def _standardised(scores: np.ndarray) -> np.ndarray:
    """Brings the scores of each query, float64[B, C], to mean 0 and deviation 1; equal scores become 0."""
    deviation = scores.std(1, keepdims=True)
    return (scores - scores.mean(1, keepdims=True)) / np.where(deviation > 0, deviation, 1.0)


def _rank(scores: np.ndarray, targets: np.ndarray, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ranks, and rows and scores of the top codes by score, then by row. `scores` is float64[B, C]."""
    ranks = np.count_nonzero(scores >= np.take_along_axis(scores, targets[:, None], 1), axis=1)
    top = np.empty((len(scores), top_k), dtype=np.int64)
    for row, bound in enumerate(np.partition(scores, -top_k, axis=1)[:, -top_k]):
        best = np.flatnonzero(scores[row] >= bound)
        top[row] = best[np.argsort(-scores[row, best], kind="stable")[:top_k]]
    return tuple(torch.from_numpy(part) for part in (ranks, top, np.take_along_axis(scores, top, 1)))
