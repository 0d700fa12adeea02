"""Saves a checkpoint on SIGTERM, and explains what to do after Ctrl-C or if the GPU's memory is too small."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import torch
from transformers import TrainerCallback

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.training.checkpoints import newest_complete


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
    command = "the same command without overwrite=true" if overwrite else "the same command"
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


class SaveOnTermination(TrainerCallback):
    """A callback that saves a checkpoint and stops training after SIGTERM. All processes stop at the same step."""

    PERIOD = 10  # several processes tell each other about a SIGTERM only every ten steps

    def __init__(self):
        self.terminated = False
        self._before = None  # the previous handler

    def on_train_begin(self, args, state, control, **kwargs):
        """Installs the SIGTERM handler if training runs in the main thread."""
        # `auto_find_batch_size` may start training several times. Only the first call stores the previous handler.
        if threading.current_thread() is threading.main_thread() and self._before is None:
            self._process = os.getpid()
            self._before = signal.signal(signal.SIGTERM, self._on_signal)

    def on_step_end(self, args, state, control, **kwargs):
        """Saves a checkpoint and stops if any process has received SIGTERM."""
        last = state.global_step >= state.max_steps
        asked = args.world_size == 1 or last or state.global_step % self.PERIOD == 0
        if asked and distributed.any_process(self.terminated):
            self.terminated = control.should_save = control.should_training_stop = True

    def restore(self) -> None:
        """Restores the previous SIGTERM handler. Call this method even if training failed."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number, frame):
        if os.getpid() == self._process:
            self.terminated = True
        else:  # a data worker inherits the handler but has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
