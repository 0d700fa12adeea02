"""Checkpoints that count only when they are whole."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from soft_trainer.console import say

MARKER = "complete.json"


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
