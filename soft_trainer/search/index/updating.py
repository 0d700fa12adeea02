"""Updates an index: reads changed files again and removes missing files."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sqlite3
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from soft_trainer.search.index import store
from soft_trainer.search.index.listing import Listing, Stat, list_tree
from soft_trainer.search.index.parsing import Batch, read_batch
from soft_trainer.system.terminal import progress_bar

BATCH_FILES = 64
MIN_PARALLEL_FILES = 200  # fewer files take less time than starting processes
SEGMENT_POSTINGS = 8_000_000  # postings in memory (13 bytes each) before they are written


class Changes(NamedTuple):
    """The differences between a tree and its index.

    Args:
        any: True if there are any differences, such as a new reason to skip a file.
    """

    listing: Listing
    changed: list[str]
    removed: list[str]
    any: bool


def find_changes(database: sqlite3.Connection, folder: str, patterns: dict[str, list[str]]) -> Changes:
    """Finds the files in a tree whose size or time of change differs from the index.

    Args:
        patterns: the patterns for files to `exclude` and to `include`.
    """
    listing = list_tree(folder, **patterns)
    listing.skipped = {store.storable(path): why for path, why in listing.skipped.items()}
    rows = database.execute("SELECT path, size, modified, changed FROM files")
    known: dict[str, Stat] = {path: (size, modified, changed) for path, size, modified, changed in rows}
    by_name = {}
    for path, why, *status in database.execute("SELECT path, reason, size, modified, changed FROM skipped"):
        if status[0] is None:
            by_name[path] = why
        else:
            known[path] = tuple(status)
    changed = []
    removed = []
    if known != listing.files:  # takes a tenth of the time of looking for the differences
        # In a new index, sorted files have the order in which `Segments` presents them.
        changed = sorted(path for path, status in listing.files.items() if known.get(path) != status)
        removed = list(known.keys() - listing.files.keys())
    return Changes(listing, changed, removed, bool(changed or removed or by_name != listing.skipped))


def apply_changes(database: sqlite3.Connection, folder: str, changes: Changes, progress: bool) -> None:
    """Writes changed files to the index, segment by segment. The index is consistent after every transaction."""
    with store.transaction(database):
        _remove(database, changes.removed)
        database.execute("DELETE FROM skipped WHERE size IS NULL")
        by_name = changes.listing.skipped.items()
        database.executemany("INSERT INTO skipped VALUES (?, ?, NULL, NULL, NULL)", by_name)
    rows = database.execute("SELECT path, digest, language FROM files").fetchall()
    indexed = {path: (digest, language) for path, digest, language in rows}
    vocabulary = defaultdict(count().__next__)
    batches = []
    postings = 0
    files = {path: indexed.get(path) for path in changes.changed}
    for batch in _read_all(folder, files, changes.listing.included, progress):
        # From here on, all batches share one vocabulary.
        numbers = np.array([vocabulary[term] for term in batch.vocabulary], np.int32)
        batches.append(batch._replace(vocabulary=[], term=numbers[batch.term]))
        postings += len(batch.term)
        if postings >= SEGMENT_POSTINGS:
            _write(database, changes.listing.files, list(vocabulary), batches)
            batches = []
            postings = 0
    _write(database, changes.listing.files, list(vocabulary), batches)


def tidy(database: sqlite3.Connection) -> None:
    """Drops dead postings if this saves enough space, and shrinks the database file and SQLite's log."""
    with store.transaction(database):
        store.compact(database)
    database.executescript("PRAGMA incremental_vacuum")  # `execute` would free only one page
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _read_all(folder: str, files: dict[str, tuple | None], included: set[str], progress: bool) -> Iterator[Batch]:
    """Reads files in batches, using several processes if there are many files."""
    rows = list(files.items())
    batches = [dict(rows[start : start + BATCH_FILES]) for start in range(0, len(rows), BATCH_FILES)]
    workers = min(os.cpu_count() or 1, len(batches))
    many = len(files) >= MIN_PARALLEL_FILES
    run = map
    with ExitStack() as stack:
        if many and workers > 1 and _may_fork():
            run = stack.enter_context(multiprocessing.get_context("fork").Pool(workers, _start_worker)).imap
        # Importing the progress bar takes 50 ms, and a search should not wait for it.
        bar = stack.enter_context(progress_bar("Indexing", len(files), "file")) if progress and many else None
        for names, batch in zip(batches, run(partial(read_batch, folder, included=included), batches), strict=True):
            if bar:
                bar.update(len(names))
            yield batch


def _may_fork() -> bool:
    """Returns True if forking is safe, because no other thread, such as one of torch's, can be holding a lock."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl+C
    gc.disable()  # reading creates no cycles, and looking for them takes 6 to 10 % of the time


def _write(database: sqlite3.Connection, stats: dict[str, Stat], vocabulary: list[str], batches: list[Batch]) -> None:
    """Writes batches as one segment and commits. For files with unchanged content, updates only the time."""
    with store.transaction(database):
        for batch in batches:
            _remove(database, [*batch.skipped, *(file.path for file in batch.files)])
            for path in batch.touched:
                update = "UPDATE files SET size = ?, modified = ?, changed = ? WHERE path = ?"
                database.execute(update, (*stats[path], path))
            for path, why in batch.skipped.items():
                database.execute("INSERT INTO skipped VALUES (?, ?, ?, ?, ?)", (path, why, *stats[path]))
        segment, first = store.stored(database)
        before = first
        chunks = []  # of the postings, by their numbers in the database
        for batch in batches:
            chunks.append(batch.chunk + first)
            for file in batch.files:
                size, modified, changed = stats[file.path]
                columns = {"path": file.path, "size": size, "modified": modified, "changed": changed}
                columns |= file.others | {"first": first, "count": file.chunks}
                marks = ", ".join("?" * len(columns))
                insert = f"INSERT INTO files ({', '.join(columns)}) VALUES ({marks})"
                number = database.execute(insert, list(columns.values())).lastrowid
                database.execute("INSERT INTO contents VALUES (?, ?, ?)", (number, file.spans, file.text))
                first += file.chunks
        if first > before:
            terms = np.concatenate([batch.term for batch in batches])
            counts = np.concatenate([batch.count for batch in batches])
            store.insert_postings(database, segment, vocabulary, terms, np.concatenate(chunks), counts)
            store.set_meta(database, "stored", (segment + 1, first))


def _remove(database: sqlite3.Connection, paths: list[str]) -> None:
    """Removes files. Their chunks remain in the segments as dead chunks until the segments are rewritten."""
    rows = [(path,) for path in paths]
    database.executemany("DELETE FROM contents WHERE file = (SELECT id FROM files WHERE path = ?)", rows)
    database.executemany("DELETE FROM files WHERE path = ?", rows)
    database.executemany("DELETE FROM skipped WHERE path = ?", rows)
