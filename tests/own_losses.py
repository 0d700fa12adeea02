"""A loss and a weighting as users write them."""

import torch


def hinge(scores, positives, *, weights, negatives, extra_positives):
    """Returns a weighted hinge on every negative, against the best relevant code; a mean over queries."""
    column = positives.unsqueeze(1)
    right = torch.zeros_like(scores, dtype=torch.bool).scatter(1, column, True)
    if extra_positives is not None:
        right = right | extra_positives
    best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
    losses = (1 + scores - best).clamp_min(0) * weights
    if negatives is not None:
        losses = losses.masked_fill(~negatives, 0)
    return losses.masked_fill(right, 0).sum(1).mean()


def info_nce(scores, positives):
    """Returns InfoNCE over all columns."""
    return torch.nn.functional.cross_entropy(scores, positives)


def halves(similarity, positives):
    """Weighs a negative by half if it is more similar than the query's positive."""
    own = similarity.gather(1, positives.unsqueeze(1))
    return torch.where(similarity > own, 0.5, 1.0)


def several(scores, positives):
    """Returns a loss for each query, which is not what a step needs."""
    return scores.sum(1)


def constant(scores, positives):
    """Returns a number that no training changes."""
    return torch.tensor(1.0)


def unknown(scores, positives, rows):
    """Reads what no step has."""
    return scores.mean()


def needs_negatives(scores, positives, negatives):
    """Fails where all negatives count."""
    return (scores * negatives).mean()


def one_weight(similarity):
    """Returns a weight for each query."""
    return similarity[:, 0]
