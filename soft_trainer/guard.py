"""A loss that is not finite stops the run, and says where."""

from __future__ import annotations

import torch
from torch import Tensor


class NotFiniteError(RuntimeError):
    """The loss became NaN or infinite."""


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
