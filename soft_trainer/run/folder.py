"""The folder that a run writes to: whether the run starts, continues or is done, its checkpoints, what it replaces.

A run from the shell does not repeat a finished run, and continues an interrupted one. It refuses a folder with any
other file that it would overwrite, unless `overwrite` is set. A trainer in Python overwrites, as `transformers` does.
When a run ends, it lists the files that it wrote in `run.json`, and `push`, `compare` and `report` read only listed
files. A checkpoint is complete once `complete.json` has the sizes of its files.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.files import (
    CARD,
    CHECKPOINTS,
    DEPENDS_ON,
    LISTED,
    PREVIOUS_CARD,
    RECORD,
    RECORD_FORMAT,
    RESULT_FILES,
    ROLLING,
    TRAINING_FILES,
    UNMERGED,
    WEIGHT_FILES,
    check_free,
    checkpoints_in,
    files_matching,
    read_json,
    reporting_disk_errors,
    write_json,
)
from soft_trainer.fingerprints import file_fingerprint, plain_settings
from soft_trainer.option_spec import references
from soft_trainer.options.parse import OF_A_RUN
from soft_trainer.run.fingerprint import (
    MAY_CHANGE,
    MAY_CHANGE_ON_RESUME,
    change_of_length,
    changes,
    option_values,
    own_names,
)
from soft_trainer.terminal import print_on_main

ASIDE = ".encoder"  # the subfolder of a new encoder until it replaces the encoder of an earlier run
MARKER = "complete.json"
UNFINISHED = "unfinished"  # a file in a checkpoint that is being written
CONTINUED = "continued from"  # the key of the checkpoints at which a run became longer
NEW, STOPPED, DONE, OTHER = "new", "stopped", "done", "other"
NO, NEWEST = ("none", "false", "no"), ("true", "last", "yes")  # values of `resume_from_checkpoint`


# ---- The run in a folder ----


class State(NamedTuple):
    """What an output folder contains before a run starts: nothing, the same run, or another run.

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

    A run that is to train for longer continues. So does a finished run that was started again with `overwrite`, whose
    checkpoint is newer than the record.
    """
    folder = Path(folder)
    record = folder / RECORD
    checkpoint = newest_complete(folder)
    written = 0.0  # when this run wrote the checkpoint
    lines = []
    if checkpoint is not None:
        marker = read_json(Path(checkpoint) / MARKER)
        lines = changes(marker[DEPENDS_ON], fingerprint, MAY_CHANGE)
        if marker["weights only"]:
            lines.append(f"{checkpoint} has only weights")
        written = 0.0 if lines else marker["written"]
    if record.is_file() and record.stat().st_mtime > written:
        content = record_of(folder)
        then = content.get(DEPENDS_ON)
        of_record = [f"its {RECORD} was not written by a training run"]
        if then is not None:
            of_record = changes(then, fingerprint, MAY_CHANGE)
        if not of_record:
            longer, _ = change_of_length(then, fingerprint)
            whole = not fingerprint.get("do_train") or files_matching(folder, WEIGHT_FILES)
            if LISTED not in content:  # the list is written last
                return State(STOPPED, checkpoint) if written else State(NEW)
            if whole and not longer:
                return State(DONE)
            if longer and not written:
                return State(OTHER, None, f"contains this run without a checkpoint to continue from ({longer})")
        lines = of_record or lines
    if written:
        return State(STOPPED, checkpoint)
    held = files_matching(folder, (*TRAINING_FILES, f"{UNMERGED}/*"))
    for path in checkpoints_in(folder):
        if not (path / UNFINISHED).exists():
            held.append(path.relative_to(folder).as_posix())
    if not held:
        return State(NEW)
    lines = lines or [f"{', '.join(sorted(held)[:4])} would be overwritten"]
    return State(OTHER, None, f"contains another run or unrelated files ({'; '.join(lines[:3])})")


def record_of(folder: Path, name: str = RECORD) -> dict:
    """Reads the record `run.json`, or another JSON file, in a folder. Returns {} if it is missing or damaged."""
    with suppress(UserError):
        return read_json(folder / name)
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
    """

    def __init__(self, path: str | Path, trains: bool = True, overwrite: bool = False, in_shell: bool = True):
        self.path = Path(path)
        self.trains = trains
        self.overwrite = overwrite
        self.refuses = in_shell or not trains
        self.done = False
        self.checkpoint: str | None = None
        self._decided = False
        self._lock: int | None = None
        self._is_open = False
        self._cleaned = False
        self._made: list[Path] = []  # the folders that this run creates, deepest first
        if in_shell:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]

    @contextmanager
    def opened(
        self, fingerprint: Callable[[], Mapping], resume: str | bool | None, options: Sequence
    ) -> Iterator[OutputFolder]:
        """Decides whether the run starts, continues or is done, and locks the folder during the `with` block.

        The main process decides before anything is written, and tells the others. If the folder is open already, this
        has no effect. A trainer that had opened it before only locks it again, because the files in it are its own.

        Args:
            fingerprint: computes the run fingerprint.
            resume: the value of `resume_from_checkpoint`.
            options: the dataclass instances with the options.

        Raises:
            UserError: the run would overwrite files that it did not write, it reads its encoder or rows from the
                folder, or another run is using the folder.
        """
        if self._is_open:
            yield self
            return
        self._is_open = True
        try:
            self.done, self.checkpoint = distributed.on_main(lambda: self._decide(fingerprint, resume, options))
            self._decided = True
            yield self
        finally:
            self._is_open = False
            self.close()

    @property
    def holds_training(self) -> bool:
        """True if the folder has the record of a training run, whose results a measurement must not replace."""
        return bool(record_of(self.path).get(DEPENDS_ON, {}).get("do_train"))

    def close(self) -> None:
        """Unlocks the folder. Removes it if this run created it but wrote nothing to it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    def _decide(
        self, fingerprint: Callable[[], Mapping], resume: str | bool | None, options: Sequence
    ) -> tuple[bool, str | None]:
        """Returns whether the run is done, and the checkpoint to continue from. Raises UserError like `opened`."""
        if self.refuses:
            with reporting_disk_errors(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.path)
            if self._lock is None:
                raise UserError(f"output_dir={self.path}: in use by another run; wait, or set another output_dir")
        if self._decided or not self.refuses:
            return self.done, last_checkpoint(resume, self.path)
        if not self.trains:
            if self.holds_training:
                raise UserError(
                    f"output_dir={self.path}: contains the results of a training run; set another output_dir"
                )
            if not self.overwrite and state_of(self.path, plain_settings(fingerprint())).name != DONE:
                check_free(self.path, RESULT_FILES)
            return False, None
        output = self.path.resolve()
        for reference in references(OF_A_RUN, option_values(*options)):
            for value in reference.values:
                if (
                    reference.kind != "folder"
                    and os.path.exists(value)
                    and Path(value).resolve().is_relative_to(output)
                ):
                    raise UserError(
                        f"{reference.option}={value} is inside output_dir={self.path}, so the run might replace it; "
                        "set another output_dir"
                    )
        shutil.rmtree(self.path / ASIDE, ignore_errors=True)  # left by a run that was killed
        state = state_of(self.path, plain_settings(fingerprint()))
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
        """Updates the best checkpoint's path and the learning rate, which depends on the length of the run.

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
        if self.checkpoint and state.best_global_step:
            folder = Path(self.checkpoint).parent
            if folder.name == ROLLING:
                folder = folder.parent
            best = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best.is_dir():
                state.best_model_checkpoint = str(best)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Says so if the metric that chooses the best checkpoint is NaN, because `Trainer` ignores such a value."""
        name = f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"
        if math.isnan((metrics or {}).get(name, 0)):
            print_on_main(f"warning: {name} is NaN at step {state.global_step}, so this step cannot be the best")

    def on_step_begin(self, args, state, control, **kwargs):
        """Before the first step, removes unfinished checkpoints and, with `overwrite`, an earlier run's."""
        if self._cleaned or not self.refuses or not state.is_world_process_zero:
            return
        self._cleaned = True
        for path in checkpoints_in(self.path):
            if self.overwrite or (path / UNFINISHED).exists():
                shutil.rmtree(path, ignore_errors=True)

    def take_encoder(self, trainer) -> None:
        """Saves the trained encoder, and replaces the files of an earlier run. Every process calls this method."""
        aside = self.path / ASIDE
        trainer.save_model(str(aside), _internal_call=True)  # `Measurements.finish` writes the card
        if distributed.is_main():
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
        listed = record_of(self.path).get(LISTED, {})
        card = self.path / CARD
        edited = card.is_file() and listed.get(CARD) != file_fingerprint(card)
        if edited and self.trains:
            card.replace(self.path / PREVIOUS_CARD)
        (self.path / RECORD).unlink(missing_ok=True)  # first, so that the record never lists files of another run
        for name in files_matching(self.path, TRAINING_FILES if self.trains else RESULT_FILES):
            (self.path / name).unlink()


# ---- Complete checkpoints ----


@contextmanager
def saving_checkpoint(folder: str | Path) -> Iterator[None]:
    """A context manager for writing a checkpoint's folder. If an error occurs, the folder is removed.

    Disk errors become a UserError. The folder contains a file UNFINISHED until `mark_complete` is called, so that a
    checkpoint left by a killed process is ignored.
    """
    folder = Path(folder)
    try:
        with reporting_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / UNFINISHED).touch()
            (folder / MARKER).unlink(missing_ok=True)
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def mark_complete(
    folder: str | Path, fingerprint: Mapping, weights_only: bool = False, losses: float | None = None
) -> None:
    """Marks a checkpoint as complete by writing `complete.json`: the time, the run fingerprint and all file sizes.

    Args:
        weights_only: True if the checkpoint lacks the optimizer's state, so that training cannot resume from it.
        losses: the sum of the losses of all steps so far.

    Raises:
        UserError: the file cannot be written. In that case, the checkpoint is removed.
    """
    folder = Path(folder)
    with saving_checkpoint(folder):
        sizes = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != UNFINISHED:
                sizes[str(path.relative_to(folder))] = path.stat().st_size
        marker = {"written": time.time(), "weights only": weights_only, "losses": losses}
        write_json(folder / MARKER, marker | {DEPENDS_ON: fingerprint, "sizes": sizes})
        (folder / UNFINISHED).unlink()


def remove_rolling(output_dir: str | Path, keep: Path | None = None) -> None:
    """Removes the checkpoints that a run saved by time or because of a signal, except `keep`."""
    folder = Path(output_dir) / ROLLING
    for checkpoint in folder.glob(CHECKPOINTS):
        if checkpoint != keep:
            shutil.rmtree(checkpoint, ignore_errors=True)
    with suppress(OSError):  # not empty, or missing
        folder.rmdir()


def _written(folder: Path) -> float | None:
    """Returns the time when a checkpoint was marked complete, or None if a file is missing or has changed in size."""
    with suppress(OSError, UserError, KeyError, AttributeError):  # a missing file, or a marker of another version
        marker = read_json(folder / MARKER)
        whole = all((folder / name).stat().st_size == size for name, size in marker["sizes"].items())
        if whole and DEPENDS_ON in marker:
            return marker["written"]
    return None


def newest_complete(output_dir: str | Path) -> str | None:
    """Returns the path of the newest complete checkpoint in `output_dir`, or None. Warns about incomplete ones.

    The newest checkpoint is the last one that was written. It may not have the highest step, because an earlier run
    may have written to the same folder. The time comes from the marker, because copying a folder changes modification
    times.
    """
    times: dict[str, float] = {}
    for checkpoint in checkpoints_in(output_dir):
        written = _written(checkpoint)
        if written is None:
            print_on_main(f"warning: skipping {checkpoint}: incomplete, or written by another version")
        else:
            times[str(checkpoint)] = written
    return max(times, key=times.get, default=None)


# ---- Resuming ----


def check_named(wanted: str | bool | None) -> None:
    """Raises UserError if `resume_from_checkpoint` is the path of a folder that is not a complete checkpoint."""
    if str(wanted).lower() in (*NO, *NEWEST):
        return
    named = f"resume_from_checkpoint={wanted}"
    folder = Path(wanted)
    if not folder.is_dir():
        raise UserError(f"{named}: no such folder; `last` selects the newest checkpoint in the output folder")
    if not (folder / "trainer_state.json").is_file():
        raise UserError(f"{named}: not a training checkpoint, because it has no trainer_state.json")
    if _written(folder) is None:
        raise UserError(f"{named}: incomplete (a file is missing or has changed), or written by another version")


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

    The main process does this for all, because the others may not have the weights or the folder.

    Args:
        fingerprint: computes the run fingerprint.
        checkpoint: the folder of the checkpoint to resume from, or None.

    Raises:
        UserError: the checkpoint is from a run with other settings or data, or contains only weights.
    """

    def compare() -> dict[str, object]:
        now = plain_settings(fingerprint())
        if checkpoint is None:
            return now
        marker = read_json(Path(checkpoint) / MARKER)
        if marker["weights only"]:
            raise UserError(
                f"{checkpoint}: contains only weights (save_only_model), so training cannot resume from it"
            )
        then = marker[DEPENDS_ON]
        if (then.get("precision"), now.get("precision")) == ("no", "bf16"):
            raise UserError(
                f"{checkpoint}: was trained in float32, and this run would train in bf16; resume with --bf16 false"
            )
        loss = "the criterion's loss"
        if then["format"] == now["format"] and (then[loss], now[loss]) == ("info_nce", "soft_info_nce"):
            raise UserError(
                f"{checkpoint}: was trained with InfoNCE, and this run would train with Soft-InfoNCE; resume with "
                "loss=info_nce"
            )
        if changed := changes(then, now, MAY_CHANGE_ON_RESUME):
            raise UserError(
                f"{checkpoint}: {'; '.join(changed[:3])}. A run must resume with its original settings, and with at "
                "least its original length, because the learning rate depends on it; --overwrite true without "
                "--resume_from_checkpoint starts a new run"
            )
        return now

    return distributed.on_main(compare)


def continued(fingerprint: Mapping, checkpoint: str | None) -> Mapping:
    """Returns the fingerprint of a resumed run with its shorter lengths so far, under CONTINUED.

    Warns about library versions that differ from the checkpoint, and about the user's code, which may differ.
    """
    if checkpoint is None:
        return fingerprint
    then = read_json(Path(checkpoint) / MARKER)[DEPENDS_ON]
    for name, version in fingerprint["versions"].items():
        before = then.get("versions", {}).get(name)
        if before != version:
            print_on_main(f"warning: {checkpoint}: {name} was {before}, is now {version}. Results may change")
    for name in own_names(fingerprint):
        print_on_main(f"warning: {checkpoint}: {name} is compared by name only; make sure that it has not changed")
    lengths = then.get(CONTINUED, [])
    if longer := change_of_length(then, fingerprint)[0]:
        print_on_main(f"Continuing for longer: {longer}")
        lengths = [*lengths, f"{Path(checkpoint).name}: {longer}"]
    return fingerprint | {CONTINUED: lengths} if lengths else fingerprint
