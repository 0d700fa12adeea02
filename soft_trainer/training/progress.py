"""The progress of a training where no terminal shows a bar: plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from soft_trainer.terminal import LINE_SECONDS, duration, print_on_main, shows_bars

SPEED = ("_runtime", "_per_second", "_pool_size")  # endings of metrics that say nothing about the model


def use_lines(trainer, loss: Callable[[], float | None] = lambda: None) -> None:
    """Replaces the progress bar of a `Trainer` by lines, unless a terminal shows bars and `disable_tqdm` is off.

    Args:
        loss: returns the mean loss since its last call, or None; then the lines show the loss that was logged last.
    """
    if trainer.args.disable_tqdm or not shows_bars():
        for bar in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(bar)
        trainer.add_callback(ProgressLines(loss))


class ProgressLines(TrainerCallback):
    """Prints step, loss, speed and time left, at most every ten seconds, and the metrics of each evaluation."""

    def __init__(self, loss: Callable[[], float | None]):
        self._loss, self._logged = loss, None

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock."""
        self._start, self._first_step = time.monotonic(), state.global_step
        self._next_line = self._start + LINE_SECONDS

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Keeps the loss."""
        self._logged = (logs or {}).get("loss", self._logged)

    def on_step_end(self, args, state, control, **kwargs):
        """Prints a line if ten seconds have passed."""
        if time.monotonic() >= self._next_line and state.global_step < state.max_steps:
            left = self._seconds_a_step(state) * (state.max_steps - state.global_step)
            self._print(state, f"{duration(left)} left")
            self._next_line = time.monotonic() + LINE_SECONDS

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Prints the metrics: MRR alone if there is one."""
        shown = {name: value for name, value in (metrics or {}).items() if not name.endswith(SPEED)}
        shown = {name: value for name, value in shown.items() if name.endswith("_mrr")} or shown
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, float))
        place = f"step {state.global_step:,} of {state.max_steps:,}: " if state.max_steps else ""
        print_on_main(f"{place}{numbers}")

    def on_train_end(self, args, state, control, **kwargs):
        """Prints the last line."""
        self._print(state, f"trained in {duration(time.monotonic() - self._start)}")

    def _seconds_a_step(self, state) -> float:
        return (time.monotonic() - self._start) / max(state.global_step - self._first_step, 1)

    def _print(self, state, end: str) -> None:
        mean = self._loss()
        loss = self._logged if mean is None else mean
        seconds = self._seconds_a_step(state)
        words = [] if loss is None else [f"loss {loss:.4g}"]
        words += [f"{1 / seconds:.3g} steps/s" if seconds < 1 else f"{seconds:.3g} s a step", end]
        print_on_main(f"step {state.global_step:,} of {state.max_steps:,}: {', '.join(words)}")
