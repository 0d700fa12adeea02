"""Checkpoints: written whole, before older ones are deleted, and where a run that is stopped from outside goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from soft_trainer import distributed
from soft_trainer.files import mark_complete, newest_complete, reporting_disk_errors, saving_checkpoint, write_text
from soft_trainer.hub.export import export_encoder
from soft_trainer.terminal import print_on_main


def save_encoder(trainer, folder: str | Path, state_dict=None, merge: bool = False) -> None:
    """Writes encoder, tokenizer, files of sentence-transformers, profile and training arguments.

    Args:
        merge: merge an adapter into the weights.

    Raises:
        UserError: the disk is full.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    with reporting_disk_errors(folder):
        profile = trainer.encoder.replace(matryoshka_dims=trainer.plan.dims)
        export_encoder(model, trainer.processing_class, profile, folder, state_dict, merge=merge)
        settings = json.dumps(trainer.args.to_dict(), indent=2, default=str)
        write_text(Path(folder) / "training_args.json", settings + "\n")


@contextlib.contextmanager
def whole_checkpoint(trainer, run: str) -> Iterator[None]:
    """Marks the checkpoint that the body writes into the folder `run` as whole, and only then deletes older ones.

    Raises:
        UserError: the disk is full. The unfinished checkpoint is removed.
    """
    args = trainer.args
    folder = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    limit = args.save_total_limit
    args.save_total_limit = None
    try:
        with saving_checkpoint(folder):
            yield
    finally:
        args.save_total_limit = limit
    distributed.barrier()
    if args.should_save:
        with saving_checkpoint(folder):
            mark_complete(folder)
        rotate_checkpoints(run, limit, trainer.state.best_model_checkpoint, use_mtime=True)


def how_to_continue(args) -> str:
    """Names the newest complete checkpoint and the call, or the command, that continues from it.

    Args:
        args: `TrainingArguments`; those that `parse` has read are continued by a command.
    """
    from_command = hasattr(args, "given")
    checkpoint = newest_complete(args.output_dir) if args.output_dir else None
    if checkpoint is None:
        again = "the same command starts" if from_command else "trainer.train() starts"
        return f"no checkpoint has been written; {again} from the first step"
    call = 'trainer.train(resume_from_checkpoint="last")'
    again = "the same command with --resume_from_checkpoint last" if from_command else call
    return f"{checkpoint} is kept; {again} continues from it"


@contextlib.contextmanager
def explaining_interruption(trainer, in_training: bool = False) -> Iterator[None]:
    """Gives a KeyboardInterrupt the line that says what is kept and how to continue.

    Args:
        in_training: name the step too.

    Raises:
        KeyboardInterrupt: with the line.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        when = f" at step {trainer.state.global_step}" if in_training else ""
        line = str(interruption) or f"interrupted{when}: {how_to_continue(trainer.args)}"
        raise KeyboardInterrupt(line) from None


@contextlib.contextmanager
def stoppable(trainer) -> Iterator[None]:
    """Lets SIGTERM end the training in the body after a checkpoint, and Ctrl-C with a line on how to continue.

    Raises:
        SystemExit: stopped by SIGTERM, code 143.
        KeyboardInterrupt: with the line.
    """
    termination = SaveOnTermination()
    trainer.add_callback(termination)
    try:
        with explaining_interruption(trainer, in_training=True):
            yield
    finally:
        trainer.remove_callback(termination)
        if termination.before is not None:
            signal.signal(signal.SIGTERM, termination.before)
    if distributed.any_process(termination.terminated):  # also a signal after the last step
        print_on_main(f"stopped by SIGTERM at step {trainer.state.global_step}: {how_to_continue(trainer.args)}")
        raise SystemExit(143)


class SaveOnTermination(TrainerCallback):
    """On SIGTERM, finishes the step, saves a checkpoint and stops. All processes stop at the same step."""

    PERIOD = 10  # steps between two messages to the other processes

    def __init__(self):
        self.terminated = False
        self.before = None  # the handler that the training replaced

    def on_train_begin(self, args, state, control, **kwargs):
        """Handles the signal from now on, in the main thread."""
        # `auto_find_batch_size` begins a training again: the handler that comes back in the end is the first one.
        if threading.current_thread() is threading.main_thread() and self.before is None:
            self._process = os.getpid()
            self.before = signal.signal(signal.SIGTERM, self._on_signal)

    def on_step_end(self, args, state, control, **kwargs):
        """Saves and stops if a process has received the signal."""
        last = state.global_step >= state.max_steps
        asked = args.world_size == 1 or last or state.global_step % self.PERIOD == 0
        if asked and distributed.any_process(self.terminated):
            self.terminated = control.should_save = control.should_training_stop = True

    def _on_signal(self, number, frame):
        if os.getpid() == self._process:
            self.terminated = True
        else:  # a data worker: it inherited the handler and has nothing to save
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
