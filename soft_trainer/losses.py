"""Defines the paper's losses as pure functions of scores, which need no model, process group or tokenizer.

`criterion.py` calls these functions. They take the arguments below, and some also take `weights` or `similarity`.
`soft_info_nce` has no argument `negatives`, because a weight of 0 excludes a column.

    scores      Tensor[B, N], the scores of B queries against the N functions of the global batch
    positives   LongTensor[B], the column of each query's positive; by default `arange(B)`
    negatives   BoolTensor[B, N], True where a column is a negative; by default all columns but the positive
    reduction   "mean" for the mean over queries, "none" for the loss of each query, Tensor[B]

A column that is neither the positive nor a negative is excluded from every softmax and every mean, and gets no
gradient. All computation is in float32 or higher. `benchmarks/theory.md` has theorems about these losses and corrects
some published statements.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(
    scores: Tensor, positives: Tensor | None = None, *, negatives: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """Computes InfoNCE (Eq. 1): the cross-entropy of `scores` with the positive's column as the target."""
    scores, positives = _inputs(scores, positives)
    if negatives is not None:
        _, valid = _valid(scores, positives, negatives)
        scores = scores.masked_fill(~valid, -torch.inf)
    return _reduced(F.cross_entropy(scores, positives, reduction="none"), reduction)


def soft_info_nce(
    scores: Tensor, weights: Tensor, positives: Tensor | None = None, *, reduction: str = "mean"
) -> Tensor:
    """Computes Soft-InfoNCE (Eq. 3): the cross-entropy of `scores + log(weights)`.

    Args:
        weights: Tensor[B, N], the weights w_ij, at least 0 (see `negative_weights`). The positive's weight is always
            1. A weight of 0 excludes the column from the loss and gives it no gradient.
    """
    scores, positives = _inputs(scores, positives)
    log_weights = weights.to(scores.dtype).log().scatter(1, positives.unsqueeze(1), 0.0)
    return _reduced(F.cross_entropy(scores + log_weights, positives, reduction="none"), reduction)


def weighted_info_nce(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes weighted InfoNCE (Section 4.3): -sum_j y_ij log p_ij.

    y is 1 on the positive and the softmax of `similarity / temperature` on the negatives. p is the softmax of `scores`
    over all N columns.

    Args:
        similarity: Tensor[B, N], the estimator's raw similarities.
    """
    scores, positives = _inputs(scores, positives)
    negatives, valid = _valid(scores, positives, negatives)
    y = _softmax(similarity, temperature, negatives, scores.dtype).scatter(1, positives.unsqueeze(1), 1.0)
    return _reduced(-(y * _log_softmax(scores, valid)).sum(1), reduction)


def binary_cross_entropy(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes binary cross-entropy (Section 4.3) of p against y, averaged over queries and columns.

    y and p are defined in `weighted_info_nce`. log(1 - p) is computed from log p, which is exact for p near 0 or 1.
    """
    scores, positives = _inputs(scores, positives)
    negatives, valid = _valid(scores, positives, negatives)
    y = _softmax(similarity, temperature, negatives, scores.dtype).scatter(1, positives.unsqueeze(1), 1.0)
    log_not_p = _log_of_the_rest(scores.masked_fill(~valid, -torch.inf)).masked_fill(y == 1, 0.0)
    entropies = -(y * _log_softmax(scores, valid) + (1 - y) * log_not_p).masked_fill(~valid, 0.0)
    return _reduced(entropies.sum(1) / valid.sum(1), reduction)


def kl_divergence(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes KL(y || p'), the divergence of the model's distribution over a query's negatives from the estimator's.

    `kl_regularized_info_nce` defines y and p'. A query's loss is 0 if the two distributions are equal, or if the query
    has fewer than two negatives.
    """
    scores, positives = _inputs(scores, positives)
    negatives, _ = _valid(scores, positives, negatives)
    y = _softmax(similarity, temperature, negatives, scores.dtype)
    return _reduced((torch.xlogy(y, y) - y * _log_softmax(scores, negatives)).sum(1), reduction)


def kl_regularized_info_nce(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    infonce_weight: float,
    kl_weight: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes InfoNCE with KL regularisation (Section 4.3): infonce_weight x InfoNCE + kl_weight x KL(y || p').

    y is the softmax of `similarity / temperature` and p' the softmax of `scores`, both over the negatives only.
    """
    scores, positives = _inputs(scores, positives)
    columns = {"negatives": negatives, "reduction": "none"}
    likelihood = info_nce(scores, positives, **columns)
    divergence = kl_divergence(scores, similarity, temperature, positives, **columns)
    return _reduced(infonce_weight * likelihood + kl_weight * divergence, reduction)


def _inputs(scores: Tensor, positives: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the scores in float32 or higher, and the positives, which default to `arange(B)`."""
    if positives is None:
        positives = torch.arange(len(scores), device=scores.device)
    if scores.dtype != torch.float64:
        scores = scores.float()
    return scores, positives


def _valid(scores: Tensor, positives: Tensor, negatives: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns two masks, BoolTensor[B, N]: the negatives, and the negatives together with the positive."""
    if negatives is None:
        negatives = torch.ones_like(scores, dtype=torch.bool)
    column = positives.unsqueeze(1)
    return negatives.scatter(1, column, False), negatives.scatter(1, column, True)


def _softmax(similarity: Tensor, temperature: float, negatives: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the softmax of `similarity / temperature` over the negatives. The other columns get 0."""
    shares = (similarity.to(dtype) / temperature).masked_fill(~negatives, -torch.inf).softmax(1)
    # For a query without negatives, the softmax over no columns is NaN.
    return shares.masked_fill(~negatives, 0.0)


def _log_softmax(scores: Tensor, columns: Tensor) -> Tensor:
    """Computes the log-softmax of `scores` over the columns in the mask `columns`. The other columns get 0."""
    return scores.masked_fill(~columns, -torch.inf).log_softmax(1).masked_fill(~columns, 0.0)


def _log_of_the_rest(scores: Tensor) -> Tensor:
    """Computes log(1 - p_j) for p = softmax(scores), precisely even if p_j is close to 0 or 1."""
    total = scores.logsumexp(1, keepdim=True)
    # Only the largest p can round to 1; the others are at most 1/2, where log1p is exact.
    largest = scores.argmax(1, keepdim=True)
    p = (scores - total).exp().scatter(1, largest, 0.0)
    others = scores.scatter(1, largest, -torch.inf).logsumexp(1, keepdim=True)
    return torch.log1p(-p).scatter(1, largest, others - total)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    """Returns the queries' losses unchanged if `reduction` is "none", otherwise their mean."""
    if reduction == "none":
        return losses
    return losses.mean()
