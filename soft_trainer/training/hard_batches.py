"""Hard batches before training: codes that are similar to a query and probably wrong, and batches of similar pairs."""

from __future__ import annotations

import functools

import numpy as np
import torch
from scipy import sparse

from soft_trainer.data.judgments import RightAnswers, Split
from soft_trainer.data.negatives import below_ratio
from soft_trainer.data.neighbours import EXACT_ROWS, LeftOut, Neighbours, cached_neighbours, exact_neighbours
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.weights import checked_similarity

CANDIDATES = 64  # similar codes that are looked at for each query
PROGRESS = "Finding neighbours"


def similar_codes(estimator, split: Split, answers: RightAnswers, number: int, ratio: float) -> sparse.csr_matrix:
    """Returns the codes that an estimator finds most similar to each query, without right answers, csr[Q, C].

    Args:
        estimator: fitted on `split`.
        number: negatives of a query that will be drawn.
        ratio: see `below_ratio`.

    Raises:
        UserError: too many codes for an estimator that compares all pairs, or none scores below the ratio.
    """
    left_out = LeftOut(split.judgments.first_codes(), answers)
    count = max(CANDIDATES, number)
    if isinstance(estimator, Estimator) and estimator.finds_neighbours:
        neighbours = estimator.neighbours(count, left_out, progress=PROGRESS)
    else:
        neighbours = _by_similarity(estimator, split, count, left_out)
    return below_ratio(neighbours, ratio, answers.code_texts)


def _by_similarity(estimator, split: Split, count: int, left_out: LeftOut) -> Neighbours:
    """Finds neighbours by comparing all pairs, for an estimator that only has `similarity`."""
    codes = len(split.corpus)
    if codes > EXACT_ROWS:
        raise UserError(
            f"{type(estimator).__name__} finds negatives by comparing all pairs, which is too slow for {codes:,} "
            f"codes (at most {EXACT_ROWS:,}); use bm25, simcse, trained_model or initial_model"
        )
    everything = torch.arange(codes)

    def score(block: np.ndarray) -> torch.Tensor:
        return checked_similarity(estimator, torch.from_numpy(block), everything).clone()  # it may keep the tensor

    queries = np.arange(len(split.queries))
    find = functools.partial(exact_neighbours, score, queries, codes, count, left_out, PROGRESS)
    return cached_neighbours(None, [], count, find)


def similar_pairs(estimator: Estimator, split: Split, group_size: int, neighbours: int) -> dict[str, object]:
    """Returns the arguments of `similar_batches`, except those of the sampler."""
    count = max(neighbours, group_size)
    pairs = split.judgments.pairs()
    left_out = LeftOut(split.judgments.first_codes())
    nearest = estimator.neighbours(count, left_out, np.unique(pairs[:, 1]), PROGRESS)
    return {"pairs": pairs, "neighbours": nearest.rows, "group_size": group_size}
