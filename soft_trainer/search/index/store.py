"""Stores an index in one SQLite file, which is changed only in transactions, and its settings in a JSON file.

A term's postings list the chunks that contain the term. There is one blob per term and segment, so that NumPy can read
all of it at once. SQLite's FTS5 is not used, because its `bm25()` visits every row, which takes 300 ms for a query of
common words over 250,000 chunks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import re
import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search.index.words import composed
from soft_trainer.system.files import cache_dir, lock_file, written_aside
from soft_trainer.system.terminal import print_on_main

DATABASE = "index.sqlite"
SETTINGS = "settings.json"  # what the user has chosen: folder, patterns, model, truncate_dim
LOCK = "lock"
ENCODING_LOCK = "encoding.lock"
FORMAT = 21  # increases when chunks, terms, languages or the schema change, so that indexes are built again
# The end of a message about a missing index.
HOW_TO_INDEX = "`soft-trainer index DIR` makes one"
# A file's traits: 1 if it is a test; the number of folders above it; the number of words in its file name; 1 if it is
# text instead of source code; 1 if its folder may contain third-party code; 1 if it is generated; 1 if a
# syntax error may hide functions, 2 if parsing failed or took too long.
TRAITS = ("test", "depth", "name_parts", "text", "vendored", "generated", "broken")
# Above either limit, `compact` drops dead postings and merges the segments.
MAX_DEAD_SHARE = 0.05
MAX_SEGMENTS = 8
SEGMENT_CHUNKS = 2000  # a smaller index has one segment
# `files.first` is the number of a file's first chunk in the postings. The number is never used again.
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, modified INTEGER, changed INTEGER,
                    language TEXT, digest BLOB, first INTEGER, count INTEGER, traits BLOB, lengths BLOB, kinds BLOB,
                    digests BLOB);
CREATE TABLE contents (file INTEGER PRIMARY KEY, chunks TEXT, text BLOB);
CREATE TABLE skipped (path TEXT PRIMARY KEY, reason TEXT, size INTEGER, modified INTEGER, changed INTEGER)
                      WITHOUT ROWID;
CREATE TABLE postings (term TEXT, segment INTEGER, chunks BLOB, counts BLOB, PRIMARY KEY (term, segment))
                       WITHOUT ROWID;
CREATE TABLE vectors (id INTEGER PRIMARY KEY, digests BLOB, rows BLOB);
"""
# The numbers in the columns of `files`.
LENGTHS = np.dtype("<u2")
KINDS = np.dtype("u1")
DIGESTS = np.dtype("<i8")
_TRAITS = np.dtype([(name, "u1") for name in TRAITS])


def real_folder(folder: str | Path) -> str:
    """Returns the absolute path of a folder, with links resolved. Raises UserError if there is no such folder."""
    real = ""
    if os.path.isdir(folder):  # "", such as an unset variable of a shell, is not the current folder
        with suppress(FileNotFoundError):  # the current folder has been removed
            real = os.path.realpath(folder)
    if not real:
        raise UserError(f"{folder or repr(folder)}: no such folder; pass a source tree or a folder inside one")
    return real


def default_index_dir(folder: str | Path) -> Path:
    """Returns a tree's default index folder, which is in the user's cache, because another user may own the tree."""
    real = os.path.realpath(folder)
    name = re.sub(r"\W", "-", os.path.basename(real))[:40]
    return cache_dir() / "search" / f"{name}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}"


def find_index_dir(folder: str | Path) -> Path | None:
    """Returns the index folder of a folder or of its nearest indexed parent, or None if neither is indexed.

    Raises:
        UserError: the folder does not exist.
    """
    real = Path(real_folder(folder))
    for parent in (real, *real.parents):
        index_dir = default_index_dir(parent)
        if (index_dir / DATABASE).is_file() and (index_dir / SETTINGS).is_file():  # the settings are written last
            return index_dir
    return None


def make_index_dir(index_dir: Path, folder: str) -> None:
    """Creates an index folder that only the user can access. An existing folder keeps its permissions.

    Raises:
        UserError: the index folder is inside the tree, belongs to another user, or cannot be created.
    """
    if os.path.commonpath([os.path.realpath(index_dir), folder]) == folder:
        raise UserError(f"index_dir={index_dir}: inside the indexed tree; choose a folder outside {folder}")
    try:
        index_dir.parent.mkdir(parents=True, exist_ok=True)
        index_dir.mkdir(mode=0o700, exist_ok=True)  # a folder that exists keeps its mode; the files have 0600
        _check_owner(index_dir)
    except OSError as error:
        why = f"{index_dir}: cannot write an index there ({error.strerror})"
        raise UserError(f"{why}; choose another index_dir") from error


def _check_owner(index_dir: Path) -> None:
    """Raises UserError if another user could have written to the index."""
    if index_dir.is_symlink() or index_dir.stat().st_uid != os.geteuid():
        raise UserError(
            f"{index_dir}: not trusted, because it is a link or belongs to another user; choose another index_dir"
        )


@contextmanager
def write_lock(index_dir: Path, wait: bool = True, name: str = LOCK) -> Iterator[bool]:
    """Locks an index for writing or encoding. Yields False if the lock is taken and `wait` is False."""
    with open(os.open(index_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w") as file:
        held = lock_file(file)
        if wait and not held:
            print_on_main(f"another process is writing to {index_dir}; waiting for its end")
            held = lock_file(file, wait=True)
        yield held


def read_settings(index_dir: Path) -> dict:
    """Returns the settings of an index, or {} if there is no readable file."""
    with suppress(FileNotFoundError, ValueError):
        settings = json.loads((index_dir / SETTINGS).read_text(encoding="utf-8"))
        if isinstance(settings, dict):
            return settings
    return {}


def write_settings(index_dir: Path, **changes) -> None:
    """Changes some of the settings of an index. The caller holds the write lock.

    Settings are beside the database, because the database may be made again at any time.
    """
    settings = read_settings(index_dir)
    if settings != settings | changes:
        with written_aside(index_dir / SETTINGS) as aside:
            aside.touch(0o600)
            aside.write_text(json.dumps(settings | changes, indent=2) + "\n", encoding="utf-8")


def connect(index_dir: Path, create: bool = False, again: bool = False) -> sqlite3.Connection:
    """Opens the database of an index.

    Args:
        create: whether to make a new database if there is none, or if it has another format.
        again: whether to make a new database in any case.

    Raises:
        UserError: the database is missing, has another format, or may have been written by another user.
    """
    path = index_dir / DATABASE
    if not again and path.is_file():
        _check_owner(index_dir)
        database = _open(path)
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == FORMAT:
            return database
        database.close()
        if not create:
            why = f"the index has format {version}, and this version of soft_trainer reads {FORMAT}"
            raise UserError(f"{index_dir}: {why}; `soft-trainer index DIR` makes it again")
    if not create:
        raise UserError(f"{index_dir}: no index there; {HOW_TO_INDEX}")
    return _create(path)


def _open(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    database = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
    for setting in ("trusted_schema = OFF", "cache_size = -65536", "synchronous = NORMAL"):
        database.execute(f"PRAGMA {setting}")
    return database


def _create(path: Path) -> sqlite3.Connection:
    """Makes an empty database. The settings stay."""
    for file in path.parent.glob(f"{DATABASE}*"):
        file.unlink()
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
    database = _open(path)
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    database.execute("PRAGMA journal_mode = WAL")
    with transaction(database):
        for statement in [*_SCHEMA.split(";"), f"PRAGMA user_version = {FORMAT}"]:
            database.execute(statement)
    return database


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Runs a `with` block in a transaction, and rolls the transaction back if the block fails."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:  # a full disk has rolled it back already
            database.execute("ROLLBACK")


def storable(text: str) -> str:
    """Replaces characters that UTF-8 and SQLite cannot represent. Indexed paths never contain such characters."""
    return text.encode(errors="replace").decode()


def get_meta(database: sqlite3.Connection, key: str, default=None):
    """Returns a value that `set_meta` stored, or `default` if there is none."""
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return json.loads(row[0]) if row else default


def set_meta(database: sqlite3.Connection, key: str, value) -> None:
    """Stores a value under a key, as JSON."""
    database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def insert_postings(
    database: sqlite3.Connection,
    segment: int,
    vocabulary: list[str],
    term: np.ndarray,
    chunk: np.ndarray,
    count: np.ndarray,
) -> None:
    """Writes a segment's postings: `vocabulary[term[i]]` occurs `count[i]` times in chunk `chunk[i]`.

    Args:
        chunk: the chunk numbers, in ascending order for each term.
    """
    order = np.argsort(term, kind="stable")
    term = term[order]
    chunks = chunk[order].astype("<u4")
    counts = count[order].astype(np.uint8)
    starts = np.flatnonzero(np.diff(term, prepend=-1))
    bounds = itertools.pairwise([*starts.tolist(), len(term)])
    rows = []
    for number, (start, end) in zip(term[starts].tolist(), bounds, strict=True):
        rows.append((vocabulary[number], segment, chunks[start:end].tobytes(), counts[start:end].tobytes()))
    rows.sort()  # if rows are inserted in key order, SQLite does not have to move pages
    database.executemany("INSERT INTO postings VALUES (?, ?, ?, ?)", rows)


def decode_postings(rows: Iterable[tuple[bytes, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """Decodes the postings of a term: (chunks, counts) for each segment.

    Returns:
        The chunk numbers, int64[n], in ascending order within each segment, and the term's counts, uint8[n].
    """
    rows = list(rows)
    chunks = np.frombuffer(b"".join(chunks for chunks, _ in rows), "<u4").astype(np.int64)
    return chunks, np.frombuffer(b"".join(counts for _, counts in rows), np.uint8)


def indexed_path(database: sqlite3.Connection, path: str) -> str:
    """Returns the path of the indexed file that a user means by a path, whose letters may be composed differently."""
    path = storable(path)
    if path.isascii():
        return path
    wanted = composed(path)
    same = [known for (known,) in database.execute("SELECT path FROM files") if composed(known) == wanted]
    return max(same, key=path.__eq__, default=path)


def stored(database: sqlite3.Connection) -> tuple[int, int]:
    """Returns how many segments there are, and how many chunks they have, including removed ones."""
    return tuple(get_meta(database, "stored", (0, 0)))


def compact(database: sqlite3.Connection) -> None:
    """Merges the segments and renumbers chunks if there are many segments or dead chunks."""
    segments = Segments(database)
    total = len(segments.lengths)
    # Each segment stores its terms again, so a few segments would double the size of a small index.
    number, chunks = stored(database)
    if number <= min(MAX_SEGMENTS, 1 + total // SEGMENT_CHUNKS) and chunks <= total * (1 + MAX_DEAD_SHARE):
        return
    vocabulary = []
    chunk = [np.zeros(0, np.int32)]
    count = [np.zeros(0, np.uint8)]
    rows = database.execute("SELECT term, chunks, counts FROM postings ORDER BY term, segment")
    for name, same in itertools.groupby(rows, operator.itemgetter(0)):
        chunks, times = segments.decode(row[1:] for row in same)
        if len(chunks):
            vocabulary.append(name)
            chunk.append(chunks.astype(np.int32))
            count.append(times)
    term = np.repeat(np.arange(len(vocabulary), dtype=np.int32), [len(chunks) for chunks in chunk[1:]])
    database.execute("DELETE FROM postings")
    insert_postings(database, 0, vocabulary, term, np.concatenate(chunk), np.concatenate(count))
    firsts = zip(segments.firsts.tolist(), segments.ids, strict=False)
    database.executemany("UPDATE files SET first = ? WHERE id = ?", firsts)
    set_meta(database, "stored", (1, total))


class Segments:
    """The properties of all files and chunks that ranking needs, ordered by path.

    An index that was updated file by file therefore has the same arrays as a new index. Files and chunks are numbered
    in this order. Their numbers in the database are different.

    Attributes:
        paths, ids, languages: each file's path, without the prefix, its id in the database, and its language.
        lengths, owners, kinds: each chunk's number of terms, file and kind.
        digests: the digest of each chunk's text, which identifies its embedding.
        traits: each file's `TRAITS`, by name.
        firsts: each file's first chunk, followed by the number of chunks.

    Args:
        prefix: the start of a path, such as `src/`. Only files whose path starts with `prefix` are used.
    """

    def __init__(self, database: sqlite3.Connection, prefix: str = ""):
        self.database = database
        self.prefix = prefix
        columns = "substr(path, 1 + length(?1)), id, language, first, count, traits, lengths, kinds, digests"
        query = f"SELECT {columns} FROM files WHERE substr(path, 1, length(?1)) = ?1 ORDER BY path"
        rows = database.execute(query, (prefix,)).fetchall()
        self.paths, self.ids, languages, firsts, counts, *blobs = zip(*rows, strict=True) if rows else [()] * 9
        self.languages = np.array(languages, str)
        kinds = (_TRAITS, LENGTHS, KINDS, DIGESTS)
        arrays = [np.frombuffer(b"".join(blob), kind) for blob, kind in zip(blobs, kinds, strict=True)]
        self.traits, self.lengths, self.kinds, self.digests = arrays
        self.firsts = np.append(0, np.cumsum(counts, dtype=np.int64))
        self.owners = np.repeat(np.arange(len(rows), dtype=np.int32), np.diff(self.firsts))
        # Each chunk's number here by its number in the database, or -1.
        self._numbers = np.full(stored(database)[1], -1, np.int64)
        own = np.arange(len(self.lengths))
        self._numbers[own + np.repeat(np.array(firsts, np.int64) - self.firsts[:-1], counts)] = own

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks that contain a term, int64[n], in ascending order, and the term's counts, float32[n]."""
        query = "SELECT chunks, counts FROM postings WHERE term = ? ORDER BY segment"
        chunks, counts = self.decode(self.database.execute(query, (term,)))
        return chunks, counts.astype(np.float32)

    def spans(self, file: int) -> list[tuple[int, int, str]]:
        """Returns the first line, the last line and the qualified name, or "", of each chunk of a file."""
        query = "SELECT chunks FROM contents WHERE file = ?"
        return json.loads(self.database.execute(query, (self.ids[file],)).fetchone()[0])

    def chunks_of(self, path: str) -> list[tuple[int, int]]:
        """Returns (chunk, last line) for each chunk of a file, or [] if the file is not in the segments."""
        inside = path.removeprefix(self.prefix)
        position = bisect_left(self.paths, inside)
        if self.prefix + inside != path or inside not in self.paths[position : position + 1]:
            return []
        first = int(self.firsts[position])
        return [(chunk, end) for chunk, (_, end, _) in enumerate(self.spans(position), first)]

    def names(self, chunks: np.ndarray) -> list[str]:
        """Returns the qualified names of chunks, or "" for chunks without a name."""
        found = []
        for number, same in itertools.groupby(chunks.tolist(), lambda chunk: int(self.owners[chunk])):
            spans = self.spans(number)
            found += [spans[chunk - int(self.firsts[number])][2] for chunk in same]
        return found

    def decode(self, rows: Iterable[tuple[bytes, bytes]]) -> tuple[np.ndarray, np.ndarray]:
        """Does what `decode_postings` does, but with the numbers and the order of the chunks here."""
        chunks, counts = decode_postings(rows)
        chunks = self._numbers[chunks]
        known = np.flatnonzero(chunks >= 0)
        order = known[np.argsort(chunks[known], kind="stable")]
        return chunks[order], counts[order]
