"""Checkpoints that count only when they are whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from soft_trainer.console import say
from soft_trainer.errors import SetupError

MARKER = "complete.json"


@contextmanager
def saving(folder: str | Path) -> Iterator[None]:
    """Turn a disk that is full or cannot be written into one line that names the folder and what is free.

    Raises:
        SetupError: writing failed.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # `torch.save` reports a full disk as a plain RuntimeError of its archive writer.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.is_dir())
        free = shutil.disk_usage(there).free / 2**20
        raise SetupError(
            f"cannot save to {folder}: {str(error).splitlines()[0]}; {free:,.0f} MiB are free there. What was saved "
            "before is as it was: make room or choose another output_dir"
        ) from error


@contextmanager
def saving_checkpoint(folder: str | Path) -> Iterator[None]:
    """`saving`, and a checkpoint that could not be finished is removed: half of one is of no use and takes room."""
    try:
        with saving(folder):
            (Path(folder) / MARKER).unlink(missing_ok=True)
            yield
    except SetupError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def mark_complete(folder: str | Path) -> None:
    """Record the size of every file of a checkpoint, as the last thing that is written into it."""
    folder = Path(folder)
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    sizes.pop(MARKER, None)
    aside = folder / (MARKER + ".tmp")
    aside.write_text(json.dumps(sizes, indent=2) + "\n")
    aside.replace(folder / MARKER)


def is_complete(folder: str | Path) -> bool:
    """Whether every file is there in the size that was recorded."""
    folder = Path(folder)
    try:
        sizes = json.loads((folder / MARKER).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def newest_complete(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint of a run, None where there is none; a half-written one is named in a warning."""
    if not Path(output_dir).is_dir():
        return None
    for checkpoint in reversed(sort_checkpoints(str(output_dir), PREFIX_CHECKPOINT_DIR)):
        if is_complete(checkpoint):
            return str(checkpoint)
        say(f"warning: {checkpoint} is not whole (its run was stopped while writing it) and is passed over")
    return None
