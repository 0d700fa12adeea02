"""Losses and weightings like a user's, some of them wrong."""

import torch


def hinge(scores, positives, *, weights, negatives, extra_positives):
    """Computes a weighted hinge loss of every negative against the best relevant code, averaged over queries."""
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
    """Computes InfoNCE over all columns."""
    return torch.nn.functional.cross_entropy(scores, positives)


def halves(similarity, positives):
    """Returns weights: one half for a negative more similar than the query's positive, otherwise 1."""
    own = similarity.gather(1, positives.unsqueeze(1))
    return torch.where(similarity > own, 0.5, 1.0)


def several(scores, positives):
    """Returns a loss for each query instead of the mean."""
    return scores.sum(1)


def total(scores, positives):
    """Returns a sum over the queries instead of the mean."""
    return torch.nn.functional.cross_entropy(scores, positives, reduction="sum")


def in_both_directions(scores, positives):
    """Returns the symmetric loss of CLIP, whose second half compares each function with all queries."""
    queries = torch.arange(len(scores))
    return (info_nce(scores, positives) + info_nce(scores[:, positives].T, queries)) / 2


def with_a_balance(scores, positives):
    """Adds a term over the queries: how unequally they use the functions."""
    return info_nce(scores, positives) + scores.softmax(1).mean(0).var()


def uniform(scores, positives):
    """Adds a term over the queries, of each function's scores."""
    return info_nce(scores, positives) + scores.logsumexp(0).mul(0.1).mean()


def sum_of_scores(scores):
    """Returns a sum that is 0 for a batch whose scores cancel."""
    return scores.sum()


def symmetric_total(scores, positives):
    """Returns the symmetric loss of CLIP as a sum over the queries."""
    return in_both_directions(scores, positives) * len(scores)


def over_the_batch_size(scores, positives):
    """Returns a mean that is divided by the number of queries again."""
    return info_nce(scores, positives) / len(scores)


def constant(scores, positives):
    """Returns a constant, which has no gradient."""
    return torch.tensor(1.0)


def unknown(scores, positives, rows):
    """Has an argument that the trainer does not provide."""
    return scores.mean()


def needs_negatives(scores, positives, negatives):
    """Fails if `negatives` is None."""
    return (scores * negatives).mean()


def one_weight(similarity):
    """Returns one weight for each query instead of one for each pair."""
    return similarity[:, 0]


class Plain:
    """An estimator that cannot find similar rows."""

    def fit(self, split):
        pass

    def similarity(self, query_rows, code_rows):
        return torch.zeros(len(query_rows), len(code_rows))
