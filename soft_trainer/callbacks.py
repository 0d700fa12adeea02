"""How an estimator enters a run: as a callback."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import TrainerCallback

from soft_trainer.console import say
from soft_trainer.estimators.base import checked_similarity


class EstimatorCallback(TrainerCallback):
    """Fits an estimator before training and answers for the similarities of a step.

    `SoftInfoNCETrainer` finds it among its callbacks and binds it. A subclass may refit or reschedule the estimator
    later, in any event of a callback; where data workers compute similarities ahead (`Estimator.in_workers`), they
    see the change from the next epoch on.

    Args:
        estimator: an object with `fit(dataset)` and `similarity(query_rows, code_rows)`.
    """

    def __init__(self, estimator):
        self.estimator = estimator
        self._dataset = None
        self._last: tuple[Tensor, float] | None = None

    def bind(self, dataset) -> None:
        """Take the training rows that the estimator is fitted on, numbered by their position."""
        self._dataset = dataset

    def on_train_begin(self, args, state, control, **kwargs):
        """Fit the estimator on the training rows."""
        start = time.perf_counter()
        self.estimator.fit(self._dataset)
        name = type(self.estimator).__name__
        say(f"{name} fitted on {len(self._dataset):,} rows in {time.perf_counter() - start:.1f} s")

    def similarity(self, query_rows, code_rows) -> Tensor:
        """Raw similarities, Tensor[Q, C], under `no_grad`, checked for shape."""
        return checked_similarity(self.estimator, query_rows, code_rows)

    def observe(self, weights: Tensor, floor: float) -> None:
        """Remember the weights Tensor[B, N] of the step at hand, for the log. No arithmetic, no wait."""
        self._last = (weights, floor)

    def statistics(self) -> dict[str, float]:
        """Mean, minimum and share at the floor of the negatives' weights of the last step observed."""
        if self._last is None:
            return {}
        (weights, floor), self._last = self._last, None
        # A positive has weight 1 and what is left out has weight 0: neither is a negative that counts.
        counted = weights[weights > 0]
        negatives = counted.numel() - len(weights)
        if negatives <= 0:
            return {}
        return {
            "weight_mean": float((counted.sum() - len(weights)) / negatives),
            "weight_min": float(counted.min()),
            "weight_at_floor": float(torch.count_nonzero(counted <= floor) / negatives),
        }
