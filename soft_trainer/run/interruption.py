"""Saves checkpoints on Ctrl-C, on SIGTERM or SIGUSR1 and by time, and explains what to do after an interruption."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import torch
from transformers import TrainerCallback

from soft_trainer.errors import UserError
from soft_trainer.run.folder import best_checkpoint, has_finite_weights, newest_complete
from soft_trainer.system import distributed
from soft_trainer.system.terminal import print_on_main

ROLLING_SECONDS = 600  # between two checkpoints of a run from the command line
# Ctrl-C, what a scheduler sends, and what SLURM sends before its time limit (`#SBATCH --signal`).
STOPPING = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
SAME_INTERRUPT = 1.0  # seconds in which a launcher repeats a Ctrl-C that its processes have received already


def how_to_continue(args, step: int) -> str:
    """Returns the text to print after an interruption: the newest checkpoint, and how to resume from it.

    Args:
        args: the training arguments.
        step: the current step.
    """
    overwrite = getattr(args, "overwrite", False)
    if overwrite and step == 0:  # the checkpoints belong to an earlier run
        return "the output folder is unchanged"
    checkpoint = newest_complete(args.output_dir) if args.output_dir else None
    if checkpoint is None:
        return "no checkpoint has been written, so the next run starts from the first step"
    command = "the same command without --overwrite true" if overwrite else "the same command"
    return f"to continue from {checkpoint}, run {command}; in Python, call train(resume_from_checkpoint='last')"


@contextlib.contextmanager
def explaining_interruption(args, step: Callable[[], int]) -> Iterator[None]:
    """If the `with` block is interrupted, adds the step, the newest checkpoint and resume instructions to the error.

    Args:
        args: the training arguments.
        step: a function that returns the current step.

    Raises:
        KeyboardInterrupt: the `with` block was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        line = str(interruption)
        if not line:
            line = f"interrupted at step {step()}: {how_to_continue(args, step())}"
        raise KeyboardInterrupt(line) from None


@contextlib.contextmanager
def explaining_out_of_memory(args, chunk_size: int | None, queries: int, codes: int) -> Iterator[None]:
    """If the GPU's memory is too small for the step in the `with` block, says what the step held and what to change.

    Args:
        args: the training arguments.
        chunk_size: the value of `gradient_cache_chunk_size`.
        queries, codes: the number of texts that this process encodes in the step.

    Raises:
        UserError: the memory is too small. With `auto_find_batch_size`, the original error is raised, which
            `transformers` waits for.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if args.auto_find_batch_size:
            raise
        remedy = "a smaller per_device_train_batch_size"
        if args.deepspeed_plugin is None:
            smaller = 32 if chunk_size is None else max(chunk_size // 2, 1)
            remedy = f"gradient_cache_chunk_size={smaller}, which does not change the batch, or {remedy}"
        raise UserError(
            f"out of memory in a step of {queries:,} queries and {codes:,} functions on {args.device}: set {remedy}"
        ) from error


def _end_at_once(control) -> None:
    """Leaves out the log, the evaluation and the checkpoint of a step or an epoch."""
    control.should_log = False
    control.should_evaluate = False
    control.should_save = False


class Stopping(TrainerCallback):
    """A callback that asks for a checkpoint in addition to `save_strategy`.

    It does so after the signals in `STOPPING`, which also stop training, and in a run from the command line by time,
    so that a process that is killed loses minutes. All processes decide the same at the same step. A second Ctrl-C
    acts at once.

    Attributes:
        signal: the signal that stops training, or 0 as long as no process has received one.
    """

    PERIOD = 10  # several processes tell each other about a signal or the time every ten steps, and at the last one

    def __init__(self):
        self.signal = 0
        self._received = 0  # by this process
        self._interrupted_at = 0.0
        self._broken = False  # True if the last step made a weight NaN or infinite
        self._before: dict[int, object] = {}  # the previous handlers
        self._saved_at = time.monotonic()

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock, and installs the signal handlers if training runs in the main thread."""
        self._saved_at = time.monotonic()
        self._process = os.getpid()
        # `auto_find_batch_size` may start training several times. Only the first call stores the previous handlers. A
        # trial of a hyperparameter search cannot be resumed.
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or self._before or state.is_hyper_param_search:
            return
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a shell starts background jobs with SIGINT ignored
                self._before[number] = signal.signal(number, self._on_signal)

    def on_save(self, args, state, control, **kwargs):
        """Starts the clock again after each checkpoint."""
        self._saved_at = time.monotonic()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Asks for a checkpoint if a process has received a signal, which also stops training, or if it is time.

        If the last step breaks the weights, training ends with the best checkpoint's weights, if there is one.
        """
        last = state.global_step == state.max_steps
        if last and (best := best_checkpoint(args, state)) and not has_finite_weights(model):
            print_on_main(f"step {state.global_step} made a weight NaN or infinite, so the result is {best}")
            self._broken = True
            _end_at_once(control)
            return
        if args.world_size > 1 and state.global_step % self.PERIOD and not last:
            return
        asked = distributed.largest(self._received or int(self._late(args)))
        if asked:
            control.should_save = True
        if asked > 1:
            self.signal = asked
            control.should_training_stop = True
            args.save_total_limit = None  # with a limit of 1, `Trainer` would now keep only the best checkpoint

    def on_epoch_end(self, args, state, control, **kwargs):
        """Prevents what a run that was not interrupted would not do after a stop within an epoch."""
        if self._broken or (self.signal and not state.epoch.is_integer()):
            _end_at_once(control)

    def _late(self, args) -> bool:
        """Returns True if a run from the command line has not saved a checkpoint for ROLLING_SECONDS."""
        if not getattr(args, "from_command_line", False) or args.save_only_model or args.save_strategy == "no":
            return False
        return time.monotonic() - self._saved_at >= ROLLING_SECONDS

    def agree(self) -> bool:
        """Returns True if any process has received a signal. From now on, signals act at once."""
        self.restore()
        self.signal = self.signal or distributed.largest(self._received)
        return bool(self.signal)

    def restore(self) -> None:
        """Restores the previous signal handlers. Call this method even if training failed."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}

    def _on_signal(self, number, frame):
        if os.getpid() != self._process:  # a data worker inherits the handler but has nothing to save
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        first = self._received == 0
        self._received = max(self._received, number)
        if number != signal.SIGINT:
            return
        if first:
            self._interrupted_at = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the signal came while a line was written
                print_on_main("Ctrl-C: saving a checkpoint after this step; press it again to stop at once")
        elif time.monotonic() - self._interrupted_at > SAME_INTERRUPT:
            self.restore()
            signal.raise_signal(signal.SIGINT)
