"""Defines estimators that know the similarity of a query's positive and hard negatives alone: scores of the rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator, Rows, as_array, check_fitted
from soft_trainer.terminal import print_on_main


class ScoresEstimator(Estimator):
    """Takes similarities from the scores that came with the rows, such as a column `scores` from a reranker.

    The similarity of all other pairs is unknown (`partial`). The default settings fit cosine similarities.

    Args:
        cache_dir: not used, because there is nothing to compute.
    """

    alpha = 1.3
    beta = 0.7
    temperature = 0.25
    positive_temperature = 0.05
    distill_temperature = 0.05
    partial = True
    in_workers = True

    def __init__(self, cache_dir=None):
        self.cache_dir = cache_dir

    def check(self, split: Split) -> None:
        """Raises UserError if the rows have no scores of hard negatives."""
        scores = split.judgments.negatives
        if scores is None or np.isnan(scores.data).all():
            raise UserError(
                "estimator=scores: the rows have no scores of hard negatives; add a column 'scores' with the score of "
                "the positive and then of each negative"
            )

    def fit(self, split: Split) -> None:
        """Collects the scores of the rows."""
        self.check(split)
        self._scores = split.judgments.scores()
        judgments = split.judgments
        positives = 0
        if judgments.positive_scores is not None:
            positives = int((~np.isnan(judgments.positive_scores.data)).sum())
        print_on_main(f"scores: of {positives:,} positives and {self._scores.nnz - positives:,} hard negatives")

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Returns the scores of C functions for Q queries, Tensor[Q, C] in float32. Unknown scores are NaN."""
        check_fitted(self, "_scores")
        known = self._scores[as_array(query_rows)][:, as_array(code_rows)].tocoo()
        similarity = np.full(known.shape, np.nan, dtype=np.float32)
        similarity[known.row, known.col] = known.data
        return torch.from_numpy(similarity)
