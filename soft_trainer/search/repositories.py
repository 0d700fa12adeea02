"""Finds the git repository of an indexed folder, and notices new commits; needs no pygit2."""

from __future__ import annotations

import os
from pathlib import Path


def repository_of(folder: str) -> tuple[str, str] | None:
    """Returns the repository around a folder, and the folder's path in it with `/` at the end; None without one."""
    for parent in (Path(folder), *Path(folder).parents):
        if os.path.lexists(parent / ".git"):
            inside = os.path.relpath(folder, parent)
            return str(parent), "" if inside == "." else f"{inside}/"
    return None


def head_time(repository: str) -> int:
    """Returns when HEAD last moved, in ns; 0 if unknown."""
    folder = Path(repository, ".git")
    try:
        if folder.is_file():  # a worktree or a submodule: `gitdir: PATH`
            folder = Path(repository, folder.read_text().partition(":")[2].strip())
        moved = folder / "logs" / "HEAD"
        return (moved if moved.exists() else folder / "HEAD").stat().st_mtime_ns
    except (OSError, ValueError):
        return 0
