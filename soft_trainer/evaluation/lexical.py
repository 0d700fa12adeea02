"""Lexical retrieval with BM25 over the same codebase: the line that a trained encoder has to beat."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor
from tqdm.auto import tqdm

from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranking import Ranking

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")
_BLOCK = 64  # queries whose scores over the codebase are held at once
_SLOW = 1000  # queries from which a progress bar is worth while


def split_identifiers(tokens: Sequence[str]) -> list[str]:
    """Words of code or text in lower case: `parseHTTPHeader`, `parse_http_header` give parse, http, header.

    Punctuation and operators fall away, numbers stay, and a string or comment in one token gives its words.
    """
    return [word.lower() for token in tokens for word in _WORD.findall(token)]


def lexical_ranks(
    queries: Sequence[Sequence[str]],
    codes: Sequence[Sequence[str]],
    targets: Sequence[int] | Tensor,
    k1: float = 1.2,
    b: float = 0.75,
    top_k: int = 10,
) -> Ranking:
    """Ranks the codebase for every query with BM25 on the words of its tokens.

    Both sides are split into words in the same way (`split_identifiers`). A word's weight is Lucene's
    `ln(1 + (C - n + 0.5) / (n + 0.5))`, where n of C codes hold it, which is never negative; a word that occurs twice
    in a query counts twice. Ties count against the query's own code, also the many codes without any of its words.
    Scores are float64, and codes with the same words score the same to the last bit.

    Args:
        queries: tokens of each query's text, its docstring.
        codes: tokens of each function of the codebase.
        targets (`LongTensor[Q]`): row of each query's own code.
        k1 (`float`, *optional*, defaults to 1.2): saturation of a word's count.
        b (`float`, *optional*, defaults to 0.75): how much a long code is held against it, 0 to 1.
        top_k (`int`, *optional*, defaults to 10): best codes to return, at most `C`.

    Raises:
        UserError: no code with a word, or queries and targets of different number.
    """
    targets = torch.as_tensor(targets).numpy()
    if len(targets) != len(queries):
        raise UserError(f"{len(queries)} queries but {len(targets)} targets: there must be one code for each query.")
    counter = CountVectorizer(analyzer=split_identifiers, dtype=np.float64)
    try:
        weights = _bm25_weights(counter.fit_transform(codes), k1, b).T.tocsr()
    except ValueError:
        raise UserError(
            f"None of the {len(codes)} codes holds a word: lexical retrieval has nothing to search."
        ) from None
    counts = counter.transform(queries)
    top_k, parts = min(top_k, len(codes)), []
    for start in tqdm(range(0, len(queries), _BLOCK), "lexical BM25", disable=len(queries) < _SLOW or None):
        scores = (counts[start : start + _BLOCK] @ weights).toarray()
        parts.append(_rank(scores, targets[start : start + _BLOCK], top_k))
    return Ranking(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _bm25_weights(counts: sparse.csr_matrix, k1: float, b: float) -> sparse.csr_matrix:
    """BM25 contribution of each word to the score of each code, `[C, words]`."""
    total, lengths = counts.shape[0], np.asarray(counts.sum(1)).ravel()
    having = np.bincount(counts.indices, minlength=counts.shape[1])
    idf = np.log1p((total - having + 0.5) / (having + 0.5))
    norms = np.repeat(k1 * (1 - b + b * lengths / lengths.mean()), np.diff(counts.indptr))
    counts.data *= (k1 + 1) * idf[counts.indices] / (counts.data + norms)
    return counts


def _rank(scores: np.ndarray, targets: np.ndarray, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks, and the top codes in order of score, then of row; scores float64 [B, C]."""
    own = np.take_along_axis(scores, targets[:, None], 1)
    ranks = np.count_nonzero(scores >= own, axis=1)
    least = np.partition(scores, -top_k, axis=1)[:, -top_k]
    top = np.empty((len(scores), top_k), dtype=np.int64)
    for row, bound in enumerate(least):
        held = np.flatnonzero(scores[row] >= bound)
        top[row] = held[np.argsort(-scores[row, held], kind="stable")[:top_k]]
    return tuple(torch.from_numpy(part) for part in (ranks, top, np.take_along_axis(scores, top, 1)))
