"""How an estimator enters a run, and how a run ends when it is told to: as callbacks."""

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
from soft_trainer.estimators.base import checked_similarity
from soft_trainer.terminal import print_on_main


class SaveOnTermination(TrainerCallback):
    """On SIGTERM: finish the step, save a checkpoint, stop. All processes stop at the same step."""

    PERIOD = 10  # steps between two questions to the other processes

    def __init__(self):
        self.terminated = False
        self._before = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Take over the signal, where signals can be handled."""
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop where a process has been told to."""
        asked = args.world_size == 1 or state.global_step % self.PERIOD == 0
        if asked and distributed.any_process(self.terminated):
            self.terminated = control.should_save = control.should_training_stop = True

    def release(self) -> None:
        """Give the signal back; `SoftInfoNCETrainer.train` does so however the run ends."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _on_signal(self, number, frame):
        if os.getpid() == self._process:
            self.terminated = True
        else:  # a data worker, which has the handler from its parent and nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class EstimatorCallback(TrainerCallback):
    """Fits an estimator before training and answers for the similarities of a step.

    `SoftInfoNCETrainer` finds it among its callbacks and binds it. A subclass may refit or reschedule the estimator
    later, in any event of a callback; where data workers compute similarities ahead (`Estimator.in_workers`), they
    see the change from the next epoch on.

    Args:
        estimator: an object with `fit(dataset)` and `similarity(query_rows, code_rows)`.

    `histogram` holds how the negatives' weights of the last logged step were distributed, None before one: `edges`
    and, one fewer, `counts`.
    """

    BINS = 40

    def __init__(self, estimator):
        self.estimator = estimator
        self.histogram: dict[str, list] | None = None
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
        print_on_main(f"{name} fitted on {len(self._dataset):,} rows in {time.perf_counter() - start:.1f} s")

    def similarity(self, query_rows, code_rows) -> Tensor:
        """Raw similarities, Tensor[Q, C], under `no_grad`, checked; the estimator gets LongTensors on the CPU."""
        rows = (torch.as_tensor(numbers, dtype=torch.long, device="cpu") for numbers in (query_rows, code_rows))
        return checked_similarity(self.estimator, *rows)

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
