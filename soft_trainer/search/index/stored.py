"""Lists the indexes in the user's cache, and deletes those of folders that no longer exist."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from soft_trainer.search.index import store

KEPT_DAYS = 30  # for which an index without its folder is kept after its last change, because a disk may be unmounted


class Stored(NamedTuple):
    """An index in the user's cache.

    Attributes:
        path: where it is stored.
        folder: the indexed folder.
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
    """Returns the indexes in the user's cache, ordered by folder."""
    found = []
    for path in (store.cache_dir() / "search").glob("*/"):
        if folder := store.read_settings(path).get("folder"):
            stats = [file.stat() for file in path.iterdir() if file.is_file()]
            size = sum(stat.st_size for stat in stats)
            found.append(Stored(path, folder, size, max((stat.st_mtime for stat in stats), default=0)))
    return sorted(found, key=lambda each: each.folder)


def prune(days: float = 0) -> list[Stored]:
    """Deletes and returns what belongs to folders that no longer exist and has not changed for some days."""
    deleted = []
    for each in list_stored():
        if each.is_gone and time.time() - each.changed >= days * 24 * 3600:
            shutil.rmtree(each.path, ignore_errors=True)
            deleted.append(each)
    return deleted
