"""Lists the indexes and the parsed commits in the user's cache, and deletes those of folders that no longer exist."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from soft_trainer.search.index import store

KEPT_DAYS = 30  # for which an index without its folder is kept after its last change, because a disk may be unmounted


class Stored(NamedTuple):
    """An index, or the parsed commits of a repository, in the user's cache.

    Attributes:
        path: where it is stored: a folder, or a file with commits.
        folder: the indexed folder, or the repository's git directory.
        bytes: the size.
        changed: when it last changed, in seconds since 1970.
    """

    path: Path
    folder: str
    bytes: int
    changed: float

    @property
    def is_gone(self) -> bool:
        """True if the folder does not exist."""
        return not os.path.isdir(self.folder)


def list_stored() -> list[Stored]:
    """Returns the indexes and then the parsed commits in the user's cache, each ordered by folder."""
    found = []
    for path in (store.cache_dir() / "search").glob("*/"):
        if folder := store.read_settings(path).get("folder"):
            found.append(_stored(path, folder, path.iterdir()))
    for path in store.commit_caches().glob("*.sqlite"):
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            found.append(_stored(path, database.execute("SELECT path FROM repository").fetchone()[0], [path]))
    return sorted(found, key=lambda each: (each.path.suffix, each.folder))


def prune(days: float = 0) -> list[Stored]:
    """Deletes and returns what belongs to folders that no longer exist and has not changed for some days."""
    deleted = []
    for each in list_stored():
        if each.is_gone and time.time() - each.changed >= days * 24 * 3600:
            if each.path.is_dir():
                shutil.rmtree(each.path, ignore_errors=True)
            else:
                each.path.unlink(missing_ok=True)
            deleted.append(each)
    return deleted


def _stored(path: Path, folder: str, files: Iterable[Path]) -> Stored:
    stats = [file.stat() for file in files if file.is_file()]
    return Stored(path, folder, sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0))
