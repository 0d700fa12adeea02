"""A loss that is not finite stops the run, and says where; so do fp16 gradients that overflow step after step."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import TrainerCallback


class NotFiniteError(RuntimeError):
    """The loss, or the gradients of many steps in a row, became NaN or infinite."""


class FiniteGuard:
    """Looks at every loss one step late, when the device has it anyway, so that no step waits.

    Args:
        urls: the url of every training row, for the message.
    """

    def __init__(self, urls):
        self.urls = urls
        self._last_finite: tuple[int, float] | None = None
        self._pending: tuple[int, Tensor, Tensor] | None = None

    def watch(self, step: int, loss: Tensor, rows: Tensor) -> None:
        """Check the loss before this one, and take this one, a scalar, to be checked next time.

        Raises:
            NotFiniteError: the loss before this one was NaN or infinite.
        """
        self.check()
        copy = loss.detach().to("cpu", non_blocking=True) if loss.device.type != "cpu" else loss.detach().clone()
        self._pending = (step, copy, rows)

    def check(self) -> None:
        """Check the loss that is pending, waiting for it if need be."""
        if self._pending is None:
            return
        (step, loss, rows), self._pending = self._pending, None
        value = float(loss)
        if not torch.isfinite(torch.tensor(value)):
            raise NotFiniteError(self._message(step, value, rows.tolist()))
        self._last_finite = (step, value)

    def _message(self, step: int, value: float, rows: list[int]) -> str:
        before = "no step before it" if self._last_finite is None else "step {} had {:.4g}".format(*self._last_finite)
        shown = "\n  ".join(str(self.urls[row]) for row in rows)
        return (
            f"the loss of step {step} is {value} ({before}): no checkpoint is written from here on. Lower the "
            f"learning rate, or train in bf16 or float32. The rows of the batch:\n  {shown}"
        )


class OverflowCounter(TrainerCallback):
    """Counts the steps that loss scaling skipped because fp16 gradients overflowed; `MOST` in a row stop the run.

    A fused optimizer skips such a step unseen, so the scale itself is watched: it falls after an overflow and at no
    other time. It is read one step late, so that no step waits for the device.

    Args:
        scaler: the `GradScaler` of the run.
    """

    MOST = 20  # from its start at 2^16 the scale is then below 1: smaller gradients would not help

    def __init__(self, scaler):
        self.scaler, self.count = scaler, 0
        self._in_a_row, self._before, self._pending = 0, None, None

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Look at the scale that the step before this one left.

        Raises:
            NotFiniteError: `MOST` steps in a row were skipped.
        """
        if self._pending is not None:
            self._compare(float(self._pending), state.global_step)
        self._pending = self.scaler._get_scale_async().detach().to("cpu", non_blocking=True, copy=True)

    def _compare(self, scale: float, step: int) -> None:
        fell, self._before = self._before is not None and scale < self._before, scale
        self._in_a_row = self._in_a_row + 1 if fell else 0
        self.count += fell
        if self._in_a_row >= self.MOST:
            raise NotFiniteError(
                f"fp16 gradients overflowed in {self._in_a_row} steps in a row, up to step {step}, and the loss scale "
                f"fell to {scale:g}: train in bf16 (--bf16 true, --fp16 false) or float32, or lower the learning rate"
            )
