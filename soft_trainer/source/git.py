"""Reads a git repository's commits and trees with libgit2.

`git` is never run. So a repository's configuration cannot start a hook, filter, pager or file-system monitor, and
nothing is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from soft_trainer.errors import UserError, extra_needed
from soft_trainer.source.extra import READING
from soft_trainer.source.repositories import common_dir, git_dir
from soft_trainer.source.source_files import MAX_DEPTH, MAX_FILE_BYTES, decoded, read_regular

try:
    import pygit2
    from pygit2.enums import RepositoryOpenFlag, SortMode
except ModuleNotFoundError as error:
    raise UserError(extra_needed(READING, "search")) from error

REFETCH = "`git fetch --refetch --no-filter` fetches what a partial clone lacks"
_MAX_SHALLOW_BYTES = 10_000_000
REGULAR_FILES = (0o100644, 0o100755, 0o100664)  # no links, no submodules


def open_repository(path: str | Path) -> pygit2.Repository:
    """Opens a repository with or without a working tree, whoever owns it.

    Raises:
        UserError: libgit2 cannot read the folder as a repository, one of git's files is not a regular file, or the
            repository has no commit.
    """
    own = git_dir(path)
    shared = common_dir(path)
    files = [os.path.join(own, name) for name in ("HEAD", "commondir")]
    files += [os.path.join(shared, name) for name in ("config", "packed-refs", "shallow")]
    pointer = os.path.join(path, ".git")
    if not os.path.isdir(pointer):
        files.append(pointer)
    for file in files:  # libgit2 would wait forever for a pipe
        if os.path.exists(file) and not os.path.isfile(file):
            raise UserError(f"{file}: not a regular file, so the repository was not read; remove it or clone again")
    before = pygit2.settings.owner_validation
    # The validation protects programs that obey a repository's settings. This package ignores the settings.
    pygit2.settings.owner_validation = False
    try:
        repository = pygit2.Repository(os.fspath(path), RepositoryOpenFlag.NO_SEARCH)
        if repository.head_is_unborn:
            raise UserError(f"{path}: the repository has no commit on its current branch")
    except (pygit2.GitError, KeyError, OSError) as error:
        hint = "pass the root of a git repository (the folder with .git), or a bare repository"
        if Path(path, ".git").exists() or Path(path, "objects").exists():
            hint = "clone it again (`git clone`, without --filter), because libgit2 cannot open it"
        if "sha256" in str(error):
            hint = "libgit2 reads only repositories with SHA-1; `--history false` indexes without commits"
        if "refstorage" in str(error).lower():
            hint = "libgit2 does not read reftables; clone it with `git clone --ref-format=files`"
        raise UserError(f"{path}: not a readable git repository ({' '.join(str(error).split())}); {hint}") from error
    finally:
        pygit2.settings.owner_validation = before
    return repository


def shallow_ends(path: str | Path) -> str:
    """Returns the ids of the commits at which a shallow clone ends, one per line, or "" for a full clone."""
    ends = read_regular(os.path.join(common_dir(path), "shallow"), _MAX_SHALLOW_BYTES)
    if isinstance(ends, str):
        return ""
    return ends.decode(errors="replace")


@contextmanager
def reporting_missing_objects(path: str | Path) -> Iterator[None]:
    """Turns an error about a missing or damaged git object into a one-line error.

    Raises:
        UserError: libgit2 could not read an object.
    """
    try:
        yield
    except (pygit2.GitError, OSError) as error:
        raise UserError(
            f"{path}: an object in the history cannot be read ({' '.join(str(error).split())}). Clone it again. "
            f"{REFETCH}"
        ) from error


def read_object(repository: pygit2.Repository, oid: pygit2.Oid | str):
    """Returns the git object with the id `oid`.

    Raises:
        OSError: the object is missing.
    """
    try:
        return repository[oid]
    except KeyError:
        raise OSError(f"object {oid} is missing") from None


def message_of(commit: pygit2.Commit) -> str:
    """Returns a commit's message, decoded as git does: by the header `encoding`, or as UTF-8."""
    try:
        return commit.raw_message.decode(commit.message_encoding or "utf-8")
    except (LookupError, UnicodeError):  # an unknown encoding, or another one than the header says
        return commit.raw_message.decode(errors="replace")


def commits_oldest_first(repository: pygit2.Repository, tip: str | None = None, known: str = "") -> list[str]:
    """Returns the ids of the commits that can be reached from `tip` (by default HEAD) but not from `known`.

    Parents come before their children. Otherwise, commits are ordered by committer date.
    """
    order = SortMode.TOPOLOGICAL | SortMode.TIME | SortMode.REVERSE
    tip = tip or repository.head.target
    if shallow_ends(repository.path):  # libgit2 can walk a shallow clone only in the folder of all its working trees
        repository = open_repository(common_dir(repository.path))
    walker = repository.walk(tip, order)
    if known:
        walker.hide(known)
    return [str(commit.id) for commit in walker]


def missing_objects_state(repository: pygit2.Repository) -> list[str]:
    """Returns the names of a partial clone's packs, or [] for any other repository.

    The names change when missing objects are fetched.
    """
    packs = Path(repository.path, "objects", "pack")
    if not any(packs.glob("*.promisor")):
        return []
    return sorted(path.name for path in packs.glob("*.pack"))


def tree_files(repository: pygit2.Repository, commit: str) -> Iterator[tuple[str, pygit2.Oid]]:
    """Yields the path and blob id of each regular file in a commit's tree, ordered by path.

    Files whose names git would refuse to check out are excluded.
    """
    stack = [("", read_object(repository, commit).tree.id, 0)]
    while stack:
        prefix, oid, depth = stack.pop()
        below = []
        for entry in read_object(repository, oid):
            name = decoded(entry.raw_name)
            if name in (None, "", ".", "..") or name.lower() == ".git" or "/" in name or "\\" in name:
                continue
            if entry.type_str == "tree" and depth < MAX_DEPTH:
                below.append((f"{prefix}{name}/", entry.id, depth + 1))
            elif entry.type_str == "blob" and entry.filemode in REGULAR_FILES:
                yield prefix + name, entry.id
        stack += reversed(below)


def write_tree(repository: pygit2.Repository, commit: str, folder: str | Path) -> None:
    """Writes a commit's regular files to `folder`. Skips files that are missing or over `MAX_FILE_BYTES`."""
    for path, oid in tree_files(repository, commit):
        content = None
        with suppress(pygit2.GitError, OSError):
            content = blob(repository, oid)
        if isinstance(content, bytes):
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def blob(repository: pygit2.Repository, oid: pygit2.Oid) -> bytes | str:
    """Returns a blob's content, or the reason to skip the blob.

    Raises:
        GitError: the blob is missing.
    """
    _, size = repository.odb.read_header(oid)
    if size <= MAX_FILE_BYTES:
        return read_object(repository, oid).data
    return f"over {MAX_FILE_BYTES:,} bytes"
