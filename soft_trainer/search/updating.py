"""Brings an index up to date with its tree: changed files are read again, missing ones removed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from soft_trainer.search.listing import Listing, Stat, list_tree
from soft_trainer.search.store import (
    compact,
    get_meta,
    insert_postings,
    insert_segment,
    load_segments,
    set_meta,
    transaction,
)
from soft_trainer.search.terms import Batch, FileEntry, Numbers, Reader

BATCH_FILES = 64
MIN_PARALLEL_FILES = 200  # fewer are read sooner than processes start
SEGMENT_POSTINGS = 8_000_000  # held in memory (13 bytes each) before they are written


@dataclass
class Changes:
    """The difference between a tree and its index."""

    listing: Listing
    changed: list[str]
    removed: list[str]
    ignores_changed: bool

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed or self.ignores_changed)


def find_changes(database: sqlite3.Connection, folder: str) -> Changes:
    """Compares sizes and times of a tree's files with those in the index."""
    indexed = {row[0]: row[1:] for row in database.execute("SELECT path, size, changed FROM files")}
    skipped = {row[0]: row[1:] for row in database.execute("SELECT path, reason, size, changed FROM skipped")}
    # those that were read and found to be no text a person wrote have a size
    unfit: dict[str, Stat] = {path: (size, time) for path, (_, size, time) in skipped.items() if size is not None}
    by_name = {path: why for path, (why, size, _) in skipped.items() if size is None and why not in _UNSTABLE}
    known = indexed | unfit
    ignores, patterns = get_meta(database, "ignores"), get_meta(database, "patterns", {})
    listing = list_tree(folder, known, by_name, ignores, **patterns)
    changed = [path for path, status in listing.files.items() if known.get(path) != status]
    removed = [path for path in known if path not in listing.files]
    return Changes(listing, changed, removed, listing.ignores != ignores)


def apply_changes(database: sqlite3.Connection, folder: str, changes: Changes, progress: bool) -> None:
    """Writes changed files, a segment at a time. Each commit leaves a consistent index."""
    with transaction(database):
        _remove(database, changes.removed)
        _note_skipped(database, changes.listing)
    writer = _Writer(database, changes.listing)
    for batch in _read_all(folder, changes.changed, progress):
        writer.add(batch)
    writer.flush()


def tidy(database: sqlite3.Connection) -> None:
    """Drops dead postings if that saves enough, frees unused pages, and empties SQLite's log."""
    with transaction(database):
        compact(database)
    database.executescript("PRAGMA incremental_vacuum")  # `execute` would free a single page
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _read_all(folder: str, paths: list[str], progress: bool) -> Iterator[Batch]:
    """Reads files in batches, in several processes if there are many."""
    batches = [paths[start : start + BATCH_FILES] for start in range(0, len(paths), BATCH_FILES)]
    workers = min(os.cpu_count() or 1, len(batches))
    with ExitStack() as stack:
        if len(paths) >= MIN_PARALLEL_FILES and workers > 1 and _may_fork():
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(workers, _start_worker, (folder,)))
            results: Iterable[Batch] = pool.imap(_read_in_worker, batches)
        else:
            results = map(Reader(folder).read, batches)
        if progress and len(paths) >= MIN_PARALLEL_FILES:
            from tqdm import tqdm  # 50 ms, which a search need not wait for

            unit = f"x{BATCH_FILES} files"
            results = tqdm(results, "Indexing", len(batches), unit=unit, disable=None, leave=False)
        yield from results


def _start_worker(folder: str) -> None:
    global _reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl+C
    _reader = Reader(folder)
    gc.disable()  # reading makes no cycles, and looking for them takes 6 to 10 % of the time


def _read_in_worker(paths: list[str]) -> Batch:
    return _reader.read(paths)


def _may_fork() -> bool:
    """True if a forked process cannot inherit a lock held by another thread, such as one of torch's."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


class _Writer:
    """Gathers batches and writes them as segments, with one vocabulary for all files."""

    def __init__(self, database: sqlite3.Connection, listing: Listing):
        self.database, self.listing = database, listing
        self.numbers = Numbers()
        # of each reader: its number of a term -> the number here
        self.translations: dict[tuple[int, int], np.ndarray] = {}
        self.batches: list[tuple[list[FileEntry], np.ndarray, np.ndarray, np.ndarray]] = []
        self.skipped: dict[str, str] = {}
        self.touched: list[str] = []
        self.postings = 0

    def add(self, batch: Batch) -> None:
        """Adds a batch. Files with unchanged content only get their new time."""
        self.skipped |= batch.skipped
        fresh = [self._is_new(entry) for entry in batch.files]
        self.touched += [entry.path for entry, new in zip(batch.files, fresh, strict=True) if not new]
        pieces = np.repeat(fresh, [len(entry.pieces) for entry in batch.files]).astype(bool)
        kept = pieces[batch.piece] if len(pieces) else np.zeros(0, bool)
        number = np.cumsum(pieces) - 1
        known = self.translations.get(batch.reader)
        if known is None:  # a process that begins a vocabulary no longer needs its last one
            process, known = batch.reader[0], np.zeros(0, np.int32)
            self.translations = {key: value for key, value in self.translations.items() if key[0] != process}
        new = np.array([self.numbers[term] for term in batch.new_terms], np.int32)
        numbers = self.translations[batch.reader] = np.concatenate([known, new])
        files = [entry for entry, new in zip(batch.files, fresh, strict=True) if new]
        term = numbers[batch.term[kept]]
        piece = number[batch.piece[kept]].astype(np.int32) if len(pieces) else np.zeros(0, np.int32)
        self.batches.append((files, term, piece, batch.count[kept]))
        self.postings += len(term)
        if self.postings >= SEGMENT_POSTINGS:
            self.flush()

    def _is_new(self, entry: FileEntry) -> bool:
        row = self.database.execute("SELECT digest, language FROM files WHERE path = ?", (entry.path,)).fetchone()
        return row != (entry.digest, entry.language)

    def flush(self) -> None:
        """Writes the gathered batches as one segment and commits."""
        with transaction(self.database):
            self._flush()
        self.batches, self.skipped, self.touched, self.postings = [], {}, [], 0

    def _flush(self) -> None:
        database, files = self.database, self.listing.files
        for path in self.touched:
            database.execute("UPDATE files SET size = ?, changed = ? WHERE path = ?", (*files[path], path))
        entries = [entry for batch in self.batches for entry in batch[0]]
        _remove(database, [*self.skipped, *(entry.path for entry in entries)])
        rows = [(path, why, *files[path]) for path, why in self.skipped.items()]
        database.executemany("INSERT INTO skipped VALUES (?, ?, ?, ?)", rows)
        if not entries:
            return
        segments = load_segments(database)
        first_piece, first_file = len(segments.lengths), len(segments.languages)
        counts = [len(entry.pieces) for entry in entries]
        languages = _language_numbers(database, entries)
        number = first_piece
        for place, entry in enumerate(entries, first_file):
            row = (place, entry.path, *files[entry.path], entry.language, number, len(entry.pieces), entry.digest)
            database.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            pieces = json.dumps(entry.pieces, ensure_ascii=False, separators=(",", ":"))
            database.execute("INSERT INTO contents VALUES (?, ?, ?)", (place, pieces, entry.text))
            number += len(entry.pieces)
        sizes = [sum(len(entry.pieces) for entry in batch[0]) for batch in self.batches]
        offsets = first_piece + np.cumsum([0, *sizes])
        term = np.concatenate([batch[1] for batch in self.batches])
        piece = np.concatenate([batch[2] + offset for batch, offset in zip(self.batches, offsets[:-1], strict=True)])
        segment = database.execute("SELECT coalesce(max(id) + 1, 0) FROM segments").fetchone()[0]
        count = np.concatenate([batch[3] for batch in self.batches])
        insert_postings(database, segment, list(self.numbers), term, piece, count)
        lengths = np.array([length for entry in entries for length in entry.lengths])
        names = np.array([number for entry in entries for number in entry.name_words])
        owners = np.repeat(np.arange(first_file, first_file + len(entries)), counts)
        traits = np.array([entry.traits for entry in entries])
        insert_segment(database, segment, lengths, owners, names, languages, traits)


def _language_numbers(database: sqlite3.Connection, entries: list[FileEntry]) -> np.ndarray:
    """Numbers each file's language, and adds new languages to the list in the index."""
    names = get_meta(database, "languages", [])
    names += sorted({entry.language for entry in entries} - set(names))
    set_meta(database, "languages", names)
    return np.array([names.index(entry.language) for entry in entries])


def _remove(database: sqlite3.Connection, paths: list[str]) -> None:
    """Removes files. Their pieces stay dead until the segments are rewritten."""
    rows = [(path,) for path in paths]
    database.executemany("INSERT INTO dead SELECT id FROM files WHERE path = ?", rows)
    database.executemany("DELETE FROM contents WHERE file = (SELECT id FROM files WHERE path = ?)", rows)
    database.executemany("DELETE FROM files WHERE path = ?", rows)
    database.executemany("DELETE FROM skipped WHERE path = ?", rows)


def _note_skipped(database: sqlite3.Connection, listing: Listing) -> None:
    """Keeps the ignore files and what was left out by its name, so that the next listing need not match again."""
    set_meta(database, "ignores", listing.ignores)
    database.execute("DELETE FROM skipped WHERE size IS NULL")
    rows = [(path.encode(errors="replace").decode(), reason) for path, reason in listing.skipped.items()]
    database.executemany("INSERT OR IGNORE INTO skipped VALUES (?, ?, NULL, NULL)", rows)


# reasons that may have gone by the next look although the name is the same
_UNSTABLE = {"unreadable", "link", "not a regular file"}
