"""Lexical retrieval with BM25 over the same corpus: the baseline for a trained encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from soft_trainer.errors import UserError
from soft_trainer.estimators.bm25 import as_arrow, bm25_weights, count_terms, split_identifiers
from soft_trainer.evaluation.ranking import Corpus, Ranking, rank_scores

_BLOCK = 64  # queries whose scores over the corpus are held at once
_SLOW = 1000  # with fewer queries there is no progress bar
_NOISE = 1e-6  # what rounding in float32 may change in the cosine of two embeddings


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
    so that neither outweighs the other. An encoder whose scores of a query differ only by rounding adds nothing.

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
    targets = torch.as_tensor(targets)
    code_counts, counts = count_terms([as_arrow(map(split_identifiers, side)) for side in (codes, queries)])
    if not code_counts.nnz:
        raise UserError(f"None of the {len(codes)} codes holds a word: there is nothing to search.")
    weights = bm25_weights(code_counts).T.tocsr()
    query_embeddings, code_embeddings = (side.cpu() for side in embeddings)
    corpus = Corpus(code_embeddings)
    noise = _NOISE * query_embeddings.double().norm(dim=1) * code_embeddings.double().norm(dim=1).max()
    lexical = []
    combined = []
    for start in tqdm(range(0, len(queries), _BLOCK), "lexical BM25", disable=len(queries) < _SLOW or None):
        block = slice(start, start + _BLOCK)
        scores = torch.from_numpy((counts[block] @ weights).toarray())
        lexical.append(rank_scores(scores, targets[block], top_k))
        sums = _standardised(scores) + _standardised(corpus.scores(query_embeddings[block]), noise[block])
        combined.append(rank_scores(sums, targets[block], top_k))
    return {"lexical": Ranking.join(lexical), "combined": Ranking.join(combined)}


def _standardised(scores: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Standardises each query's scores, Tensor[B, C]; scores that vary by no more than `noise` become 0."""
    deviation, mean = torch.std_mean(scores, dim=1, correction=0)
    factor = torch.where(deviation > noise, 1 / deviation, 0.0)
    return (scores - mean[:, None]) * factor[:, None]
