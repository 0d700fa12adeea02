"""Uses git to list the files in a folder that are tracked or not ignored.

Git reads the ignore files, but never the repository's configuration, hooks or objects, which may specify programs to
run. Instead, git runs in an empty repository in the user's cache, with the folder as the working tree. The
repository's index is only read.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.source.repositories import common_dir, git_dir, repository_of
from soft_trainer.system.files import cache_dir, write_text

SECONDS = 10.0  # if git takes longer, it counts as failed


def list_files(folder: str) -> tuple[str, list[str] | None]:
    """Returns the working tree whose ignore files apply in a folder, and the files that git does not ignore there.

    If the enclosing repository lists no files there, as in `.venv/lib`, the user wants to index ignored files, so the
    folder counts as a separate tree.

    A nested repository or a submodule is a single path, which may end with a slash. Deleted files that are still
    tracked are also listed. The list is None if git is not installed or fails.
    """
    found = repository_of(folder)
    if found and found != folder:
        listed = _ls_files(found, folder)
        if listed != []:
            return found, listed
    return folder, _ls_files(folder, folder)


def _ls_files(top: str, folder: str) -> list[str] | None:
    """Returns the output of `git ls-files` in a folder of the working tree `top`, or None if git fails."""
    words = ["ls-files", "-z", "--sparse", "--cached", "--others", "--exclude-standard"]
    exclude = os.path.join(common_dir(top), "info", "exclude")
    if os.path.isfile(exclude):
        words.append(f"--exclude-from={exclude}")
    index = os.path.join(git_dir(top), "index")
    listed = None
    if os.path.isfile(index) and not os.path.islink(index):
        listed = _run_git(top, folder, words, {"GIT_INDEX_FILE": index})
    # Without a readable index, git lists tracked files like any other files.
    if listed is None:
        listed = _run_git(top, folder, words)
    # Git prints what a repository's index says, and does not check it.
    return listed and [path for path in listed if not _leads_out(path)]


def marked_as_generated(top: str, folder: str, paths: list[str]) -> set[str]:
    """Returns those paths in a folder of the working tree `top` that `.gitattributes` marks as linguist-generated."""
    words = ["check-attr", "-z", "--stdin", "linguist-generated"]
    printed = _run_git(top, folder, words, given="\0".join(paths)) or []
    # Each path is followed by the attribute's name and value; "set" if the attribute stands without a value.
    return {path for path, value in zip(printed[::3], printed[2::3], strict=True) if value in ("set", "true")}


def _run_git(
    top: str, folder: str, words: list[str], variables: Mapping[str, str] = {}, given: str = ""
) -> list[str] | None:
    """Returns what a git command prints, split at NUL characters, or None if git is missing, slow or fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", **variables}
    command = ["git", f"--git-dir={_empty_repository()}", f"--work-tree={top}", "-C", folder, *words]
    try:
        run = subprocess.run(command, env=environment, input=os.fsencode(given), capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if run.returncode else os.fsdecode(run.stdout).split("\0")[:-1]


def _leads_out(path: str) -> bool:
    """Returns True if a path is absolute, or has the part `.` or `..`."""
    return not {"", ".", ".."}.isdisjoint(path.removesuffix("/").split("/"))


def _empty_repository() -> Path:
    """Returns a bare repository without objects in the user's cache. Creates the repository if it does not exist.

    Raises:
        UserError: the cache cannot be written to.
    """
    target = cache_dir() / "empty.git"
    try:
        for name in ("objects", "refs"):
            (target / name).mkdir(parents=True, exist_ok=True)
        if not (target / "HEAD").exists():
            write_text(target / "HEAD", "ref: refs/heads/main\n")
    except OSError as error:
        raise UserError(
            f"{target}: cannot be created ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from error
    return target
