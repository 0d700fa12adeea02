"""Runs that are stopped from outside, by SIGTERM or Ctrl-C: what is kept, and how to continue."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from transformers import TrainerCallback

from soft_trainer import distributed
from soft_trainer.files import newest_complete
from soft_trainer.terminal import print_on_main


def how_to_continue(args) -> str:
    """Names the newest complete checkpoint and the call, or the command, that continues from it.

    Args:
        args: `TrainingArguments`; those that `parse` has read are continued by a command.
    """
    from_command, checkpoint = hasattr(args, "given"), newest_complete(args.output_dir) if args.output_dir else None
    if checkpoint is None:
        again = "the same command starts" if from_command else "trainer.train() starts"
        return f"no checkpoint has been written; {again} from the first step"
    call = 'trainer.train(resume_from_checkpoint="last")'
    again = "the same command with --resume_from_checkpoint last" if from_command else call
    return f"{checkpoint} is kept; {again} continues from it"


@contextlib.contextmanager
def explaining_interruption(args, when: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Gives a KeyboardInterrupt the line that says what is kept and how to continue.

    Args:
        args: as in `how_to_continue`.
        when: returns words for the place of the interruption, such as " at step 12".

    Raises:
        KeyboardInterrupt: with the line.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        line = str(interruption) or f"interrupted{when()}: {how_to_continue(args)}"
        raise KeyboardInterrupt(line) from None


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

    def exit_if_terminated(self, args, step: int) -> None:
        """Ends the process if the run was told to end.

        Raises:
            SystemExit: with code 143.
        """
        if self.terminated:
            print_on_main(f"stopped by SIGTERM at step {step}: {how_to_continue(args)}")
            raise SystemExit(143)

    def _on_signal(self, number, frame):
        if os.getpid() == self._process:
            self.terminated = True
        else:  # a data worker: it inherited the handler and has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
