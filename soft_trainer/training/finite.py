"""Stops training if the loss or the gradient is NaN or infinite, or if fp16 gradients overflow in too many steps."""

from __future__ import annotations

import math

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from soft_trainer.data.column_names import QUERY_COLUMNS, TEXT_ID
from soft_trainer.terminal import shortened


class NotFiniteError(RuntimeError):
    """The loss or the gradient is NaN or infinite, or fp16 gradients overflowed in too many consecutive steps."""


class DelayedNumber:
    """Copies a scalar tensor to the CPU asynchronously, so that it can be read one step later without waiting."""

    def __init__(self, scalar: Tensor):
        self._event = None
        self._copy = scalar.detach().to("cpu", non_blocking=True, copy=True)
        if scalar.device.type != "cpu":
            self._event = torch.Event(scalar.device)
            self._event.record()

    def __float__(self) -> float:
        if self._event is not None:
            self._event.synchronize()  # waits until the copy is complete
        return float(self._copy)


class FiniteGuard:
    """Checks that every loss and gradient is finite. Each check runs one step late, so no step waits for the device.

    Args:
        rows: the training rows. The error message lists the rows of the batch with their urls or queries.
    """

    def __init__(self, rows: Dataset):
        self.rows = rows
        self._last_finite: tuple[int, float] | None = None
        self._pending: tuple[int, DelayedNumber, np.ndarray] | None = None
        self._pending_norm: tuple[int, DelayedNumber] | None = None
        self._rows_of_step: tuple[int, list[np.ndarray]] = (0, [])  # with accumulation, the rows of several batches

    def watch(self, step: int, loss: Tensor, rows: np.ndarray) -> None:
        """Checks the previous batch's loss and gradient, and stores this batch's loss for the next check.

        Args:
            step: the number of this step.
            loss: the loss, a scalar.
            rows: int64[B], the indices of the batch's rows, for the error message.

        Raises:
            NotFiniteError: the previous loss or gradient is NaN or infinite.
        """
        self.check()
        self._pending = (step, DelayedNumber(loss), rows)
        if step != self._rows_of_step[0]:
            self._rows_of_step = (step, [])
        self._rows_of_step[1].append(rows)

    def watch_gradient(self, step: int, norm: Tensor | float | None) -> None:
        """Stores the norm of a step's gradient, or None if it is unknown, for the next check."""
        if norm is not None:
            self._pending_norm = (step, DelayedNumber(torch.as_tensor(norm)))

    def check(self) -> None:
        """Checks the stored loss and gradient now, and waits for the device if necessary.

        Raises:
            NotFiniteError: one of them is NaN or infinite.
        """
        if self._pending is not None:
            step, loss, rows = self._pending
            self._pending = None
            value = float(loss)
            if not math.isfinite(value):
                before = "no earlier step"
                if self._last_finite is not None:
                    before = "step {} had {:.4g}".format(*self._last_finite)
                raise NotFiniteError(self._message(f"loss of step {step} is {value} ({before})", rows.tolist()))
            self._last_finite = (step, value)
        if self._pending_norm is not None:
            step, norm = self._pending_norm
            self._pending_norm = None
            value = float(norm)
            if not math.isfinite(value):
                rows = np.concatenate(self._rows_of_step[1])
                raise NotFiniteError(self._message(f"gradient of step {step} has the norm {value}", rows.tolist()))

    def _message(self, what: str, rows: list[int]) -> str:
        listed = "\n  ".join(f"row {row + 1} of train_dataset: {self._described(row)}" for row in rows)
        return (
            f"the {what}, so training stops without another checkpoint. Lower the "
            f"learning rate, or train in bf16 or float32. The rows of the batch:\n  {listed}"
        )

    def _described(self, row: int) -> str:
        """Returns what a user can search for in a file of rows: a row's url or, if that is a hash, its query."""
        values = self.rows[row]
        if values.get("url") and not values["url"].startswith(TEXT_ID):
            return values["url"]
        for name in QUERY_COLUMNS:
            if values.get(name):
                text = values[name]
                return shortened(text if isinstance(text, str) else " ".join(text))
        return ""


class OverflowCounter(TrainerCallback):
    """A callback that counts the steps skipped because of fp16 overflows, and stops training after too many in a row.

    A fused optimizer does not report skipped steps, so this callback watches the loss scale, which falls only after an
    overflow. The scale is read one step late, so that no step waits for the device.

    Args:
        scaler: returns the `GradScaler`. Each trial of a hyperparameter search creates a new one.
    """

    MOST = 20  # after this many skipped steps in a row, the scale is below 1 (from 2^16), which no longer helps

    def __init__(self, scaler):
        self._scaler = scaler
        self.count = 0
        self._in_a_row = 0
        self._before = -math.inf
        self._pending = None

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Checks whether the scale fell after the previous step.

        Raises:
            NotFiniteError: `MOST` consecutive steps were skipped.
        """
        if self._pending is not None:
            scale = float(self._pending)
            if scale < self._before:
                self._in_a_row += 1
                self.count += 1
            else:
                self._in_a_row = 0
            self._before = scale
        if self._in_a_row >= self.MOST:
            steps = f"{self._in_a_row} steps in a row, up to step {state.global_step}"
            raise NotFiniteError(
                f"fp16 gradients overflowed in {steps}, and the loss scale fell to {scale:g}. Train in bf16 "
                "(bf16=True, fp16=False) or float32, or lower the learning rate"
            )
        self._pending = DelayedNumber(self._scaler()._get_scale_async())
