"""Defines the callback that fits an estimator before training and logs statistics of the weights."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import TrainerCallback

from soft_trainer.criterion import Targets
from soft_trainer.data.split import Split
from soft_trainer.encoders.encoding import where_float64_exists
from soft_trainer.errors import UserError
from soft_trainer.system.terminal import print_on_main


class EstimatorCallback(TrainerCallback):
    """A callback that supplies an estimator to the trainer, fits it before training, and logs the weights.

    `SoftInfoNCETrainer` looks for this callback and calls `fit`. A subclass may fit the estimator again later, in any
    callback event. Data workers (`Estimator.in_workers`) use the new estimator from the next epoch on.

    Args:
        estimator: an object with `fit(split)` and `similarity(query_rows, code_rows)`.
        by_default: True if the user did not choose this estimator, so that `Trainer.add_callback` may replace it.
    """

    def __init__(self, estimator, by_default: bool = False):
        self.estimator = estimator
        self.by_default = by_default
        self._last: dict | None = None

    def fit(self, split: Split) -> None:
        """Fits the estimator on the training split, and prints how long that took."""
        start = time.perf_counter()
        name = type(self.estimator).__name__
        try:
            self.estimator.fit(split)
        except (KeyError, ValueError) as error:  # `datasets` raises these for a missing column
            for new, old in split.called.items():
                if repr(old) in str(error):
                    raise UserError(f"{name}: the column {old!r} is called {new!r} in the split") from error
            raise
        print_on_main(f"{name} fitted on {len(split.queries):,} rows in {time.perf_counter() - start:.1f} s")

    def observe(self, targets: Targets, scores: Tensor, floor: float) -> None:
        """Stores a step's targets and scores, Tensor[B, N], for `statistics`. Does not wait for the device."""
        self._last = {"targets": targets, "scores": scores.detach(), "floor": floor}

    def statistics(self) -> dict[str, float]:
        """Computes statistics of the negatives' weights and scores in the last observed step, for the log.

        Returns:
            The mean and the minimum of the weights, and the fractions of weights at the floor and below one half.
            `weight_entropy` is the entropy of a query's weights divided by the entropy of equal weights.
            `score_margin` is the positive's score minus the hardest negative's score. Both are means over queries.
        """
        if self._last is None:
            return {}
        step = self._last
        self._last = None
        targets = step["targets"]
        scores, weights, positives = map(where_float64_exists, (step["scores"], targets.weights, targets.positives))
        column = positives.unsqueeze(1)
        # A masked column has weight 0 and is not a negative.
        weights = weights.double().scatter(1, column, 0.0)
        valid = weights[weights > 0]
        number = (weights > 0).sum(1)
        if not len(valid):
            return {}
        shares = weights / weights.sum(1, keepdim=True).clamp_min(1e-12)
        entropy = torch.special.entr(shares).sum(1) / number.double().log().clamp_min(1e-12)
        hardest = scores.masked_fill(weights == 0, -torch.inf).amax(1)
        margins = (scores.gather(1, column).squeeze(1) - hardest)[number > 0]
        return {
            "weight_mean": float(valid.mean()),
            "weight_min": float(valid.min()),
            "weight_at_floor": float((valid.float() <= step["floor"]).double().mean()),
            "weight_below_half": float((valid < 0.5).double().mean()),
            "weight_entropy": float(entropy[number > 1].mean()) if bool((number > 1).any()) else 1.0,
            "score_margin": float(margins.mean()),
        }


def with_estimators(callbacks) -> list:
    """Wraps each estimator among a trainer's callbacks in an `EstimatorCallback`. Other callbacks stay unchanged.

    Raises:
        UserError: a callback is a string.
    """
    wrapped = []
    for callback in callbacks or ():
        if callable(getattr(callback, "similarity", None)) and callable(getattr(callback, "fit", None)):
            callback = EstimatorCallback(callback)
        if isinstance(callback, str):
            raise UserError(
                f"callbacks: expected an estimator, such as BM25Estimator(), or a callback, not {callback!r}"
            )
        wrapped.append(callback)
    return wrapped


def find_estimator_callback(callbacks) -> EstimatorCallback | None:
    """Returns the `EstimatorCallback` among a trainer's callbacks, or None.

    Raises:
        UserError: more than one callback has an estimator.
    """
    chosen = [callback for callback in callbacks or () if isinstance(callback, EstimatorCallback)]
    if len(chosen) > 1:
        raise UserError(f"callbacks: only one estimator is allowed, not {len(chosen)}")
    return next(iter(chosen), None)
