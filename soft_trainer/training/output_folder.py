"""The folder that a run writes to: decides whether the run starts, continues or is done, and replaces its files.

A finished run is not repeated, and an interrupted run continues. A folder with any other file that the run would
overwrite is refused unless `overwrite` is set. When a run ends, it lists the files that it wrote in `run.json`, and
`push`, `compare` and `report` read only listed files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerCallback

from soft_trainer import distributed
from soft_trainer.data.trained_rows import write_trained_rows
from soft_trainer.errors import UserError
from soft_trainer.files import (
    CARD,
    DEPENDS_ON,
    LISTED,
    PREVIOUS_CARD,
    RECORD,
    RECORD_FORMAT,
    RESULT_FILES,
    TRAINING_FILES,
    UNMERGED,
    WEIGHT_FILES,
    check_free,
    checkpoints_in,
    files_matching,
    listed_files,
    read_json,
    reporting_disk_errors,
    write_json,
)
from soft_trainer.fingerprints import file_fingerprint, plain_settings
from soft_trainer.options.option_spec import references
from soft_trainer.terminal import print_on_main
from soft_trainer.training.checkpoints import MARKER, UNFINISHED, last_checkpoint, newest_complete
from soft_trainer.training.run_fingerprint import FOLDER, KINDS, changes, may_differ, option_values

ASIDE = ".encoder"  # the subfolder of a new encoder until it replaces the encoder of an earlier run
NEW, STOPPED, DONE, OTHER = "new", "stopped", "done", "other"


@dataclass(frozen=True)
class State:
    """What an output folder contains before a run starts: nothing, the same run, or another run.

    Args:
        name: NEW (no file that the run would overwrite), STOPPED (the same run, interrupted), DONE (the same run,
            finished), or OTHER (another run or other files).
        checkpoint: for STOPPED, the checkpoint to continue from.
        changes: for OTHER, how the run in the folder differs.
    """

    name: str
    checkpoint: str | None = None
    changes: tuple[str, ...] = ()


def state_of(folder: str | Path, fingerprint: Mapping, may_change: Iterable[str] = may_differ(FOLDER)) -> State:
    """Compares the run in an output folder with the current run.

    Args:
        fingerprint: the fingerprint of the current run.
        may_change: the keys of the fingerprint that may differ.
    """
    folder = Path(folder)
    lines = []
    unended = False
    if (folder / RECORD).is_file():
        lines = [f"its {RECORD} was not written by a training run"]
        with suppress(UserError):  # damaged
            record = read_json(folder / RECORD)
            if DEPENDS_ON in record:
                lines = changes(record[DEPENDS_ON], fingerprint, may_change)
                unended = not lines and LISTED not in record  # the list is written last
        whole = not fingerprint.get("do_train") or files_matching(folder, WEIGHT_FILES)
        if not lines and whole and not unended:
            return State(DONE)
    checkpoint = newest_complete(folder)
    if checkpoint is not None:
        marker = read_json(Path(checkpoint) / MARKER)
        differ = changes(marker[DEPENDS_ON], fingerprint, may_change)
        if not differ and not marker["weights only"]:
            return State(STOPPED, checkpoint)
        lines = lines or differ or [f"{checkpoint} has only weights"]
    held = files_matching(folder, (*TRAINING_FILES, f"{UNMERGED}/*"))
    for path in checkpoints_in(folder):
        if not (path / UNFINISHED).exists():
            held.append(path.relative_to(folder).as_posix())
    if held and not unended:
        return State(OTHER, None, tuple(lines) or (f"{', '.join(sorted(held)[:4])} would be overwritten",))
    return State(NEW)


def record_of(folder: Path) -> dict:
    """Reads the record `run.json` in a folder. Returns {} if it is missing or damaged."""
    with suppress(UserError):
        return read_json(folder / RECORD)
    return {}


def lock(folder: str | Path) -> int | None:
    """Locks a folder until this process ends or closes the returned file descriptor.

    Returns:
        A file descriptor, or None if another process has locked the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    if lock_file(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def lock_file(file) -> bool:
    """Locks an open file or descriptor until it is closed. Returns False if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        pass
    return True


class OutputFolder:
    """A run's output folder.

    Args:
        path: the folder.
        trains: True if the run trains, False if it only evaluates.
        overwrite: whether to replace the files of an earlier run.

    Attributes:
        done: True if an earlier process has finished this run.
        checkpoint: the checkpoint to continue from, or None.
    """

    def __init__(self, path: str | Path, trains: bool = True, overwrite: bool = False):
        self.path = Path(path)
        self.trains = trains
        self.overwrite = overwrite
        self.done = False
        self.checkpoint: str | None = None
        self._decided = False
        self._entered = 0  # how many `with` blocks have it open
        self._lock: int | None = None
        # The folders that this run creates, deepest first.
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]

    def open(self, fingerprint: Callable[[], Mapping], resume: str | bool | None, options: Sequence) -> OutputFolder:
        """Locks the folder, and decides whether the run starts, continues or is done. `with` unlocks it.

        The main process decides before anything is written, and tells the others. A trainer that has opened its
        folder before only locks it again, because the files in it are its own.

        Args:
            fingerprint: computes the run fingerprint.
            resume: the value of `resume_from_checkpoint`.
            options: the dataclass instances with the options.

        Raises:
            UserError: the run would overwrite files that it did not write, it reads its encoder or rows from the
                folder, or another run is using the folder.
        """
        if self._entered:
            return self
        problem = None
        if distributed.rank_and_world_size()[0] == 0:
            try:
                self._open(fingerprint, resume, options)
            except UserError as error:
                self.close()
                problem = str(error)
        problem, self.done, self.checkpoint = distributed.from_main((problem, self.done, self.checkpoint))
        if problem is not None:
            raise UserError(problem)
        self._decided = True
        return self

    def _open(self, fingerprint: Callable[[], Mapping], resume: str | bool | None, options: Sequence) -> None:
        """Locks the folder and decides. Raises UserError like `open`."""
        with reporting_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path)
        if self._lock is None:
            raise UserError(f"output_dir={self.path}: in use by another run; wait, or set another output_dir")
        if self._decided:
            self.checkpoint = last_checkpoint(resume, self.path)
        elif self.trains:
            check_apart(self.path, options)
            shutil.rmtree(self.path / ASIDE, ignore_errors=True)  # left by a run that was killed
            self._decide(state_of(self.path, plain_settings(fingerprint())), resume)
        else:
            if record_of(self.path).get(DEPENDS_ON, {}).get("do_train"):
                raise UserError(
                    f"output_dir={self.path}: contains the results of a training run; set another output_dir"
                )
            if not self.overwrite and state_of(self.path, plain_settings(fingerprint())).name != DONE:
                check_free(self.path, RESULT_FILES)

    def _decide(self, state: State, resume: str | bool | None) -> None:
        """Decides whether a training starts, continues or is done. Raises UserError like `open`."""
        if state.name == DONE and not self.overwrite:
            self.done = True
            return
        checkpoint = last_checkpoint(resume, self.path)
        within = checkpoint is not None and Path(checkpoint).resolve().is_relative_to(self.path.resolve())
        if within:  # the trainer compares the run with the checkpoint
            self.overwrite = False
        elif state.name == OTHER and not self.overwrite:
            remedy = "set another output_dir, or overwrite=true"
            if all(line.startswith(("num_train_epochs was", "max_steps was")) for line in state.changes):
                remedy = f"to train for longer, resume_from_checkpoint=last; otherwise, {remedy}"
            raise UserError(
                f"output_dir={self.path}: contains another run or unrelated files ({'; '.join(state.changes[:3])}): "
                f"{remedy}"
            )
        elif checkpoint is None and state.name == STOPPED and not self.overwrite:
            checkpoint = state.checkpoint
            print_on_main(f"Continuing from {checkpoint}; overwrite=true starts from the beginning")
        self.checkpoint = checkpoint

    def __enter__(self) -> OutputFolder:
        self._entered += 1
        return self

    def __exit__(self, *error) -> None:
        self._entered -= 1
        if not self._entered:
            self.close()

    def close(self) -> None:
        """Unlocks the folder. Removes the folder if this run created it but wrote nothing to it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    def save_encoder(self, trainer) -> None:
        """Saves the trained encoder, and replaces the files of an earlier run. Every process calls this method."""
        aside = self.path / ASIDE
        trainer.save_model(str(aside), _internal_call=True)  # `Measurements.finish` writes the card
        if distributed.rank_and_world_size()[0] == 0:
            write_trained_rows(aside, trainer.train_split, trainer.encoder)
            self.clear()
            # The record lists no files until the run has been evaluated.
            write_json(self.path / RECORD, {"format": RECORD_FORMAT, DEPENDS_ON: trainer.run_fingerprint})
            for path in sorted(aside.rglob("*")):
                if path.is_file():
                    target = self.path / path.relative_to(aside)
                    target.parent.mkdir(exist_ok=True)
                    path.replace(target)
            shutil.rmtree(aside)
        trainer.save_state()

    def clear(self) -> None:
        """Removes an earlier run's files that this run will replace, but only renames a model card that was edited."""
        listed = {}
        with suppress(UserError):
            listed = listed_files(self.path) or {}
        card = self.path / CARD
        edited = card.is_file() and listed.get(CARD) != file_fingerprint(card)
        if edited and self.trains:
            card.replace(self.path / PREVIOUS_CARD)
        (self.path / RECORD).unlink(missing_ok=True)  # first, so that the record never lists files of another run
        for name in files_matching(self.path, TRAINING_FILES if self.trains else RESULT_FILES):
            (self.path / name).unlink()


class RemoveEarlierCheckpoints(TrainerCallback):
    """A callback that removes unfinished checkpoints and, with `overwrite`, an earlier run's checkpoints."""

    def __init__(self, folder: OutputFolder):
        self._folder = folder
        self._removed = False

    def on_step_begin(self, args, state, control, **kwargs):
        """Removes the checkpoints before the first step, on the main process."""
        if self._removed or not state.is_world_process_zero:
            return
        self._removed = True
        for path in checkpoints_in(self._folder.path):
            if self._folder.overwrite or (path / UNFINISHED).exists():
                shutil.rmtree(path, ignore_errors=True)


def check_apart(output_dir: str | Path, options: Sequence) -> None:
    """Raises UserError if an option refers to an encoder or rows in the output folder, which the run may replace."""
    output = Path(output_dir).resolve()
    for reference in references(KINDS, option_values(*options)):
        for value in reference.values:
            if reference.kind != "place" and os.path.exists(value) and Path(value).resolve().is_relative_to(output):
                raise UserError(
                    f"{reference.option}={value} is inside output_dir={output_dir}, so the run might replace it; set "
                    "another output_dir"
                )
