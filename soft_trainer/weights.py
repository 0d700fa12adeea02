"""Turns an estimator's similarities into the negatives' weights w_ij, and cancels likely false negatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def negative_weights(
    similarity: Tensor,
    alpha: float,
    beta: float,
    temperature: float,
    floor: float = 0.1,
    positives: Tensor | None = None,
    negatives: Tensor | None = None,
) -> Tensor:
    """Computes the weights of Soft-InfoNCE (Eq. 4). The more similar a negative, the smaller its weight.

    sim_ij is the softmax of `similarity / temperature` over a query's n negatives. The weights w_ij = (beta - alpha
    sim_ij) / (beta - alpha / n) sum to n. They are then clamped from below at `floor` (Appendix C.2), so their sum is
    at least n.

    Eq. 4 divides by zero or changes sign for a query with n <= alpha / beta negatives. Such a query gets weights of 1,
    which is plain InfoNCE. `smallest_batch` returns the smallest batch size at which Eq. 4 applies.

    Args:
        similarity: Tensor[B, N], raw similarities; larger means more similar.
        alpha: at least 0.
        beta: above 0.
        temperature: above 0.
        floor: from 0 to 1.
        positives: LongTensor[B], the column of each query's positive. By default, `arange(B)`.
        negatives: BoolTensor[B, N], True where a column is a negative. By default, all columns but the positive.

    Returns:
        Tensor[B, N] in float32 or higher: 1 on the positive, 0 on columns that are not negatives.

    Raises:
        ValueError: a setting is out of range.
    """
    _check(
        ("alpha", alpha, "0 or more", alpha >= 0),
        ("beta", beta, "above 0", beta > 0),
        ("temperature", temperature, "above 0", temperature > 0),
        ("floor", floor, "from 0 to 1", 0 <= floor <= 1),
    )
    if similarity.dtype != torch.float64:
        similarity = similarity.float()
    negatives, column = _negatives(similarity, positives, negatives)
    number = negatives.sum(1, keepdim=True, dtype=similarity.dtype)
    enough = number >= smallest_batch(alpha, beta) - 1
    sim = (similarity / temperature).masked_fill(~negatives, -torch.inf).softmax(1)
    weights = (beta - alpha * sim) / (beta - alpha / number)
    weights = torch.where(enough, weights.clamp_min(floor), 1.0)
    return weights.masked_fill(~negatives, 0.0).scatter(1, column, 1.0)


def positive_aware_weights(
    similarity: Tensor,
    margin: float,
    temperature: float,
    positives: Tensor | None = None,
    negatives: Tensor | None = None,
) -> Tensor:
    """Computes weights from the difference in similarity between the query's positive and each negative.

    w_ij = min(1, 2 sigmoid((s_i,pos - margin - s_ij) / temperature)). A negative that is less similar than the
    positive by at least `margin` has weight 1. The weight falls towards 0 as the negative becomes more similar. At
    temperature 0, the weight is 0 if s_ij > s_i,pos - margin, otherwise 1.

    Args:
        similarity: Tensor[B, N], raw similarities without gradient; larger means more similar.
        margin: in units of `similarity`. If it is below 0, a negative that is slightly more similar than the positive
            still has weight 1.
        temperature: at least 0, in units of `similarity`.
        positives, negatives: see `negative_weights`.

    Returns:
        Tensor[B, N], as in `negative_weights`.

    Raises:
        ValueError: the margin is not finite, or the temperature is below 0.
    """
    _check(("margin", margin, "a finite number", True), ("temperature", temperature, "0 or more", temperature >= 0))
    if similarity.dtype != torch.float64:
        similarity = similarity.float()
    negatives, column = _negatives(similarity, positives, negatives)
    positive = similarity.gather(1, column)
    # Equal similarities may both be -inf, the logarithm of 0; their difference must still be 0.
    lead = torch.where(similarity == positive, 0.0, positive - similarity) - margin
    if temperature < torch.finfo(similarity.dtype).tiny:
        weights = (lead >= 0).to(similarity.dtype)
    else:
        weights = (2 * torch.sigmoid(lead / temperature)).clamp_max(1)
    return weights.masked_fill(~negatives, 0.0).scatter(1, column, 1.0)


def smallest_batch(alpha: float, beta: float) -> int:
    """Returns the smallest batch size N that Eq. 4 supports: N - 1 negatives must satisfy beta > alpha / (N - 1)."""
    # The tolerance is for settings such as 1.2 / 0.4, which is just below 3 in floating point.
    return max(2, math.floor(alpha / beta * (1 + 1e-9)) + 2)


def cancel_top_k(similarity: Tensor, k: int, positives: Tensor | None = None) -> Tensor:
    """Cancels the k negatives most similar to each query, because they are likely false negatives (Section 4.4).

    Exactly k are cancelled. Of tied columns, the first are cancelled.

    Returns:
        BoolTensor[B, N], True on the negatives that are kept. The positive is False, because it is not a negative.
    """
    if k < 0:
        raise ValueError(f"k={k}: must be 0 or more")
    negatives, _ = _negatives(similarity, positives, None)
    ranked = similarity.masked_fill(~negatives, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return negatives.scatter(1, ranked[:, :k], False)


def cancel_above_ratio(similarity: Tensor, ratio: float, positives: Tensor | None = None) -> Tensor:
    """Cancels negatives that are too similar to the query, relative to the query's positive (Section 4.4).

    A negative is cancelled if its similarity exceeds `ratio` times s, the similarity of the query's positive. If s is
    below 0, the threshold is s - (1 - ratio) abs(s).

    Returns:
        BoolTensor[B, N], True on the negatives that are kept. The positive is False, because it is not a negative.
    """
    negatives, column = _negatives(similarity, positives, None)
    positive = similarity.gather(1, column)
    return negatives & ~(similarity > positive - (1 - ratio) * positive.abs())


def _check(*settings: tuple[str, float, str, bool]) -> None:
    """Raises ValueError if any setting is out of range. A setting is (name, value, range in words, is in range)."""
    for name, value, allowed, fits in settings:
        if not (fits and math.isfinite(value)):
            raise ValueError(f"{name}={value:g}: must be {allowed}")


def _negatives(similarity: Tensor, positives: Tensor | None, negatives: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fills in defaults. Returns the negatives, BoolTensor[B, N], and the positives' columns, LongTensor[B, 1]."""
    if positives is None:
        positives = torch.arange(len(similarity), device=similarity.device)
    column = positives.unsqueeze(1)
    if negatives is None:
        negatives = torch.ones_like(similarity, dtype=torch.bool)
    return negatives.scatter(1, column, False), column
