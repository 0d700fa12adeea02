"""The folder that a run writes to: whether the run starts, continues or is done, its checkpoints, what it replaces.

A run from the shell does not repeat a finished run, and continues an interrupted one. It refuses a folder with any
other file that it would overwrite, unless `overwrite` is set. A trainer in Python overwrites, as `transformers` does.
A run from the shell writes what it depends on to `run.json` before its first step, and its results at its end. A
checkpoint is complete once it has a `complete.json`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from soft_trainer.errors import UserError
from soft_trainer.run.fingerprint import change_of_length, changes
from soft_trainer.system import distributed
from soft_trainer.system.files import (
    CHECKPOINTS,
    DEPENDS_ON,
    RECORD,
    RECORD_FORMAT,
    RESULT_FILES,
    TRAINING_FILES,
    UNMERGED,
    WEIGHT_FILES,
    check_free,
    files_matching,
    is_finished,
    keep_edited_card,
    lock_file,
    read_json,
    reporting_disk_errors,
    write_json,
)
from soft_trainer.system.fingerprints import plain_settings
from soft_trainer.system.terminal import print_on_main

MARKER = "complete.json"
NEW, STOPPED, DONE, OTHER = "new", "stopped", "done", "other"
NO, NEWEST = ("none", "false", "no"), ("true", "last", "yes")  # values of `resume_from_checkpoint`


# ---- The run in a folder ----


class State(NamedTuple):
    """The contents of an output folder before a run starts: nothing, the same run, or another run.

    Args:
        name: NEW (no file that the run would overwrite), STOPPED (the same run, interrupted or shorter), DONE (the
            same run, finished), or OTHER (another run or other files).
        checkpoint: for STOPPED, the checkpoint to continue from.
        why: for OTHER, what the folder contains.
    """

    name: str
    checkpoint: str | None = None
    why: str = ""


def state_of(folder: str | Path, fingerprint: Mapping) -> State:
    """Compares the run in an output folder with the current run, whose fingerprint is `fingerprint`.

    A run that is to train for longer continues.
    """
    folder = Path(folder)
    record = record_of(folder)
    if DEPENDS_ON not in record:
        held = files_matching(folder, (*TRAINING_FILES, f"{UNMERGED}/*", f"{CHECKPOINTS}/{TRAINER_STATE_NAME}"))
        if held:
            return State(OTHER, None, f"contains unrelated files ({', '.join(held[:4])} would be overwritten)")
        return State(NEW)
    then = record[DEPENDS_ON]
    if changed := changes(then, fingerprint):
        return State(OTHER, None, f"contains another run ({'; '.join(changed[:3])})")
    longer, _ = change_of_length(then, fingerprint)
    finished = is_finished(record)
    if finished and not longer and (not fingerprint.get("do_train") or files_matching(folder, WEIGHT_FILES)):
        return State(DONE)
    checkpoint = newest_complete(folder)
    if checkpoint is not None:
        return State(STOPPED, checkpoint)
    if finished and longer:
        return State(OTHER, None, f"contains this run without a checkpoint to continue from ({longer})")
    return State(NEW)


def record_of(folder: Path, name: str = RECORD) -> dict:
    """Reads the record `run.json`, or another JSON file, in a folder. Returns {} if it is missing or damaged."""
    with suppress(UserError):
        return read_json(folder / name)
    return {}


class OutputFolder(TrainerCallback):
    """A run's output folder, and the callback that makes it ready when training begins.

    Args:
        path: the folder.
        trains: True if the run trains, False if it only evaluates.
        overwrite: whether to replace the files of an earlier run.
        in_shell: whether a command runs, which refuses the files of another run and does not repeat a finished one. A
            trainer in Python overwrites, and refuses only to replace results when it measures.

    Attributes:
        done: True if an earlier process has finished this run.
        checkpoint: the checkpoint to continue from, or None.
        fingerprint: everything that the run's results depend on.
    """

    def __init__(self, path: str | Path, trains: bool = True, overwrite: bool = False, in_shell: bool = True):
        self.path = Path(path)
        self.trains = trains
        self.overwrite = overwrite
        self.refuses = in_shell or not trains
        self.done = False
        self.checkpoint: str | None = None
        self.fingerprint: Mapping = {}
        self._decided = False
        self._is_open = False
        self._cleaned = False

    @contextmanager
    def opened(self, fingerprint: Callable[[], Mapping], resume: str | bool | None) -> Iterator[OutputFolder]:
        """Decides whether the run starts, continues or is done, and locks the folder during the `with` block.

        The main process decides before anything is written, and tells the others. If the folder is open already, this
        has no effect. A trainer that had opened it before only locks it again, because the files in it are its own.

        Args:
            fingerprint: computes the run fingerprint.
            resume: the value of `resume_from_checkpoint`.

        Raises:
            UserError: the run would overwrite files that it did not write, or another run is using the folder.
        """
        if self._is_open:
            yield self
            return
        self._is_open = True
        descriptor = None
        try:
            if self.refuses and distributed.is_main():
                with reporting_disk_errors(self.path):
                    self.path.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDONLY)
            self.done, self.checkpoint = distributed.on_main(lambda: self._decide(fingerprint, resume, descriptor))
            self._decided = True
            yield self
        finally:
            self._is_open = False
            if descriptor is not None:
                os.close(descriptor)

    @property
    def holds_training(self) -> bool:
        """True if the folder has the record of a training run, whose results a measurement must not replace."""
        return bool(record_of(self.path).get(DEPENDS_ON, {}).get("do_train"))

    def _decide(
        self, fingerprint: Callable[[], Mapping], resume: str | bool | None, descriptor: int | None
    ) -> tuple[bool, str | None]:
        """Returns whether the run is done, and the checkpoint to continue from. Raises UserError like `opened`."""
        if descriptor is not None and not lock_file(descriptor):
            raise UserError(f"output_dir={self.path}: in use by another run; wait, or set another output_dir")
        if self._decided or not self.refuses:
            return self.done, last_checkpoint(resume, self.path)
        state = state_of(self.path, plain_settings(fingerprint()))
        if not self.trains:
            if self.holds_training:
                raise UserError(
                    f"output_dir={self.path}: contains the results of a training run; set another output_dir"
                )
            if not self.overwrite and state.name != DONE:
                check_free(self.path, RESULT_FILES)
            return False, None
        if state.name == DONE and not self.overwrite:
            return True, None
        checkpoint = last_checkpoint(resume, self.path)
        if checkpoint is not None and Path(checkpoint).resolve().is_relative_to(self.path.resolve()):
            self.overwrite = False  # the trainer compares the run with the checkpoint
        elif state.name == OTHER and not self.overwrite:
            raise UserError(f"output_dir={self.path}: {state.why}: set another output_dir, or --overwrite true")
        elif checkpoint is None and state.name == STOPPED and not self.overwrite:
            checkpoint = state.checkpoint
            print_on_main(f"Continuing from {checkpoint}; --overwrite true starts from the beginning")
        return False, checkpoint

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        """Updates the learning rate, which depends on the length of the run, and finds the best checkpoint again.

        Raises:
            UserError: training would end before the resumed step.
        """
        if state.global_step > state.max_steps:
            raise UserError(
                f"{self.checkpoint} is at step {state.global_step}, but this training ends at step "
                f"{state.max_steps}; increase num_train_epochs or max_steps"
            )
        if state.global_step and isinstance(lr_scheduler, LambdaLR):  # the checkpoint has the rate of a shorter run
            lr_scheduler.last_epoch -= 1
            lr_scheduler.step()
        if state.global_step and state.best_global_step and state.best_model_checkpoint is None:
            # The folder was renamed after the state was written, so `Trainer` has dropped the path.
            best = Path(self.checkpoint).with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best.is_dir():
                state.best_model_checkpoint = str(best)

    def on_step_begin(self, args, state, control, **kwargs):
        """Before the first step, removes the checkpoints that are not this run's, and records the run."""
        if self._cleaned or not self.refuses or not state.is_world_process_zero:
            return
        self._cleaned = True
        for path in self.path.glob(CHECKPOINTS):
            if self.overwrite or not (path / TRAINER_STATE_NAME).exists():  # it was left by a run that was killed
                shutil.rmtree(path, ignore_errors=True)
        self._begin_record()

    def _begin_record(self) -> None:
        """Writes what the run depends on. The record has no results until the run has ended."""
        write_json(self.path / RECORD, {"format": RECORD_FORMAT, DEPENDS_ON: self.fingerprint})

    def take_encoder(self, trainer) -> None:
        """Saves the trained encoder, and removes the files of an earlier run. Every process calls this method."""
        if distributed.is_main():
            self.clear()
        distributed.barrier()
        trainer.save_model(str(self.path), _internal_call=True)  # `Measurements.finish` writes the card
        trainer.save_state()

    def clear(self) -> None:
        """Removes an earlier run's files that this run will replace. A card that a person has edited is renamed."""
        if self.trains:
            keep_edited_card(self.path)
        self._begin_record()  # first, so that the record never describes files of another run
        for name in files_matching(self.path, TRAINING_FILES if self.trains else RESULT_FILES):
            if name != RECORD:
                (self.path / name).unlink()


# ---- Complete checkpoints ----


@contextmanager
def saving_checkpoint(folder: str | Path) -> Iterator[None]:
    """A context manager for writing a checkpoint's folder. If an error occurs, the folder is removed.

    Disk errors become a UserError.
    """
    folder = Path(folder)
    try:
        with reporting_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / MARKER).unlink(missing_ok=True)
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def has_finite_weights(model: PreTrainedModel) -> bool:
    """Returns True if no trained weight of any process is NaN or infinite. Every process calls this function.

    With FSDP and DeepSpeed, a process checks the part of each weight that it keeps.
    """
    finite = True
    for weight in model.parameters():
        if weight.requires_grad:
            part = weight.to_local() if isinstance(weight, DTensor) else getattr(weight, "ds_tensor", weight)
            finite &= bool(torch.isfinite(part).all())
    return all(distributed.gather_numbers(int(finite)))


def best_checkpoint(args: TrainingArguments, state: TrainerState) -> str | None:
    """Returns the checkpoint whose weights `load_best_model_at_end` would load now, or None."""
    return state.best_model_checkpoint if args.load_best_model_at_end else None


def mark_complete(
    folder: str | Path, fingerprint: Mapping, weights_only: bool = False, losses: float | None = None
) -> None:
    """Marks a checkpoint as complete by writing `complete.json`, with the time and the run fingerprint.

    Args:
        weights_only: True if the checkpoint lacks the optimizer's state, so that training cannot resume from it.
        losses: the sum of the losses of all steps so far.

    Raises:
        UserError: the file cannot be written. In that case, the checkpoint is removed.
    """
    marker = {"written": time.time(), "weights only": weights_only, "losses": losses, DEPENDS_ON: fingerprint}
    with saving_checkpoint(folder):
        write_json(Path(folder) / MARKER, marker)
    if weights_only:
        print_on_main(f"{folder}: saved without the optimizer (save_only_model), so no run can continue from it")


def resumable(folder: str | Path) -> dict | None:
    """Returns the marker of a complete checkpoint that training can resume from, or None.

    The weights may have lost their end since, for example in a copy or a power failure.
    """
    marker = record_of(Path(folder), MARKER)
    if DEPENDS_ON not in marker or marker["weights only"]:
        return None
    try:
        for weights in Path(folder).glob("*.safetensors"):
            with safe_open(weights, "pt"):
                pass
    except (SafetensorError, OSError):
        return None
    return marker


def newest_complete(output_dir: str | Path) -> str | None:
    """Returns the path of the newest complete checkpoint in `output_dir`, or None.

    The newest checkpoint is the last one that was written. It may not have the highest step, because an earlier run
    may have written to the same folder. The time comes from the marker, because copying a folder changes modification
    times.
    """
    times: dict[str, float] = {}
    for folder in Path(output_dir).glob(CHECKPOINTS):
        if marker := resumable(folder):
            times[str(folder)] = marker["written"]
    return max(times, key=times.get, default=None)


# ---- Resuming ----


def check_named(wanted: str | bool | None) -> None:
    """Raises UserError if `resume_from_checkpoint` is the path of a folder that training cannot resume from."""
    if str(wanted).lower() in (*NO, *NEWEST):
        return
    if resumable(wanted) is None:
        raise UserError(
            f"resume_from_checkpoint={wanted}: not a complete checkpoint with the optimizer's state; `last` selects "
            "the newest one in the output folder"
        )


def last_checkpoint(wanted: str | bool | None, output_dir: str | Path) -> str | None:
    """Returns the folder of the complete checkpoint that `resume_from_checkpoint` refers to, or None.

    Args:
        wanted: the value of `resume_from_checkpoint`: a checkpoint's folder, "last" or "true" for the newest complete
            checkpoint in `output_dir`, or "false" or None for no checkpoint.

    Raises:
        UserError: the folder does not exist, or it is not a complete checkpoint.
    """
    check_named(wanted)
    if str(wanted).lower() in NO:
        return None
    if str(wanted).lower() not in NEWEST:
        return str(wanted)
    checkpoint = newest_complete(output_dir)
    if checkpoint is None:
        print_on_main(f"{output_dir} has no complete checkpoint to resume from: training starts at the first step")
    return checkpoint


def compared(fingerprint: Callable[[], Mapping], checkpoint: str | None) -> dict[str, object]:
    """Returns the run fingerprint after comparing it with the fingerprint of the checkpoint to resume from.

    The main process does this for all, because the others may not have the weights or the folder. Warns about library
    versions that differ.

    Args:
        fingerprint: computes the run fingerprint.
        checkpoint: the folder of the checkpoint to resume from, or None.

    Raises:
        UserError: the checkpoint is from a run with other settings or data.
    """

    def compare() -> dict[str, object]:
        now = plain_settings(fingerprint())
        if checkpoint is None:
            return now
        then = read_json(Path(checkpoint) / MARKER)[DEPENDS_ON]
        if changed := changes(then, now):
            raise UserError(
                f"{checkpoint}: {'; '.join(changed[:3])}. A run must resume with its original settings, and with at "
                "least its original length, because the learning rate depends on it; --overwrite true without "
                "--resume_from_checkpoint starts a new run"
            )
        if then["versions"] != now["versions"]:
            print_on_main(f"warning: {checkpoint}: versions of libraries have changed, so results may change")
        return now

    return distributed.on_main(compare)
