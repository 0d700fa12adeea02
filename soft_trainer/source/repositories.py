"""Finds a git repository and its folders."""

from __future__ import annotations

import os
from pathlib import Path

from soft_trainer.source.source_files import read_regular

_MAX_BYTES = 10_000  # of a file that holds a path


def repository_of(folder: str) -> str | None:
    """Returns the root of the repository that contains a folder, or None if the folder is not in a repository."""
    for parent in (Path(folder), *Path(folder).parents):
        if os.path.lexists(parent / ".git"):
            return str(parent)
    return None


def git_dir(top: str | Path) -> str:
    """Returns the git directory of a repository. In a submodule or a linked working tree, `.git` is a file."""
    file = os.path.join(top, ".git")
    if not os.path.lexists(file):
        return os.fspath(top)  # a bare repository
    pointer = read_regular(file, _MAX_BYTES)
    if isinstance(pointer, str) or not pointer.startswith(b"gitdir:"):
        return file
    return os.path.join(top, os.fsdecode(pointer.removeprefix(b"gitdir:").strip()))


def is_git_dir(folder: str) -> bool:
    """Returns True for a bare repository, and for the `.git` of any other one."""
    entries = ("HEAD", "objects", "refs")
    return all(os.path.lexists(os.path.join(folder, name)) for name in entries) and not os.path.lexists(
        os.path.join(folder, ".git")
    )


def common_dir(top: str | Path) -> str:
    """Returns the git directory that all working trees of a repository share."""
    folder = git_dir(top)
    shared = read_regular(os.path.join(folder, "commondir"), _MAX_BYTES)
    if isinstance(shared, str):
        return folder
    return os.path.join(folder, os.fsdecode(shared.strip()))


def is_linked_worktree(folder: str, top: str = "") -> bool:
    """Returns True if a folder is a linked worktree inside its repository, and so holds a second copy of the code.

    Around a bare repository's worktrees there is no code, so they do not count. Neither do submodules.

    Args:
        top: the root of the tree. A repository that contains it is not around the folder.
    """
    if not os.path.lexists(os.path.join(folder, ".git")):
        return False
    folder = os.path.realpath(folder)
    around = repository_of(os.path.dirname(folder))
    if around is None or len(around) < len(top) or not os.path.lexists(os.path.join(git_dir(folder), "commondir")):
        return False
    if not os.path.isfile(os.path.join(git_dir(around), "index")):  # a bare repository
        return False
    return os.path.realpath(common_dir(folder)) == os.path.realpath(common_dir(around))
