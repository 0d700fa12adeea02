"""Ranks a corpus by words with BM25, alone or combined with an encoder, as a baseline for trained encoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from tqdm.auto import tqdm

from soft_trainer.data.term_counts import as_arrow, bm25_weights, count_terms, split_identifiers
from soft_trainer.encoders.encoding import where_float64_exists
from soft_trainer.errors import UserError
from soft_trainer.estimators.neighbours import threads
from soft_trainer.evaluation.ranking import Corpus, Ranking, rank_scores, without
from soft_trainer.system import distributed

_BLOCK = 64  # queries in a block
_SCORES = 2**26  # scores in memory at once
_SLOW = 1000  # fewer queries are ranked without a progress bar
_NOISE = 1e-6  # the largest effect of float32 rounding on the cosine of two embeddings


def lexical_rankings(
    queries: Sequence[Sequence[str]],
    codes: Sequence[Sequence[str]],
    targets: Sequence[int] | Tensor,
    embeddings: tuple[Tensor, Tensor],
    top_k: int = 10,
    excluded: Tensor | None = None,
) -> dict[str, Ranking]:
    """Ranks the corpus for each query twice: by BM25 on words, and by the sum of BM25 scores and an encoder's scores.

    `split_identifiers` splits both queries and functions into words. A word that occurs in n of C functions has
    Lucene's idf, `ln(1 + (C - n + 0.5) / (n + 0.5))`, which is never negative. `k1` is 1.2 and `b` is 0.75. A word
    that occurs twice in a query counts twice. Ties are broken against the query's positive, even for functions that
    share no word with the query. Scores are float64, and functions with the same words get bit-identical scores.

    For the sum, BM25 scores and encoder scores are standardised over the functions of a query (mean 0, deviation 1),
    so that both have the same influence. An encoder whose scores differ only by rounding errors adds nothing.

    Args:
        queries: the tokens of each query.
        codes: the tokens of each function in the corpus.
        targets (`LongTensor[Q]`): the corpus index of each query's positive.
        embeddings (`Tensor[Q, d]` and `Tensor[C, d]`): the embeddings of queries and functions, scored by dot product.
        top_k (`int`, *optional*, defaults to 10): the number of best functions to return, at most `C`.
        excluded (`LongTensor[Q]`, *optional*): the corpus index of a function that is not ranked for the query, or -1.

    Returns:
        A dict with two rankings, "lexical" (BM25) and "combined" (the sum).

    Raises:
        UserError: no function contains a word.
    """
    targets = torch.as_tensor(targets)
    code_counts, counts = count_terms([as_arrow(map(split_identifiers, side)) for side in (codes, queries)])
    if not code_counts.nnz:
        raise UserError(f"None of the {len(codes)} functions contains a word: there is nothing to search.")
    weights = bm25_weights(code_counts).T.tocsr()
    query_embeddings, code_embeddings = map(where_float64_exists, embeddings)
    device = code_embeddings.device
    targets = targets.to(device)
    if excluded is None:
        excluded = torch.full_like(targets, -1)
    excluded = excluded.to(device)
    corpus = Corpus(code_embeddings)
    noise = _NOISE * query_embeddings.double().norm(dim=1) * corpus.longest
    lexical = []
    combined = []
    for block, words in _products(counts, weights):
        scores = torch.from_numpy(words).to(device)
        sums = _standardised(scores) + _standardised(corpus.scores(query_embeddings[block]), noise[block])
        lexical.append(rank_scores(without(scores, excluded[block]), targets[block], top_k))
        combined.append(rank_scores(without(sums, excluded[block]), targets[block], top_k))
    return {"lexical": Ranking.join(lexical), "combined": Ranking.join(combined)}


def _products(counts: sparse.csr_matrix, weights: sparse.csr_matrix) -> Iterator[tuple[slice, np.ndarray]]:
    """Multiplies blocks of queries with the functions. A sparse product uses only one core, so several run at a time.

    Yields each block of queries with its scores, float64[block, C].
    """
    starts = range(0, counts.shape[0], _BLOCK)
    blocks = [slice(start, start + _BLOCK) for start in starts]
    at_once = max(1, min(distributed.cores(), _SCORES // (_BLOCK * weights.shape[1])))
    with (
        threads(at_once) as pool,
        tqdm(desc="lexical BM25", total=len(blocks), disable=counts.shape[0] < _SLOW or None) as bar,
    ):
        for first in range(0, len(blocks), at_once):
            group = blocks[first : first + at_once]
            products = pool.map(lambda block: (counts[block] @ weights).toarray(), group)
            yield from zip(group, products, strict=True)
            bar.update(len(group))


def _standardised(scores: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Standardises each query's scores, Tensor[B, C], to mean 0 and deviation 1, or sets them to 0 if all is noise.

    Args:
        noise: the largest deviation that counts as noise.
    """
    deviation, mean = torch.std_mean(scores, dim=1, correction=0)
    factor = torch.where(deviation > noise, 1 / deviation, 0.0)
    return (scores - mean[:, None]) * factor[:, None]
