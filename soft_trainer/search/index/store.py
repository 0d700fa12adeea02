"""Stores an index in one SQLite file, which is changed only in transactions, and its settings in a JSON file.

A term's postings list the chunks that contain the term. There is one blob per term and segment, so that NumPy can read
all of it at once. SQLite's FTS5 is not used, because its `bm25()` visits every row, which takes 300 ms for a query of
common words over 250,000 chunks.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import operator
import os
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.files import cache_dir, written_aside
from soft_trainer.search.index.words import composed
from soft_trainer.terminal import print_on_main

DATABASE = "index.sqlite"
_DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
SETTINGS = "settings.json"  # what the user has chosen: folder, patterns, model, truncate_dim
LOCK = "lock"
ENCODING_LOCK = "encoding.lock"
FORMAT = 18  # increases when chunks, terms, languages or the schema change, so that indexes are built again
# The end of a message about a missing index.
HOW_TO_INDEX = "`soft-trainer index DIR` makes one"
DAMAGED = "damaged"  # an empty file that a search leaves, so that `soft-trainer index` makes the index again
# A file's traits: 1 if it is a test; the number of folders above it; the number of words in its file name; 1 if it is
# text instead of source code; 1 if its folder may contain third-party code; 1 if it is generated; 1 if some of its
# bytes could not be decoded; 1 if a syntax error may hide functions.
TRAITS = ("test", "depth", "name_parts", "text", "vendored", "generated", "garbled", "broken")
# Above either limit, `compact` drops dead postings and merges the segments.
MAX_DEAD_SHARE = 0.05
MAX_SEGMENTS = 8
SEGMENT_CHUNKS = 2000  # a smaller index has one segment
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, modified INTEGER, changed INTEGER,
                    language TEXT, count INTEGER, digest BLOB);
CREATE TABLE contents (file INTEGER PRIMARY KEY, chunks TEXT, text BLOB);
CREATE TABLE skipped (path TEXT PRIMARY KEY, reason TEXT, size INTEGER, modified INTEGER, changed INTEGER)
                      WITHOUT ROWID;
CREATE TABLE segments (id INTEGER PRIMARY KEY, lengths BLOB, owners BLOB, kinds BLOB, digests BLOB, languages BLOB,
                       traits BLOB);
CREATE TABLE postings (term TEXT, segment INTEGER, width INTEGER, chunks BLOB, counts BLOB,
                       PRIMARY KEY (term, segment)) WITHOUT ROWID;
CREATE TABLE vectors (first INTEGER PRIMARY KEY, digests BLOB);
"""
_ARRAYS = {
    "lengths": "<u2",
    "owners": "<i4",
    "kinds": "u1",
    "digests": "<i8",
    "languages": "<u2",
    "traits": [(name, "u1") for name in TRAITS],
}


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
    files = [file for name in (*_DATABASE_FILES, SETTINGS) if os.path.lexists(file := index_dir / name)]
    owners = {index_dir.stat().st_uid, *(file.lstat().st_uid for file in files)}
    if owners != {os.geteuid()} or any(map(Path.is_symlink, files)):
        raise UserError(
            f"{index_dir}: not trusted, because it is a link or belongs to another user; choose another index_dir"
        )


@contextmanager
def write_lock(index_dir: Path, wait: bool = True, name: str = LOCK) -> Iterator[bool]:
    """Locks an index for writing or encoding. Yields False if the lock is taken and `wait` is False."""
    with open(os.open(index_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                yield False
                return
            print_on_main(f"another process is writing to {index_dir}; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


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


def connect(index_dir: Path, create: bool = False) -> sqlite3.Connection:
    """Opens the database of an index.

    Args:
        create: whether to make a new database if there is none, or if it has an older format or is damaged.

    Raises:
        UserError: the database is missing, has another format, or may have been written by another user.
        DamagedIndex: the database is damaged, and `create` is False.
    """
    if not create:
        if not (index_dir / DATABASE).is_file():
            raise UserError(f"{index_dir}: no index there; {HOW_TO_INDEX}")
        return _open_existing(index_dir)
    if (index_dir / DATABASE).exists():
        with suppress(OlderFormat, DamagedIndex):
            database = _open_existing(index_dir)
            if is_sound(database):
                return database
            database.close()
    return _create(index_dir)


def _open_existing(index_dir: Path) -> sqlite3.Connection:
    """Opens the database of an index, for reading only if it cannot be written to. Raises the errors of `connect`."""
    _check_owner(index_dir)
    if (index_dir / DAMAGED).exists():
        raise DamagedIndex(index_dir)
    path = index_dir / DATABASE
    log = index_dir / f"{DATABASE}-wal"
    try:
        try:
            database, version = _open(path, "rw")  # or for reading only, if the file cannot be written to
        except sqlite3.OperationalError as error:
            if not is_disk_error(error):
                raise
            if log.exists() and log.stat().st_size > 0:
                why = f"cannot read the log ({error}), which contains part of the index"
                raise UserError(
                    f"{index_dir}: {why}; free some space, or search once as the owner of the index"
                ) from error
            # A read-only folder and a full disk have no room for a log, unless SQLite may assume that nobody writes.
            database, version = _open(path, "ro&immutable=1")
    except sqlite3.Error as error:
        if is_disk_error(error):
            raise
        raise DamagedIndex(index_dir) from error
    if version == FORMAT:
        return database
    database.close()
    made = f"{index_dir}: the index has format {version}, but this version of soft_trainer reads {FORMAT}"
    if version > FORMAT:
        raise UserError(f"{made}; upgrade soft_trainer, or delete the index and create it again")
    raise OlderFormat(f"{made}; `soft-trainer index DIR` makes it again")


def _open(path: Path, mode: str) -> tuple[sqlite3.Connection, int]:
    """Opens a database. Returns the connection and the index's format version."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    database = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        for setting in ("trusted_schema = OFF", "cache_size = -65536", "synchronous = NORMAL"):
            database.execute(f"PRAGMA {setting}")
        return database, database.execute("PRAGMA user_version").fetchone()[0]
    except Exception:
        database.close()
        raise


def _create(index_dir: Path) -> sqlite3.Connection:
    """Makes an empty database instead of one that cannot be read, and removes its embeddings. The settings stay."""
    path = index_dir / DATABASE
    for name in (*_DATABASE_FILES, *(path.name for path in index_dir.glob("vectors-*.f16")), DAMAGED):
        (index_dir / name).unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
    database = _open(path, "rw")[0]
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
    database.execute("PRAGMA journal_mode = WAL")
    with transaction(database):
        for statement in [*_SCHEMA.split(";"), f"PRAGMA user_version = {FORMAT}"]:
            database.execute(statement)
    return database


class OlderFormat(UserError):
    """The error for an index that an older version of this package made."""


class DamagedIndex(UserError):
    """The error for a damaged index, which SQLite or a decoder cannot read."""

    def __init__(self, index_dir: Path):
        super().__init__(f"{index_dir}: the index is damaged; `soft-trainer index` makes it again")


# Errors of SQLite, of decoding what it stores, and of embeddings that were cut.
UNREADABLE = (sqlite3.Error, zlib.error, UnicodeDecodeError, json.JSONDecodeError, EOFError)
# Errors about the disk, its permissions or other processes. Every other error of SQLite means a damaged file.
_DISK_CODES = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL,
}  # fmt: skip


def is_disk_error(error: Exception) -> bool:
    """Returns True if an error is about the disk and not about a file's content."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _DISK_CODES
    return isinstance(error, OSError)


def is_sound(database: sqlite3.Connection) -> bool:
    """Returns True if SQLite finds no damage in the structure of a database. Does not decode any content."""
    try:
        return database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
    except sqlite3.Error as error:
        if is_disk_error(error):
            raise
        return False


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

    Chunk numbers are delta-encoded. All of a term's deltas have the same width, which is the smallest that fits them.

    Args:
        chunk: the chunk numbers, in ascending order for each term.
    """
    if not len(term):
        return
    order = np.argsort(term, kind="stable")
    term = term[order]
    chunk = chunk[order].astype(np.uint32)
    count = count[order]
    starts = np.flatnonzero(np.r_[True, term[1:] != term[:-1]])
    ends = np.r_[starts[1:], len(term)]
    differences = np.diff(chunk, prepend=np.uint32(0))
    differences[starts] = 0
    largest = np.maximum.reduceat(differences, starts)
    widths = np.where(largest < 1 << 8, 1, np.where(largest < 1 << 16, 2, 4)).tolist()
    packed = {width: differences.astype(f"<u{width}").data.cast("B") for width in (1, 2, 4)}
    counts = count.data.cast("B")
    firsts = chunk[starts].astype("<u4").data.cast("B")
    names = term[starts].tolist()

    def rows() -> Iterator[tuple]:
        for number, (start, end, width) in enumerate(zip(starts.tolist(), ends.tolist(), widths, strict=True)):
            head = bytes(firsts[4 * number : 4 * number + 4])
            tail = bytes(packed[width][(start + 1) * width : end * width])
            yield vocabulary[names[number]], segment, width, head + tail, bytes(counts[start:end])

    # If rows are inserted in key order, SQLite does not have to move pages.
    database.executemany("INSERT INTO postings VALUES (?, ?, ?, ?, ?)", sorted(rows()))


def decode_postings(rows: Iterable[tuple[int, bytes, bytes]]) -> tuple[np.ndarray, np.ndarray]:
    """Decodes the postings of a term: (width, chunks, counts) for each segment.

    Returns:
        The chunk numbers, int64[n], in ascending order within each segment, and the term's counts, uint8[n].
    """
    chunks = [np.zeros(0, np.int64)]
    counts = b""
    for width, blob, times in rows:
        first = np.frombuffer(blob, "<u4", 1)
        differences = np.frombuffer(blob, f"<u{width}", offset=4)
        chunks.append(np.cumsum(np.concatenate([first, differences]), dtype=np.int64))
        counts += times
    return np.concatenate(chunks), np.frombuffer(counts, np.uint8)


def count_stored(database: sqlite3.Connection) -> tuple[int, int, int]:
    """Returns how many segments there are, and their files and chunks, including removed files and chunks."""
    sums = "coalesce(sum(length(languages)), 0) / 2, coalesce(sum(length(lengths)), 0) / 2"
    return database.execute(f"SELECT count(*), {sums} FROM segments").fetchone()


def files_below(database: sqlite3.Connection, prefix: str) -> dict[str, int]:
    """Returns the ids of the files whose path begins with `prefix`, by the rest of the path, in the order of paths."""
    query = "SELECT substr(path, 1 + length(?1)), id FROM files WHERE substr(path, 1, length(?1)) = ?1 ORDER BY path"
    return dict(database.execute(query, (prefix,)))


def indexed_path(database: sqlite3.Connection, path: str) -> str:
    """Returns the path of the indexed file that a user means by a path, whose letters may be composed differently."""
    path = storable(path)
    if path.isascii():
        return path
    wanted = composed(path)
    same = [known for (known,) in database.execute("SELECT path FROM files") if composed(known) == wanted]
    return max(same, key=path.__eq__, default=path)


def compact(database: sqlite3.Connection) -> None:
    """Merges the segments and renumbers files and chunks if there are many segments or dead chunks."""
    segments = Segments(database)
    total = len(segments.lengths)
    # Each segment stores its terms again, so a few segments would double the size of a small index.
    number, _, stored = count_stored(database)
    if number <= min(MAX_SEGMENTS, 1 + total // SEGMENT_CHUNKS) and stored <= total * (1 + MAX_DEAD_SHARE):
        return
    vocabulary = []
    chunk = [np.zeros(0, np.int32)]
    count = [np.zeros(0, np.uint8)]
    rows = database.execute("SELECT term, width, chunks, counts FROM postings ORDER BY term, segment")
    for name, same in itertools.groupby(rows, operator.itemgetter(0)):
        chunks, times = segments.decode(row[1:] for row in same)
        if len(chunks):
            vocabulary.append(name)
            chunk.append(chunks.astype(np.int32))
            count.append(times)
    term = np.repeat(np.arange(len(vocabulary), dtype=np.int32), [len(chunks) for chunks in chunk[1:]])
    for table in ("postings", "segments"):
        database.execute(f"DELETE FROM {table}")
    # Files first get negative ids, so that no two files ever have the same id.
    database.execute("CREATE TEMP TABLE moves (new INTEGER, old INTEGER PRIMARY KEY)")
    database.executemany("INSERT INTO moves VALUES (?, ?)", enumerate(segments.ids.tolist()))
    for table, key in (("files", "id"), ("contents", "file")):
        database.execute(f"DELETE FROM {table} WHERE {key} NOT IN (SELECT old FROM moves)")
        database.execute(f"UPDATE {table} SET {key} = -1 - (SELECT new FROM moves WHERE old = {key})")
        database.execute(f"UPDATE {table} SET {key} = -1 - {key}")
    database.execute("DROP TABLE moves")
    insert_postings(database, 0, vocabulary, term, np.concatenate(chunk), np.concatenate(count))
    insert_segment(database, 0, *(getattr(segments, name) for name in _ARRAYS))


def insert_segment(database: sqlite3.Connection, number: int, *arrays: Sequence) -> None:
    """Stores the arrays for ranking, in the order of `_ARRAYS`."""
    blobs = [np.array(array, kind).tobytes() for array, kind in zip(arrays, _ARRAYS.values(), strict=True)]
    database.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", (number, *blobs))


class Segments:
    """The arrays of all segments, concatenated and ordered by path, without removed files.

    An index that was updated file by file therefore has the same arrays as a new index. Files and chunks are numbered
    in this order. Their numbers in the database are different.

    Attributes:
        paths, ids: each file's path, without the prefix, and its id in the database.
        lengths, owners, kinds: each chunk's number of terms, file and kind.
        digests: the digest of each chunk's text, which identifies its embedding.
        languages: each file's language.
        traits: each file's `TRAITS`, by name.
        firsts: each file's first chunk, followed by the number of chunks.

    Args:
        prefix: the start of a path, such as `src/`. Only files whose path starts with `prefix` are used.
    """

    def __init__(self, database: sqlite3.Connection, prefix: str = ""):
        self.database = database
        files = files_below(database, prefix)
        self.paths = list(files)
        self.ids = np.array(list(files.values()), np.int64)
        columns = map(self._column, _ARRAYS)
        self.lengths, self.owners, self.kinds, self.digests, self.languages, self.traits = columns
        stored_files = len(self.languages)
        self.firsts = np.searchsorted(self.owners, np.arange(stored_files + 1))
        self._numbers = None  # each stored chunk's number here, or -1; None if they are the same
        if not np.array_equal(self.ids, np.arange(stored_files)):
            self._select()

    def _select(self) -> None:
        """Selects and reorders the files in `ids` and their chunks."""
        counts = self.firsts[self.ids + 1] - self.firsts[self.ids]
        firsts = np.append(0, np.cumsum(counts))
        total = int(firsts[-1])
        stored = np.repeat(self.firsts[self.ids] - firsts[:-1], counts) + np.arange(total)
        self._numbers = np.full(len(self.lengths), -1, np.int64)
        self._numbers[stored] = np.arange(total)
        self.lengths = self.lengths[stored]
        self.kinds = self.kinds[stored]
        self.digests = self.digests[stored]
        self.owners = np.repeat(np.arange(len(self.ids), dtype=np.int32), counts)
        self.languages = self.languages[self.ids]
        self.traits = self.traits[self.ids]
        self.firsts = firsts

    def _column(self, name: str) -> np.ndarray:
        """Reads one array across all segments."""
        rows = self.database.execute(f"SELECT {name} FROM segments ORDER BY id")
        return np.frombuffer(b"".join(blob for (blob,) in rows), _ARRAYS[name])

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks that contain a term, int64[n], in ascending order, and the term's counts, float32[n]."""
        query = "SELECT width, chunks, counts FROM postings WHERE term = ? ORDER BY segment"
        chunks, counts = self.decode(self.database.execute(query, (term,)))
        return chunks, counts.astype(np.float32)

    def chunks_of(self, path: str) -> list[tuple[int, int]]:
        """Returns (chunk, last line) for each chunk of a file, or [] if the file is not in the segments."""
        query = "SELECT id, chunks FROM files JOIN contents ON file = id WHERE path = ?"
        for file, spans in self.database.execute(query, (path,)):
            for number in np.flatnonzero(self.ids == file):
                first = int(self.firsts[number])
                return [(chunk, end) for chunk, (_, end, _) in enumerate(json.loads(spans), first)]
        return []

    def names(self, chunks: np.ndarray) -> list[str]:
        """Returns the qualified names of chunks, or "" for chunks without a name."""
        query = "SELECT chunks FROM contents WHERE file = ?"
        found = []
        for number, same in itertools.groupby(chunks.tolist(), lambda chunk: int(self.owners[chunk])):
            spans = json.loads(self.database.execute(query, (int(self.ids[number]),)).fetchone()[0])
            found += [spans[chunk - int(self.firsts[number])][2] for chunk in same]
        return found

    def decode(self, rows: Iterable[tuple[int, bytes, bytes]]) -> tuple[np.ndarray, np.ndarray]:
        """Does what `decode_postings` does, but with the numbers and the order of the chunks here."""
        chunks, counts = decode_postings(rows)
        if self._numbers is None:
            return chunks, counts
        chunks = self._numbers[chunks]
        known = np.flatnonzero(chunks >= 0)
        order = known[np.argsort(chunks[known], kind="stable")]
        return chunks[order], counts[order]


class JoinedSegments:
    """The segments of several indexes, with the same attributes as `Segments`."""

    def __init__(self, parts: tuple[Segments, ...]):
        self.parts = parts
        self.lengths = joined_arrays(parts, "lengths")
        self.kinds = joined_arrays(parts, "kinds")
        self.languages = joined_arrays(parts, "languages")
        self.traits = joined_arrays(parts, "traits")
        self.paths = list(itertools.chain.from_iterable(part.paths for part in parts))
        self.first_chunks = []
        owners = []
        files = chunks = 0
        for part in parts:
            self.first_chunks.append(chunks)
            owners.append(part.owners + files)
            files += len(part.languages)
            chunks += len(part.lengths)
        self.owners = np.concatenate(owners)
        self.firsts = np.searchsorted(self.owners, np.arange(files + 1))

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks of all indexes that contain a term, and the term's counts. See `Segments.postings`."""
        chunks = []
        counts = []
        for part, first in zip(self.parts, self.first_chunks, strict=True):
            own, times = part.postings(term)
            chunks.append(own + first)
            counts.append(times)
        return np.concatenate(chunks), np.concatenate(counts)

    def names(self, chunks: np.ndarray) -> list[str]:
        """Returns the qualified names of `chunks`, which must be in ascending order. See `Segments.names`."""
        found = []
        for part, first in zip(self.parts, self.first_chunks, strict=True):
            own = chunks - first
            found += part.names(own[(own >= 0) & (own < len(part.lengths))])
        return found


@lru_cache(maxsize=2)
def joined_segments(parts: tuple[Segments, ...]) -> Segments | JoinedSegments:
    """Joins the segments of several indexes."""
    if len(parts) == 1:
        return parts[0]
    return JoinedSegments(parts)


def joined_arrays(parts: Sequence, name: str) -> np.ndarray:
    """Concatenates the arrays in the attribute `name` of several objects."""
    return np.concatenate([getattr(part, name) for part in parts])
