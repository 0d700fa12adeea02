"""The paper's losses as pure functions of scores: no model, no process ranks, no tokenizer.

Throughout, `scores` is Tensor[B, N], the scores of B queries against the N codes of the global batch, `positives`
LongTensor[B] the column of each query's own code (`arange(B)` when None) and `negatives` BoolTensor[B, N] the columns
that count as negatives (all but the positive when None; the positive always takes part). A column that does not count
is absent: from every softmax, from every mean, and it gets zero gradient. All mathematics is in float32 or higher.
What is proved of these losses, and where the printed statements fail, is in `docs/theory.md`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(scores: Tensor, positives: Tensor | None = None, *, negatives: Tensor | None = None) -> Tensor:
    """InfoNCE (Eq. 1): mean over queries of the cross-entropy of the positive column."""
    scores, positives = _prepare(scores, positives)
    if negatives is not None:
        scores = scores.masked_fill(~_counted(negatives, positives), -torch.inf)
    return F.cross_entropy(scores, positives)


def soft_info_nce(scores: Tensor, weights: Tensor, positives: Tensor | None = None) -> Tensor:
    """Soft-InfoNCE (Eq. 3): the cross-entropy of `scores + log(weights)`.

    Args:
        weights: w_ij, Tensor[B, N], not negative (`negative_weights`). The positive's weight is taken as 1; a weight
            of 0 leaves the column out of the denominator, with zero gradient.
    """
    scores, positives = _prepare(scores, positives)
    log_weights = weights.to(scores.dtype).log().scatter(1, positives.unsqueeze(1), 0.0)
    return F.cross_entropy(scores + log_weights, positives)


def weighted_info_nce(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
) -> Tensor:
    """Weighted InfoNCE (Section 4.3): mean over queries of -sum_j y_ij log p_ij.

    y is 1 on the positive and, on the negatives, the softmax of `similarity / temperature`, similarity Tensor[B, N];
    p is the softmax of `scores` over all N columns.
    """
    scores, positives = _prepare(scores, positives)
    counted = _counted(negatives, positives, scores)
    labels = _soft_labels(similarity, temperature, positives, counted, scores.dtype)
    log_p = scores.masked_fill(~counted, -torch.inf).log_softmax(1)
    return -(labels * log_p.masked_fill(~counted, 0.0)).sum(1).mean()


def binary_cross_entropy(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy (Section 4.3): mean over queries and their columns of the cross-entropy of p against y.

    y and p are those of `weighted_info_nce`. log(1 - p) is taken from log p, without cancellation where p is near 0
    or 1.
    """
    scores, positives = _prepare(scores, positives)
    counted = _counted(negatives, positives, scores)
    labels = _soft_labels(similarity, temperature, positives, counted, scores.dtype)
    log_p = scores.masked_fill(~counted, -torch.inf).log_softmax(1).masked_fill(~counted, 0.0)
    log_not_p = _log_of_the_rest(scores, counted).masked_fill(labels == 1, 0.0)
    entropies = -(labels * log_p + (1 - labels) * log_not_p).masked_fill(~counted, 0.0)
    return (entropies.sum(1) / counted.sum(1)).mean()


def kl_regularized_info_nce(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    infonce_weight: float,
    kl_weight: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
) -> Tensor:
    """KL regularisation (Section 4.3): infonce_weight x InfoNCE + kl_weight x mean over queries of KL(y || p').

    y is the softmax of `similarity / temperature`, p' that of `scores`, both over the negatives only.
    """
    scores, positives = _prepare(scores, positives)
    counted = _counted(negatives, positives, scores)
    labels = _soft_labels(similarity, temperature, positives, counted, scores.dtype)
    only = counted.scatter(1, positives.unsqueeze(1), False)
    log_p = scores.masked_fill(~only, -torch.inf).log_softmax(1).masked_fill(~only, 0.0)
    divergence = (torch.xlogy(labels, labels) - labels * log_p).masked_fill(~only, 0.0).sum(1).mean()
    return infonce_weight * info_nce(scores, positives, negatives=negatives) + kl_weight * divergence


def _prepare(scores: Tensor, positives: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores in float32 or higher, and the column of each query's own code."""
    if positives is None:
        positives = torch.arange(len(scores), device=scores.device)
    return scores if scores.dtype == torch.float64 else scores.float(), positives


def _counted(negatives: Tensor | None, positives: Tensor, scores: Tensor | None = None) -> Tensor:
    """BoolTensor[B, N]: the negatives that count, and the positive."""
    if negatives is None:
        return torch.ones_like(scores, dtype=torch.bool)
    return negatives.scatter(1, positives.unsqueeze(1), True)


def _soft_labels(similarity: Tensor, temperature: float, positives: Tensor, counted: Tensor, dtype) -> Tensor:
    """y: 1 on the positive, the softmax of `similarity / temperature` on the counted negatives, 0 elsewhere."""
    column = positives.unsqueeze(1)
    only = counted.scatter(1, column, False)
    logits = (similarity.to(dtype) / temperature).masked_fill(~only, -torch.inf)
    # A query without a single negative has a softmax over nothing, which is NaN: its negatives' labels are all 0.
    return logits.softmax(1).masked_fill(~only, 0.0).scatter(1, column, 1.0)


def _log_of_the_rest(scores: Tensor, counted: Tensor) -> Tensor:
    """log(1 - p_j) = logsumexp over the other columns minus logsumexp over all of them."""
    scores = scores.masked_fill(~counted, -torch.inf)
    total = scores.logsumexp(1, keepdim=True)
    # Only the largest p can round to 1; the others are at most 1/2, where log1p is exact.
    largest = scores.argmax(1, keepdim=True)
    p = (scores - total).exp().scatter(1, largest, 0.0)
    others = scores.scatter(1, largest, -torch.inf).logsumexp(1, keepdim=True)
    return torch.log1p(-p).scatter(1, largest, others - total)
