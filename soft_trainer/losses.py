"""The paper's losses, and an order loss, as pure functions of scores: no model, no process ranks, no tokenizer.

All losses share these arguments:

    scores      Tensor[B, N], the scores of B queries against the N codes of the global batch
    positives   LongTensor[B], the column of each query's own code; `arange(B)` when None
    negatives   BoolTensor[B, N], the columns that count as negatives; all but the positive when None
    also        BoolTensor[B, N], further right answers

The positive always takes part. A column that does not count is left out of every softmax and every mean, and gets zero
gradient. With `also`, the loss of a query is the mean over its right answers, each taken as the positive in turn with
the others left out. All computation is in float32 or higher. `docs/theory.md` has the theorems about these losses and
corrects printed statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class RightAnswers:
    """Queries and their right answers as R pairs, each of which gets a row in the loss.

    Args:
        queries (`LongTensor[R]`): the query of each pair; a query's pairs are adjacent, in the order of the columns.
        positives (`LongTensor[R]`): the column of the right answer.
        left_out (`BoolTensor[R, N]`): the columns of the query's other right answers.
        shares (`Tensor[R]`): 1 / the number of the query's right answers.
        number: how many queries there are, B.
    """

    queries: Tensor
    positives: Tensor
    left_out: Tensor
    shares: Tensor
    number: int

    def rows(self, values: Tensor | None) -> Tensor | None:
        """Repeats each query's value for all its pairs; None stays None."""
        return None if values is None else values[self.queries]

    def negatives(self, negatives: Tensor | None) -> Tensor:
        """Returns the columns that count for each pair, BoolTensor[R, N], given those of each query (None: all)."""
        return ~self.left_out if negatives is None else self.rows(negatives) & ~self.left_out

    def mean(self, losses: Tensor) -> Tensor:
        """Averages Tensor[R] over each query's pairs, then over the queries."""
        return (losses * self.shares.to(losses.dtype)).sum() / self.number


def expand_positives(positives: Tensor, also: Tensor) -> RightAnswers:
    """Pairs B queries with their right answers, giving R >= B pairs.

    Args:
        positives: LongTensor[B], column of each query's own code.
        also: BoolTensor[B, N], further right answers; the own code may be among them.
    """
    right = also.scatter(1, positives.unsqueeze(1), True)
    queries, columns = right.nonzero(as_tuple=True)
    left_out = right[queries].scatter(1, columns.unsqueeze(1), False)
    shares = right.sum(1, dtype=torch.float64).reciprocal()[queries]
    return RightAnswers(queries, columns, left_out, shares, len(also))


def info_nce(
    scores: Tensor, positives: Tensor | None = None, *, negatives: Tensor | None = None, also: Tensor | None = None
) -> Tensor:
    """Computes InfoNCE (Eq. 1): the mean over queries of the cross-entropy of the positive column."""
    return _mean(_info_nce, scores, positives, negatives, also)


def soft_info_nce(
    scores: Tensor, weights: Tensor, positives: Tensor | None = None, *, also: Tensor | None = None
) -> Tensor:
    """Computes Soft-InfoNCE (Eq. 3): the cross-entropy of `scores + log(weights)`.

    Args:
        weights: w_ij, Tensor[B, N], 0 or more (see `negative_weights`). The positive's weight is taken as 1. A weight
            of 0 drops the column from the denominator, with zero gradient. With `also`, weights that depend on the
            positive are Tensor[R, N], a row for each pair of `expand_positives`.
    """
    scores, positives = _prepare(scores, positives)
    if also is None:
        return _soft_info_nce(scores, positives, weights).mean()
    pairs = expand_positives(positives, also)
    weights = weights if len(weights) == len(pairs.queries) else pairs.rows(weights)
    weights = weights.masked_fill(pairs.left_out, 0.0)
    return pairs.mean(_soft_info_nce(pairs.rows(scores), pairs.positives, weights))


def weighted_info_nce(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Computes weighted InfoNCE (Section 4.3): the mean over queries of -sum_j y_ij log p_ij.

    y is 1 on the positive and, on the negatives, the softmax of `similarity / temperature`, similarity Tensor[B, N];
    p is the softmax of `scores` over all N columns.
    """
    return _mean(_weighted_info_nce, scores, positives, negatives, also, similarity, temperature)


def binary_cross_entropy(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Computes binary cross-entropy (Section 4.3): the mean over queries and columns of that of p against y.

    y and p are those of `weighted_info_nce`. log(1 - p) is computed from log p, without cancellation for p near 0
    or 1.
    """
    return _mean(_binary_cross_entropy, scores, positives, negatives, also, similarity, temperature)


def kl_regularized_info_nce(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    infonce_weight: float,
    kl_weight: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Computes KL regularisation (Section 4.3): infonce_weight x InfoNCE + kl_weight x mean of KL(y || p').

    The mean is over queries. y is the softmax of `similarity / temperature` and p' that of `scores`, both over the
    negatives only.
    """
    options = (similarity, temperature, infonce_weight, kl_weight)
    return _mean(_kl_regularized_info_nce, scores, positives, negatives, also, *options)


def kl_divergence(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Computes the divergence in `kl_regularized_info_nce`, without InfoNCE: the mean over queries of KL(y || p').

    It is 0 for a query whose negatives get the same distribution from the model as from the estimator, and for a query
    with fewer than two negatives.
    """
    return _mean(_kl_divergence, scores, positives, negatives, also, similarity, temperature)


def order_loss(
    scores: Tensor,
    similarity: Tensor,
    scale: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
) -> Tensor:
    """Computes the order loss: the mean over queries of log(1 + sum over pairs of exp(scale (score_k - score_j))).

    The pairs are the negatives with similarity_j > similarity_k, so the loss is large if the model orders two
    negatives against the estimator. Equal similarities form no pair; a query without a pair counts 0. Sorting makes
    this O(N log N) per query.

    Args:
        similarity: raw, larger = more similar, Tensor[B, N]. It carries no gradient.
        scale: above 0; how much a difference of scores counts.

    Raises:
        ValueError: the scale is not above 0.
    """
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale:g}: must be above 0")
    scores, positives = _prepare(scores, positives)
    valid = torch.ones_like(scores, dtype=torch.bool) if negatives is None else negatives
    valid = valid.scatter(1, positives.unsqueeze(1), False)
    # Invalid columns get the largest similarity, so they come last and are never the less similar one of a pair.
    ordered, order = similarity.detach().masked_fill(~valid, torch.inf).sort(dim=1)
    logits = scale * scores.gather(1, order)
    less_similar = torch.searchsorted(ordered, ordered)  # the number of columns that are less similar
    running = logits.logcumsumexp(1).gather(1, (less_similar - 1).clamp_min(0))
    terms = (running - logits).masked_fill((less_similar == 0) | ~valid.gather(1, order), -torch.inf)
    return F.pad(terms, (1, 0)).logsumexp(1).mean()


def _mean(loss, scores: Tensor, positives: Tensor | None, negatives: Tensor | None, also: Tensor | None, *options):
    """Averages a loss over queries; `options` that are tensors have a row for each query."""
    scores, positives = _prepare(scores, positives)
    if also is None:
        return loss(scores, positives, negatives, *options).mean()
    pairs = expand_positives(positives, also)
    options = (pairs.rows(option) if isinstance(option, Tensor) else option for option in options)
    return pairs.mean(loss(pairs.rows(scores), pairs.positives, pairs.negatives(negatives), *options))


def _info_nce(scores: Tensor, positives: Tensor, negatives: Tensor | None) -> Tensor:
    if negatives is not None:
        scores = scores.masked_fill(~_valid_columns(negatives, positives), -torch.inf)
    return F.cross_entropy(scores, positives, reduction="none")


def _soft_info_nce(scores: Tensor, positives: Tensor, weights: Tensor) -> Tensor:
    log_weights = weights.to(scores.dtype).log().scatter(1, positives.unsqueeze(1), 0.0)
    return F.cross_entropy(scores + log_weights, positives, reduction="none")


def _weighted_info_nce(
    scores: Tensor, positives: Tensor, negatives: Tensor | None, similarity: Tensor, temperature: float
) -> Tensor:
    valid = _valid_columns(negatives, positives, scores)
    labels = _soft_labels(similarity, temperature, positives, valid, scores.dtype)
    log_p = scores.masked_fill(~valid, -torch.inf).log_softmax(1)
    return -(labels * log_p.masked_fill(~valid, 0.0)).sum(1)


def _binary_cross_entropy(
    scores: Tensor, positives: Tensor, negatives: Tensor | None, similarity: Tensor, temperature: float
) -> Tensor:
    valid = _valid_columns(negatives, positives, scores)
    labels = _soft_labels(similarity, temperature, positives, valid, scores.dtype)
    log_p = scores.masked_fill(~valid, -torch.inf).log_softmax(1).masked_fill(~valid, 0.0)
    log_not_p = _log_of_the_rest(scores, valid).masked_fill(labels == 1, 0.0)
    entropies = -(labels * log_p + (1 - labels) * log_not_p).masked_fill(~valid, 0.0)
    return entropies.sum(1) / valid.sum(1)


def _kl_regularized_info_nce(
    scores: Tensor,
    positives: Tensor,
    negatives: Tensor | None,
    similarity: Tensor,
    temperature: float,
    infonce_weight: float,
    kl_weight: float,
) -> Tensor:
    divergence = _kl_divergence(scores, positives, negatives, similarity, temperature)
    return infonce_weight * _info_nce(scores, positives, negatives) + kl_weight * divergence


def _kl_divergence(
    scores: Tensor, positives: Tensor, negatives: Tensor | None, similarity: Tensor, temperature: float
) -> Tensor:
    valid = _valid_columns(negatives, positives, scores)
    labels = _soft_labels(similarity, temperature, positives, valid, scores.dtype)
    only = valid.scatter(1, positives.unsqueeze(1), False)
    log_p = scores.masked_fill(~only, -torch.inf).log_softmax(1).masked_fill(~only, 0.0)
    return (torch.xlogy(labels, labels) - labels * log_p).masked_fill(~only, 0.0).sum(1)


def _prepare(scores: Tensor, positives: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns scores in float32 or higher, and the column of each query's own code."""
    if positives is None:
        positives = torch.arange(len(scores), device=scores.device)
    return scores if scores.dtype == torch.float64 else scores.float(), positives


def _valid_columns(negatives: Tensor | None, positives: Tensor, scores: Tensor | None = None) -> Tensor:
    """Marks the negatives that count, and the positive: BoolTensor[B, N]."""
    if negatives is None:
        return torch.ones_like(scores, dtype=torch.bool)
    return negatives.scatter(1, positives.unsqueeze(1), True)


def _soft_labels(similarity: Tensor, temperature: float, positives: Tensor, valid: Tensor, dtype) -> Tensor:
    """Computes y: 1 on the positive, the softmax of `similarity / temperature` on valid negatives, 0 elsewhere."""
    column = positives.unsqueeze(1)
    only = valid.scatter(1, column, False)
    logits = (similarity.to(dtype) / temperature).masked_fill(~only, -torch.inf)
    # The softmax of a query without negatives is over nothing, which is NaN; its labels are all 0.
    return logits.softmax(1).masked_fill(~only, 0.0).scatter(1, column, 1.0)


def _log_of_the_rest(scores: Tensor, valid: Tensor) -> Tensor:
    """Computes log(1 - p_j): logsumexp over the other columns minus logsumexp over all of them."""
    scores = scores.masked_fill(~valid, -torch.inf)
    total = scores.logsumexp(1, keepdim=True)
    # Only the largest p can round to 1; the others are at most 1/2, where log1p is exact.
    largest = scores.argmax(1, keepdim=True)
    p = (scores - total).exp().scatter(1, largest, 0.0)
    others = scores.scatter(1, largest, -torch.inf).logsumexp(1, keepdim=True)
    return torch.log1p(-p).scatter(1, largest, others - total)
