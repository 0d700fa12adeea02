"""Marks checkpoints as complete, finds the newest, and compares a checkpoint with the run that resumes from it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.files import IDENTITY, read_json, reporting_disk_errors, write_json
from soft_trainer.fingerprints import plain_settings
from soft_trainer.terminal import print_on_main
from soft_trainer.training.identity import changed_versions, differences, free_to_resume

MARKER = "complete.json"


def identify(describe: Callable[[], Mapping], checkpoint: str | None) -> dict[str, object]:
    """Returns the identity to store in checkpoints, after comparing it with that of the checkpoint to resume from.

    Only the main process does this, because other processes may not have the weights or the folder. They get an empty
    dict.

    Args:
        describe: returns the identity of the run, or a group of it.
        checkpoint: the folder of the checkpoint to resume from, or None.

    Raises:
        UserError: the run differs, or the checkpoint contains only weights.
    """
    identity = {}
    problem = None
    if distributed.rank_and_world_size()[0] == 0:
        identity = plain_settings(describe())
        if checkpoint:
            problem = _difference(checkpoint, identity)
    problem = distributed.from_main(problem)
    if problem is not None:
        raise UserError(problem)
    return identity


def _difference(checkpoint: str, identity: Mapping) -> str | None:
    """Returns the reason why training cannot resume from a checkpoint, or None if it can."""
    marker = read_json(Path(checkpoint) / MARKER)
    if marker["weights only"]:
        return f"{checkpoint}: it contains only weights (save_only_model), so a run cannot be resumed from it"
    then = marker[IDENTITY]
    if changed := differences(then, identity, free_to_resume(identity)):
        return (
            f"{checkpoint}: {'; '.join(changed[:3])}. A resumed run must use the settings it started with; only its "
            "length, logging and saving may change. Leave resume_from_checkpoint out to start a new run"
        )
    if upgraded := changed_versions(then, identity):
        print_on_main(f"warning: {checkpoint}: {'; '.join(upgraded)}. This may change the results")
    return None


# ---- Complete checkpoints ----


@contextmanager
def saving_checkpoint(folder: str | Path) -> Iterator[None]:
    """Reports disk errors like `reporting_disk_errors`, and removes a checkpoint that any error left unfinished."""
    try:
        with reporting_disk_errors(folder):
            (Path(folder) / MARKER).unlink(missing_ok=True)
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def mark_complete(folder: str | Path, identity: Mapping, weights_only: bool = False) -> None:
    """Marks a checkpoint as complete by writing a file with the time, the run's identity and all file sizes.

    Args:
        weights_only: True if the checkpoint lacks the optimizer, so that no training can resume from it.

    Raises:
        UserError: the file cannot be written. The checkpoint has then been removed.
    """
    folder = Path(folder)
    with saving_checkpoint(folder):
        sizes = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sizes[str(path.relative_to(folder))] = path.stat().st_size
        marker = {"written": time.time(), "weights only": weights_only, IDENTITY: identity, "sizes": sizes}
        write_json(folder / MARKER, marker)


def _written(folder: Path) -> float | None:
    """Returns the time when a checkpoint was marked complete, or None if a file is missing or has a different size."""
    with suppress(OSError, UserError, KeyError, AttributeError):  # no marker of this version, or a missing file
        marker = read_json(folder / MARKER)
        whole = all((folder / name).stat().st_size == size for name, size in marker["sizes"].items())
        if whole and IDENTITY in marker:
            return marker["written"]
    return None


def newest_complete(output_dir: str | Path) -> str | None:
    """Returns a run's newest complete checkpoint, or None. Warns about incomplete ones.

    The newest is the one that was written last. It need not have the highest step, because an earlier run may have
    written to this folder. The recorded time is used, because copying a folder changes modification times.
    """
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints  # slow to import

    times: dict[str, float] = {}
    for checkpoint in sort_checkpoints(str(output_dir), PREFIX_CHECKPOINT_DIR):
        written = _written(Path(checkpoint))
        if written is None:
            print_on_main(f"warning: skipping {checkpoint}: incomplete, or another version wrote it")
        else:
            times[checkpoint] = written
    return max(times, key=times.get, default=None)


def last_checkpoint(wanted: str | bool | None, output_dir: str | Path) -> str | None:
    """Finds the checkpoint to resume from.

    Args:
        wanted: the value of `resume_from_checkpoint`: a checkpoint's folder, "last" or "true" for the newest complete
            checkpoint in `output_dir`, or "false" or None for no checkpoint.

    Returns:
        The checkpoint's folder, or None to start from the beginning.

    Raises:
        UserError: the folder does not exist, or it is not a complete checkpoint.
    """
    if wanted is None or str(wanted).lower() in ("false", "no"):
        return None
    if str(wanted).lower() in ("true", "last", "yes"):
        checkpoint = newest_complete(output_dir)
        if checkpoint is None:
            print_on_main(f"{output_dir} has no complete checkpoint to resume from: training starts at the first step")
        return checkpoint
    named = f"resume_from_checkpoint={wanted}"
    folder = Path(wanted)
    no_state = not (folder / "trainer_state.json").is_file()
    if not folder.is_dir():
        raise UserError(f"{named}: no such folder; `last` takes the newest checkpoint of the output folder")
    if no_state:
        raise UserError(f"{named}: not a training checkpoint, because it has no trainer_state.json")
    if _written(folder) is None:
        raise UserError(f"{named}: incomplete (a file is missing or has changed), or another version wrote it")
    return str(wanted)
