"""Defines the paper's losses as pure functions of scores. They know no model, no process ranks and no tokenizer.

`objective.py` calls them. All losses share these arguments:

    scores      Tensor[B, N], the scores of B queries against the N codes of the global batch
    positives   LongTensor[B], the column of each query's own code; by default `arange(B)`
    negatives   BoolTensor[B, N], True where a column is a negative; by default everywhere but on the positive
    also        BoolTensor[B, N], True where a column is another right answer

A column that is neither the positive nor a negative is excluded from every softmax and every mean, and gets no
gradient. With `also`, the loss of a query is the mean over its right answers, each taken as the positive in turn with
the others excluded. All computation is in float32 or higher. `benchmarks/theory.md` contains theorems about these
losses, and corrections to published statements.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F


def info_nce(
    scores: Tensor, positives: Tensor | None = None, *, negatives: Tensor | None = None, also: Tensor | None = None
) -> Tensor:
    """Computes InfoNCE (Eq. 1): the mean over queries of the cross-entropy of the positive column."""
    rows = _Rows(scores, positives, negatives, also)
    return rows.mean(rows.info_nce())


def soft_info_nce(
    scores: Tensor, weights: Tensor, positives: Tensor | None = None, *, also: Tensor | None = None
) -> Tensor:
    """Computes Soft-InfoNCE (Eq. 3): the cross-entropy of `scores + log(weights)`.

    Args:
        weights: Tensor[B, N], the weights w_ij, at least 0 (see `negative_weights`). The positive's weight is always
            1. A weight of 0 removes the column from the denominator and its gradient. With `also`, weights that depend
            on the positive are Tensor[R, N], with one row for each right answer of each query, in the order of the
            columns.
    """
    rows = _Rows(scores, positives, None, also)
    if len(weights) != len(rows.scores):
        weights = rows.of(weights)
    if also is not None:
        weights = weights.masked_fill(rows.other_answers, 0.0)
    log_weights = weights.to(rows.scores.dtype).log().scatter(1, rows.column, 0.0)
    return rows.mean(F.cross_entropy(rows.scores + log_weights, rows.positives, reduction="none"))


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

    y is 1 on the positive and the softmax of `similarity / temperature` on the negatives. p is the softmax of `scores`
    over all N columns.

    Args:
        similarity: Tensor[B, N], the estimator's raw similarities.
    """
    rows = _Rows(scores, positives, negatives, also)
    labels = rows.soft_labels(similarity, temperature)
    return rows.mean(-(labels * rows.log_softmax(rows.valid)).sum(1))


def binary_cross_entropy(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Computes binary cross-entropy (Section 4.3) of p against y, averaged over queries and columns.

    y and p are defined in `weighted_info_nce`. log(1 - p) is computed from log p, which is exact for p near 0 or 1.
    """
    rows = _Rows(scores, positives, negatives, also)
    labels = rows.soft_labels(similarity, temperature)
    valid = rows.valid
    log_not_p = _log_of_the_rest(rows.scores.masked_fill(~valid, -torch.inf)).masked_fill(labels == 1, 0.0)
    entropies = -(labels * rows.log_softmax(valid) + (1 - labels) * log_not_p).masked_fill(~valid, 0.0)
    return rows.mean(entropies.sum(1) / valid.sum(1))


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
    rows = _Rows(scores, positives, negatives, also)
    divergence = rows.kl_divergence(similarity, temperature)
    return rows.mean(infonce_weight * rows.info_nce() + kl_weight * divergence)


def kl_divergence(
    scores: Tensor,
    similarity: Tensor,
    temperature: float,
    positives: Tensor | None = None,
    *,
    negatives: Tensor | None = None,
    also: Tensor | None = None,
) -> Tensor:
    """Computes the mean over queries of KL(y || p'), the divergence in `kl_regularized_info_nce`.

    A query contributes 0 if the model and the estimator agree on the distribution over its negatives, or if it has
    fewer than two negatives.
    """
    rows = _Rows(scores, positives, negatives, also)
    return rows.mean(rows.kl_divergence(similarity, temperature))


class _Rows:
    """The rows over which a loss is computed: one per query or, with `also`, one per right answer."""

    def __init__(self, scores: Tensor, positives: Tensor | None, negatives: Tensor | None, also: Tensor | None):
        if positives is None:
            positives = torch.arange(len(scores), device=scores.device)
        self.queries = None  # with `also`, the query of each row
        if also is not None:
            right = also.scatter(1, positives.unsqueeze(1), True)
            self.queries, positives = right.nonzero(as_tuple=True)
            self.shares = self.of(right.sum(1, dtype=torch.float64).reciprocal())
            self.other_answers = self.of(right).scatter(1, positives.unsqueeze(1), False)
            if negatives is None:
                negatives = ~self.other_answers
            else:
                negatives = self.of(negatives) & ~self.other_answers
        self.number = len(scores)
        self.positives = positives
        self.negatives = negatives
        self.scores = self.of(scores if scores.dtype == torch.float64 else scores.float())
        self.column = positives.unsqueeze(1)

    def of(self, values: Tensor) -> Tensor:
        """Repeats each query's value for its rows."""
        if self.queries is None:
            return values
        return values[self.queries]

    def mean(self, losses: Tensor) -> Tensor:
        """Averages the rows' losses such that every query has the same weight."""
        if self.queries is None:
            return losses.mean()
        return (losses * self.shares.to(losses.dtype)).sum() / self.number

    @functools.cached_property
    def valid(self) -> Tensor:
        """The mask of the columns in use: the positive and the valid negatives."""
        if self.negatives is None:
            return torch.ones_like(self.scores, dtype=torch.bool)
        return self.negatives.scatter(1, self.column, True)

    @functools.cached_property
    def valid_negatives(self) -> Tensor:
        """The mask of the valid negatives."""
        return self.valid.scatter(1, self.column, False)

    def log_softmax(self, columns: Tensor) -> Tensor:
        """Computes log p over the given columns. The other columns get 0."""
        return self.scores.masked_fill(~columns, -torch.inf).log_softmax(1).masked_fill(~columns, 0.0)

    def soft_labels(self, similarity: Tensor, temperature: float) -> Tensor:
        """Computes y: 1 on the positive, the softmax of `similarity / temperature` on valid negatives, 0 elsewhere."""
        logits = self.of(similarity).to(self.scores.dtype) / temperature
        shares = logits.masked_fill(~self.valid_negatives, -torch.inf).softmax(1)
        # A query without negatives has a softmax over nothing, which is NaN. Its labels are all 0.
        return shares.masked_fill(~self.valid_negatives, 0.0).scatter(1, self.column, 1.0)

    def info_nce(self) -> Tensor:
        """Computes the cross-entropy of the positive column."""
        if self.negatives is None:
            scores = self.scores
        else:
            scores = self.scores.masked_fill(~self.valid, -torch.inf)
        return F.cross_entropy(scores, self.positives, reduction="none")

    def kl_divergence(self, similarity: Tensor, temperature: float) -> Tensor:
        """Computes KL(y || p') over the negatives."""
        labels = self.soft_labels(similarity, temperature)
        only = self.valid_negatives
        return (torch.xlogy(labels, labels) - labels * self.log_softmax(only)).masked_fill(~only, 0.0).sum(1)


def _log_of_the_rest(scores: Tensor) -> Tensor:
    """Computes log(1 - p_j) as logsumexp over the other columns minus logsumexp over all columns."""
    total = scores.logsumexp(1, keepdim=True)
    # Only the largest p can round to 1; the others are at most 1/2, where log1p is exact.
    largest = scores.argmax(1, keepdim=True)
    p = (scores - total).exp().scatter(1, largest, 0.0)
    others = scores.scatter(1, largest, -torch.inf).logsumexp(1, keepdim=True)
    return torch.log1p(-p).scatter(1, largest, others - total)
