"""Uses git to list the files in a folder that are tracked or not ignored.

Git reads the ignore files, but never the repository's configuration, hooks or objects, which may specify programs to
run. Instead, git runs in an empty repository in the user's cache, with the folder as the working tree. The
repository's index is only read.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.search.index.store import cache_dir
from soft_trainer.source.repositories import common_dir, git_dir, repository_of
from soft_trainer.source.source_files import read_regular

SECONDS = 10.0  # if git takes longer, it counts as failed
# A path that begins with a slash, or that has the part `.`, `..` or "".
_LEADS_OUT = re.compile(r"(?:\A|[/\0])(?:\.{0,2}/|\.{1,2}\0)")
_SHA256 = re.compile(rb"^\s*objectformat\s*=\s*\"?sha256", re.IGNORECASE | re.MULTILINE)
_MAX_CONFIG_BYTES = 1_000_000
_SIGNS = ("\0/", "//", "./", ".\0")  # every output with such a path has one of them, and looking for them is faster
_LISTED = ("--sparse", "--cached", "--others")
_IGNORED = ("--others", "--ignored", "--directory")


def list_files(folder: str) -> tuple[str, list[str] | None]:
    """Returns the working tree whose ignore files apply in a folder, and the files that git does not ignore there.

    If the enclosing repository lists no files there, as in `.venv/lib`, the user wants to index ignored files, so the
    folder counts as a separate tree.

    A nested repository or a submodule is a single path, which may end with a slash. Deleted files that are still
    tracked are also listed. The list is None if git is not installed or fails.
    """
    found = repository_of(folder)
    if found and found != folder:
        listed = _ls_files(found, folder, _LISTED)
        if listed != []:
            return found, listed
    return folder, _ls_files(folder, folder, _LISTED)


def list_ignored(folder: str) -> list[str]:
    """Returns the paths below a folder that git ignores. A path that ends with a slash stands for a whole folder."""
    top, listed = list_files(folder)
    if listed is None:
        return []
    paths = []
    for path in sorted(_ls_files(top, folder, _IGNORED) or []):
        if paths and paths[-1].endswith("/") and path.startswith(paths[-1]):
            paths.pop()  # git ignores every file in this folder one by one, and lists them too
        paths.append(path)
    return paths


def _ls_files(top: str, folder: str, options: tuple[str, ...]) -> list[str] | None:
    """Returns the output of `git ls-files` in a folder of the working tree `top`, or None if git fails."""
    words = [*options, "--exclude-standard"]
    exclude = os.path.join(common_dir(top), "info", "exclude")
    if os.path.isfile(exclude):
        words.append(f"--exclude-from={exclude}")
    index = os.path.join(git_dir(top), "index")
    try:
        if os.path.isfile(index) and not os.path.islink(index):
            listed = _run_git(top, folder, words, {"GIT_INDEX_FILE": index})
            if listed is not None:
                return listed
        # Without a readable index, git lists tracked files like any other files.
        return _run_git(top, folder, words, {})
    except (OSError, subprocess.TimeoutExpired):
        return None


def _run_git(top: str, folder: str, words: list[str], variables: dict[str, str]) -> list[str] | None:
    config = read_regular(os.path.join(common_dir(top), "config"), _MAX_CONFIG_BYTES)
    # Git misreads an index with hashes of SHA-256 in a repository with SHA-1.
    sha256 = isinstance(config, bytes) and _SHA256.search(config) is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", **variables}
    command = [
        "git",
        f"--git-dir={_empty_repository(sha256)}",
        f"--work-tree={top}",
        "-C",
        folder,
        "ls-files",
        "-z",
        *words,
    ]
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=SECONDS, **quiet)
    if run.returncode:
        return None
    listed = os.fsdecode(run.stdout)
    paths = listed.split("\0")[:-1]
    # Git prints what a repository's index says, and does not check it.
    if any(sign in f"\0{listed}" for sign in _SIGNS):
        paths = [path for path in paths if not _LEADS_OUT.search(f"{path}\0")]
    return paths


def _empty_repository(sha256: bool) -> Path:
    """Returns a bare repository without objects in the user's cache. Creates the repository if it does not exist.

    Raises:
        UserError: the cache cannot be written to.
    """
    name = "empty.git"
    config = "[core]\n\trepositoryformatversion = 0\n\tbare = true\n"
    if sha256:
        name = "empty-sha256.git"
        config = "[core]\n\trepositoryformatversion = 1\n\tbare = true\n[extensions]\n\tobjectformat = sha256\n"
    target = cache_dir() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            repository = Path(made, "empty.git")
            for name in ("objects", "refs"):
                (repository / name).mkdir(parents=True)
            (repository / "HEAD").write_text("ref: refs/heads/main\n")
            (repository / "config").write_text(config)
            try:
                repository.rename(target)
            except OSError:
                if not target.is_dir():  # another process has made it meanwhile
                    raise
    except OSError as error:
        raise UserError(
            f"{target}: cannot be created ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from error
    return target
