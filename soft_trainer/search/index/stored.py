"""Deletes indexes of folders that no longer exist from the user's cache."""

from __future__ import annotations

import os
import shutil
import time

from soft_trainer.search.index import store
from soft_trainer.system.files import cache_dir

KEPT_DAYS = 30  # for which an index without its folder is kept after its last change, because a disk may be unmounted


def prune() -> None:
    """Deletes the indexes of folders that no longer exist, if they have not changed for some days."""
    for path in (cache_dir() / "search").glob("*/"):
        folder = store.read_settings(path).get("folder")
        if folder and not os.path.isdir(folder):
            changed = max(file.stat().st_mtime for file in path.iterdir())
            if time.time() - changed > KEPT_DAYS * 24 * 3600:
                shutil.rmtree(path, ignore_errors=True)
