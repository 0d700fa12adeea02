"""Reads commits and trees of a git repository with libgit2.

No `git` is started, so no hook, filter, pager or file-system monitor that a repository's configuration names can run,
and nothing is fetched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from soft_trainer.errors import UserError
from soft_trainer.mining.source_files import MAX_DEPTH, MAX_FILE_BYTES, decodable

if TYPE_CHECKING:
    import pygit2

REGULAR_FILES = (0o100644, 0o100755, 0o100664)  # no links, no submodules


def open_repository(path: str | os.PathLike[str]) -> pygit2.Repository:
    """Opens a repository with or without a working tree, whoever owns it.

    Raises:
        UserError: pygit2 is missing, no repository there, one that libgit2 cannot read, or one without a commit.
    """
    git = _pygit2()
    try:
        with _any_owner(git):
            repository = git.Repository(os.fspath(path), git.enums.RepositoryOpenFlag.NO_SEARCH)
        if repository.head_is_unborn:
            raise UserError(f"{path}: the repository has no commit on its current branch")
    except (git.GitError, KeyError, OSError) as error:
        hint = "give the root of a git repository, with its .git, or a bare one"
        if Path(path, ".git").exists() or Path(path, "objects").exists():
            hint = "libgit2 cannot open it; clone it again (`git clone`, without --filter) and give the clone"
        raise UserError(f"{path}: no readable git repository ({' '.join(str(error).split())}); {hint}") from error
    return repository


def _pygit2():
    """The module pygit2, which is an optional dependency."""
    try:
        import pygit2
        import pygit2.enums
    except ImportError as error:
        raise UserError("history needs the extra: pip install 'soft-trainer[history]'") from error
    return pygit2


@contextmanager
def _any_owner(git) -> Iterator[None]:
    """Lets libgit2 open repositories of other users. Its check protects programs that obey a repository's settings."""
    before = git.settings.owner_validation
    git.settings.owner_validation = False
    try:
        yield
    finally:
        git.settings.owner_validation = before


@contextmanager
def reporting_missing_objects(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an object that is missing or damaged into one line.

    Raises:
        UserError: libgit2 could not read an object.
    """
    try:
        with picklable_errors():
            yield
    except OSError as error:
        raise UserError(
            f"{path}: an object of the history cannot be read ({' '.join(str(error).split())}); a partial clone lacks "
            "old files: clone without --filter, or fetch them with `git backfill` or `git fetch --refetch`"
        ) from error


@contextmanager
def picklable_errors() -> Iterator[None]:
    """Raises errors of libgit2 as OSError, which a worker can send to the main process."""
    try:
        yield
    except _pygit2().GitError as error:
        raise OSError(str(error)) from None


def read_object(repository: pygit2.Repository, oid: pygit2.Oid | str):
    """The object of that id.

    Raises:
        OSError: it is missing.
    """
    try:
        return repository[oid]
    except KeyError:
        raise OSError(f"{oid} is missing") from None


def commits_oldest_first(repository: pygit2.Repository) -> list[pygit2.Commit]:
    """The commits that HEAD reaches: parents before children, otherwise by the committer's date."""
    order = _pygit2().enums.SortMode
    return list(repository.walk(repository.head.target, order.TOPOLOGICAL | order.TIME | order.REVERSE))


def ancestors(repository: pygit2.Repository, commit: pygit2.Commit) -> set[str]:
    """The ids of a commit and of all that it descends from."""
    return {str(each.id) for each in repository.walk(commit.id)}


def shallow_ends(repository: pygit2.Repository) -> frozenset[str]:
    """The ids of commits whose parents a shallow clone leaves out; libgit2 shows these as roots."""
    if not repository.is_shallow:
        return frozenset()
    return frozenset(Path(repository.path, "shallow").read_text().split())


def tree_files(repository: pygit2.Repository, tree: pygit2.Tree) -> Iterator[tuple[str, pygit2.Oid]]:
    """Yields (path, blob id) of a tree's regular files in the order of their paths.

    Names that a checkout would refuse are left out.
    """
    stack = [("", tree.id, 0)]
    while stack:
        prefix, oid, depth = stack.pop()
        below = []
        for entry in read_object(repository, oid):
            name = decoded(entry.raw_name)
            if name is None or name in (".", "..", "") or name.lower() == ".git" or "/" in name or "\\" in name:
                continue
            if entry.type_str == "tree" and depth < MAX_DEPTH:
                below.append((f"{prefix}{name}/", entry.id, depth + 1))
            elif entry.type_str == "blob" and entry.filemode in REGULAR_FILES:
                yield prefix + name, entry.id
        stack += reversed(below)


def write_tree(repository: pygit2.Repository, commit: str, folder: str | os.PathLike[str]) -> None:
    """Writes a commit's regular files below `folder`, as they are stored; those over `MAX_FILE_BYTES` are left out."""
    for path, oid in tree_files(repository, read_object(repository, commit).tree):
        content = blob(repository, oid, MAX_FILE_BYTES)
        if isinstance(content, bytes):
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def blob(repository: pygit2.Repository, oid: pygit2.Oid, max_bytes: int) -> bytes | str:
    """The content of a blob, or the reason to skip it."""
    _, size = repository.odb.read_header(oid)
    return read_object(repository, oid).data if size <= max_bytes else f"over {max_bytes:,} bytes"


def source_text(repository: pygit2.Repository, oid: pygit2.Oid, path: str) -> bytes | None:
    """The text of a source file, None if mining skips it."""
    source = blob(repository, oid, MAX_FILE_BYTES)
    source = source if isinstance(source, str) else decodable(source, path)
    return None if isinstance(source, str) else source


def decoded(name: bytes | None) -> str | None:
    """A name or path in UTF-8, None for others."""
    try:
        return name.decode() if name else None
    except UnicodeDecodeError:
        return None
