"""Marks checkpoints as complete, finds the newest one, and checks that a run may resume from it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.files import (
    CHECKPOINTS,
    DEPENDS_ON,
    ROLLING,
    read_json,
    reporting_disk_errors,
    write_json,
)
from soft_trainer.fingerprints import plain_settings
from soft_trainer.terminal import print_on_main
from soft_trainer.training.run_fingerprint import RESUME, changes, may_differ, own_names, shortened

MARKER = "complete.json"
UNFINISHED = "unfinished"  # a file in a checkpoint that is being written


def compared(fingerprint: Callable[[], Mapping], checkpoint: str | None) -> dict[str, object]:
    """Computes the run fingerprint, and compares it with the fingerprint of the checkpoint to resume from.

    Only the main process does this, because the others may not have the weights or the folder. The others return an
    empty dict.

    Args:
        fingerprint: computes the run fingerprint.
        checkpoint: the folder of the checkpoint to resume from, or None.

    Raises:
        UserError: the checkpoint is from a run with other settings or data, or contains only weights.
    """
    found = {}
    problem = None
    if distributed.rank_and_world_size()[0] == 0:
        found = plain_settings(fingerprint())
        if checkpoint:
            problem = _problem(checkpoint, found)
    problem = distributed.from_main(problem)
    if problem is not None:
        raise UserError(problem)
    return found


def _problem(checkpoint: str, now: Mapping) -> str | None:
    """Returns why training cannot resume from a checkpoint, as an error message, or None if it can."""
    marker = read_json(Path(checkpoint) / MARKER)
    if marker["weights only"]:
        return f"{checkpoint}: contains only weights (save_only_model), so training cannot resume from it"
    then = marker[DEPENDS_ON]
    if (then.get("precision"), now.get("precision")) == ("no", "bf16"):
        return f"{checkpoint}: was trained in float32, and this run would train in bf16; resume with --bf16 false"
    if shorter := shortened(then, now):
        return (
            f"{checkpoint}: {shorter}. The learning rate depends on the length of a run, so it must resume with the "
            "same length, or a larger one; resume_from_checkpoint=false starts a new run"
        )
    if changed := changes(then, now, may_differ(RESUME)):
        return (
            f"{checkpoint}: {'; '.join(changed[:3])}. A run must resume with its original settings; "
            "resume_from_checkpoint=false starts a new run"
        )
    return None


def warn_of_changes(fingerprint: Mapping, checkpoint: str | None) -> None:
    """Warns about library versions that differ from the checkpoint, and about the user's code, which may differ."""
    if checkpoint is None or not fingerprint:
        return
    then = read_json(Path(checkpoint) / MARKER)[DEPENDS_ON].get("versions", {})
    for name, version in fingerprint["versions"].items():
        if then.get(name) != version:
            print_on_main(f"warning: {checkpoint}: {name} was {then.get(name)}, is now {version}. Results may change")
    for name in own_names(fingerprint):
        print_on_main(f"warning: {checkpoint}: {name} is compared by name only; make sure that it has not changed")


class ResumedState(TrainerCallback):
    """A callback that checks a resumed run's step, and corrects the best checkpoint's path if the folder has moved.

    Args:
        checkpoint: returns the folder of the checkpoint to resume from, or None.
    """

    def __init__(self, checkpoint: Callable[[], str | None]):
        self._checkpoint = checkpoint

    def on_train_begin(self, args, state, control, **kwargs):
        """Updates the best checkpoint's path. Raises UserError if training would end before the resumed step."""
        if state.global_step > state.max_steps:
            raise UserError(
                f"{self._checkpoint()} is at step {state.global_step}, but this training ends at step "
                f"{state.max_steps}; increase num_train_epochs or max_steps"
            )
        if self._checkpoint() and state.best_global_step:
            folder = Path(self._checkpoint()).parent
            if folder.name == ROLLING:
                folder = folder.parent
            best = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best.is_dir():
                state.best_model_checkpoint = str(best)


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


def losses_before(checkpoint: str | None) -> float:
    """Returns the sum of the losses of all steps up to a checkpoint, or 0 if there is no checkpoint."""
    if checkpoint is None:
        return 0.0
    return read_json(Path(checkpoint) / MARKER).get("losses") or 0.0


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
    for folder in (Path(output_dir), Path(output_dir) / ROLLING):
        for checkpoint in sort_checkpoints(str(folder), PREFIX_CHECKPOINT_DIR):
            written = _written(Path(checkpoint))
            if written is None:
                print_on_main(f"warning: skipping {checkpoint}: incomplete, or written by another version")
            else:
                times[checkpoint] = written
    return max(times, key=times.get, default=None)


NO, NEWEST = ("false", "no"), ("true", "last", "yes")  # values of `resume_from_checkpoint`


def check_named(wanted: str | bool | None) -> None:
    """Raises UserError if `resume_from_checkpoint` is the path of a folder that is not a complete checkpoint."""
    if wanted is None or str(wanted).lower() in (*NO, *NEWEST):
        return
    named = f"resume_from_checkpoint={wanted}"
    folder = Path(wanted)
    no_state = not (folder / "trainer_state.json").is_file()
    if not folder.is_dir():
        raise UserError(f"{named}: no such folder; `last` selects the newest checkpoint in the output folder")
    if no_state:
        raise UserError(f"{named}: not a training checkpoint, because it has no trainer_state.json")
    if _written(folder) is None:
        raise UserError(f"{named}: incomplete (a file is missing or has changed), or written by another version")


def last_checkpoint(wanted: str | bool | None, output_dir: str | Path) -> str | None:
    """Finds the complete checkpoint that `resume_from_checkpoint` refers to.

    Args:
        wanted: the value of `resume_from_checkpoint`: a checkpoint's folder, "last" or "true" for the newest complete
            checkpoint in `output_dir`, or "false" or None for no checkpoint.

    Returns:
        The checkpoint's folder, or None to start from the beginning.

    Raises:
        UserError: the folder does not exist, or it is not a complete checkpoint.
    """
    if wanted is None or str(wanted).lower() in NO:
        return None
    if str(wanted).lower() in NEWEST:
        checkpoint = newest_complete(output_dir)
        if checkpoint is None:
            print_on_main(f"{output_dir} has no complete checkpoint to resume from: training starts at the first step")
        return checkpoint
    check_named(wanted)
    return str(wanted)
