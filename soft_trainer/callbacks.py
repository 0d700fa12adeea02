"""Callbacks: one fits an estimator and logs its weights, one saves a checkpoint when the run is told to end."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.terminal import print_on_main
from soft_trainer.weights import checked_similarity


class SaveOnTermination(TrainerCallback):
    """On SIGTERM, finishes the step, saves a checkpoint and stops. All processes stop at the same step."""

    PERIOD = 10  # steps between two messages to the other processes

    def __init__(self):
        self.terminated = False
        self._before = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Handles the signal from now on, in the main thread."""
        # `auto_find_batch_size` begins a training again: the handler that comes back in the end is the first one.
        if threading.current_thread() is threading.main_thread() and self._before is None:
            self._process = os.getpid()
            self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def on_step_end(self, args, state, control, **kwargs):
        """Saves and stops if a process has received the signal."""
        asked = args.world_size == 1 or state.global_step % self.PERIOD == 0
        if asked and distributed.any_process(self.terminated):
            self.terminated = control.should_save = control.should_training_stop = True

    def release(self) -> None:
        """Restores the earlier handler; `SoftInfoNCETrainer.train` calls it however the run ends."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def exit_if_terminated(self, step: int) -> None:
        """Ends the process if the run was told to end.

        Raises:
            SystemExit: with code 143.
        """
        if self.terminated:
            print_on_main(f"stopped by SIGTERM at step {step}: --resume_from_checkpoint last continues from there")
            raise SystemExit(143)

    def _on_signal(self, number, frame):
        if os.getpid() == self._process:
            self.terminated = True
        else:  # a data worker: it inherited the handler and has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class EstimatorCallback(TrainerCallback):
    """Fits the estimator of the weights before training, and logs statistics of the weights.

    `SoftInfoNCETrainer` finds it among its callbacks and binds it. A subclass may refit or reschedule the estimator
    later, in any event of a callback. Data workers (`Estimator.in_workers`) see the change from the next epoch on.

    Args:
        estimator: an object with `fit(dataset)` and `similarity(query_rows, code_rows)`.

    Attributes:
        histogram: the distribution of the negatives' weights in the last logged step, `edges` and `counts` (one
            fewer); None before the first.
    """

    BINS = 40

    def __init__(self, estimator):
        self.estimator = estimator
        self.histogram: dict[str, list] | None = None
        self._dataset = None
        self._last: tuple[Tensor, float] | None = None

    def bind(self, dataset) -> None:
        """Takes the training rows that the estimator is fitted on. A row's number is its position."""
        self._dataset = dataset

    def on_train_begin(self, args, state, control, **kwargs):
        """Fits the estimator on the training rows."""
        start = time.perf_counter()
        self.estimator.fit(self._dataset)
        name = type(self.estimator).__name__
        print_on_main(f"{name} fitted on {len(self._dataset):,} rows in {time.perf_counter() - start:.1f} s")

    def similarity(self, query_rows, code_rows) -> Tensor:
        """The estimator's raw similarities of rows, Tensor[Q, C], checked."""
        return checked_similarity(self.estimator, torch.as_tensor(query_rows), torch.as_tensor(code_rows))

    def observe(self, weights: Tensor, floor: float) -> None:
        """Remembers the weights Tensor[B, N] of a step for the log, without a wait for the device."""
        self._last = (weights, floor)

    def statistics(self) -> dict[str, float]:
        """Mean, minimum and share at the floor of the negatives' weights in the last observed step."""
        if self._last is None:
            return {}
        (weights, floor), self._last = self._last, None
        # A positive has weight 1 and a column that is left out has weight 0: neither is a negative.
        counted = weights[weights > 0]
        negatives = counted.numel() - len(weights)
        if negatives <= 0:
            return {}
        self.histogram = self._histogram(counted, len(weights))
        return {
            "weight_mean": float((counted.sum() - len(weights)) / negatives),
            "weight_min": float(counted.min()),
            "weight_at_floor": float(torch.count_nonzero(counted <= floor) / negatives),
        }

    def _histogram(self, counted: Tensor, positives: int) -> dict[str, list]:
        """Equal bins from 0 to the largest weight, without the positives, whose weight is 1."""
        counts, edges = np.histogram(counted.double().numpy(force=True), self.BINS, (0.0, float(counted.max())))
        counts[np.histogram([1.0], edges)[0].argmax()] -= positives
        return {"edges": [round(edge, 6) for edge in edges.tolist()], "counts": counts.tolist()}


def the_estimator_callback(callbacks) -> EstimatorCallback | None:
    """The `EstimatorCallback` among the callbacks of a trainer, None without one.

    Raises:
        UserError: there are several.
    """
    chosen = [callback for callback in callbacks or () if isinstance(callback, EstimatorCallback)]
    if len(chosen) > 1:
        raise UserError("callbacks: one EstimatorCallback is expected; MixtureEstimator joins several estimators")
    return chosen[0] if chosen else None
