"""Stores an index in one SQLite file, which is changed only in transactions.

A term's postings list the pieces that contain it. There is one blob per term and segment, so that NumPy can read it
at once. SQLite's FTS5 is not used: over 250,000 pieces, its `bm25()` takes 300 ms for a query of common words, because
it visits every row.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError, for_caller

DATABASE = "index.sqlite"
LOCK = "lock"
ENCODING_LOCK = "encoding.lock"
MEMORY_LOCK = "memory.lock"
FORMAT = 9
# A file's traits: 1 if it is a test; the number of folders above it; the number of words in its own name; 1 if it is
# text rather than source code; 1 if its folder may contain third-party code; 1 if it is generated.
TRAITS = ("test", "depth", "name_parts", "text", "vendored", "generated")
# Above either limit, `compact` drops dead postings and merges the segments.
MAX_DEAD_SHARE = 0.05
MAX_SEGMENTS = 8
SEGMENT_PIECES = 2000  # a smaller index has one segment
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, changed INTEGER, language TEXT,
                    first INTEGER, count INTEGER, digest BLOB);
CREATE TABLE contents (file INTEGER PRIMARY KEY, pieces TEXT, text BLOB);
CREATE TABLE skipped (path TEXT PRIMARY KEY, reason TEXT, size INTEGER, changed INTEGER) WITHOUT ROWID;
CREATE TABLE segments (id INTEGER PRIMARY KEY, lengths BLOB, owners BLOB, kinds BLOB, languages BLOB, traits BLOB);
CREATE TABLE dead (file INTEGER PRIMARY KEY);
CREATE TABLE postings (term TEXT, segment INTEGER, width INTEGER, pieces BLOB, counts BLOB,
                       PRIMARY KEY (term, segment)) WITHOUT ROWID;
CREATE TABLE vectors (file INTEGER PRIMARY KEY, digests BLOB, slots BLOB);
CREATE TABLE commits (number INTEGER PRIMARY KEY, id TEXT UNIQUE, date INTEGER, subject TEXT, functions TEXT);
CREATE TABLE renames (old TEXT, number INTEGER, new TEXT, id TEXT, PRIMARY KEY (old, number)) WITHOUT ROWID;
CREATE TABLE memory (numbers BLOB, lengths BLOB);
CREATE TABLE commit_postings (term TEXT, segment INTEGER, width INTEGER, pieces BLOB, counts BLOB,
                              PRIMARY KEY (term, segment)) WITHOUT ROWID;
"""
_ARRAYS = {"lengths": "<u2", "owners": "<i4", "kinds": "u1", "languages": "u1", "traits": "u1"}
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def cache_dir() -> Path:
    """Returns the package's folder in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soft_trainer"


def default_index_dir(folder: str | os.PathLike[str]) -> Path:
    """Returns a tree's default index folder. It is in the user's cache, because another user may own the tree."""
    real = os.path.realpath(folder)
    name = re.sub(r"\W", "-", os.path.basename(real))[:40]
    return cache_dir() / "search" / f"{name}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}"


def find_index_dir(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the index of a folder or of its nearest indexed parent, or None. Raises UserError without a folder."""
    real = Path(os.path.realpath(folder))
    if not real.is_dir():
        raise UserError(f"{folder}: no such folder; give a source tree or a folder in one")
    for parent in (real, *real.parents):
        if (place := default_index_dir(parent) / DATABASE).is_file():
            return place.parent
    return None


def make_index_dir(index_dir: Path, folder: str) -> None:
    """Creates a folder for an index that only the user can access.

    Raises:
        UserError: the folder is inside the tree, belongs to another user, or cannot be created.
    """
    if os.path.commonpath([os.path.realpath(index_dir), folder]) == folder:
        place = "it lies in the tree that is indexed"
        raise UserError(f"index_dir={index_dir}: {place}; choose a folder outside {folder}")
    try:
        index_dir.parent.mkdir(parents=True, exist_ok=True)
        index_dir.mkdir(mode=0o700, exist_ok=True)
        _check_owner(index_dir)
        index_dir.chmod(0o700)
    except OSError as error:
        reason = error.strerror
        raise UserError(f"{index_dir}: no index can be written there ({reason}); choose another index_dir") from error


def _check_owner(index_dir: Path) -> None:
    """Raises UserError if another user could have written to the index."""
    database = index_dir / DATABASE
    owners = {index_dir.stat().st_uid}
    if os.path.lexists(database):
        owners.add(database.lstat().st_uid)
    if database.is_symlink() or owners != {os.geteuid()}:
        raise UserError(f"{index_dir}: a link or another user's, so it is not trusted; choose another index_dir")


@contextmanager
def write_lock(index_dir: Path, wait: bool = True, name: str = LOCK) -> Iterator[bool]:
    """Locks an index for writing or encoding. Yields False if the lock is taken and `wait` is False."""
    with open(os.open(index_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w") as file:
        try:
            if wait:
                fcntl.flock(file, fcntl.LOCK_EX)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def how_to_index() -> str:
    """Returns the end of a message about a missing or older index."""
    return for_caller("`soft-trainer index DIR` makes one", "`CodeIndex.build(DIR)` makes one")


def connect(index_dir: Path, create: bool = False) -> sqlite3.Connection:
    """Opens the database.

    Args:
        create: whether to make the tables if they do not exist or have an older format.

    Raises:
        UserError: the database is missing or damaged, has another format, or could have been written by another user.
    """
    path = index_dir / DATABASE
    if not create and not path.is_file():
        raise UserError(f"{index_dir}: no index there; {how_to_index()}")
    _check_owner(index_dir)
    # SQLite cannot write its log to a read-only folder. The file is then opened as immutable.
    writable = os.access(index_dir, os.W_OK) and (create or os.access(path, os.W_OK))
    if create and not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))
    if writable:
        mode = "mode=rw"
    else:
        mode = "mode=ro&immutable=1"
    uri = f"{path.absolute().as_uri()}?{mode}"
    database = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
    try:
        for setting in ("trusted_schema = OFF", "cache_size = -65536", "synchronous = NORMAL"):
            database.execute(f"PRAGMA {setting}")
        version = database.execute("PRAGMA user_version").fetchone()[0]
        made = f"{index_dir}: format {version} of the index, and this version of soft_trainer has {FORMAT}"
        if version > FORMAT:
            raise UserError(f"{made}: a newer version made it; upgrade, or delete it and index again")
        if version < FORMAT:
            if not create:
                raise UserError(f"{made}; {how_to_index()}")
            database.execute("PRAGMA auto_vacuum = INCREMENTAL")
            database.execute("PRAGMA journal_mode = WAL")
            with transaction(database):
                for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    database.execute(f'DROP TABLE "{name}"')
                for statement in [*_SCHEMA.split(";"), f"PRAGMA user_version = {FORMAT}"]:
                    database.execute(statement)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
            raise
        raise UserError(f"{path}: {error}; delete {index_dir} and index again") from error
    return database


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Runs its body in a transaction, and rolls it back if the body fails."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:  # a full disk has rolled it back already
            database.execute("ROLLBACK")


def get_meta(database: sqlite3.Connection, key: str, default=None):
    """Returns a value that `set_meta` stored, or `default` if there is none."""
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return json.loads(row[0]) if row else default


def set_meta(database: sqlite3.Connection, key: str, value) -> None:
    """Stores a value as JSON."""
    database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def insert_postings(
    database: sqlite3.Connection,
    segment: int,
    vocabulary: list[str],
    term: np.ndarray,
    piece: np.ndarray,
    count: np.ndarray,
    table: str = "postings",
) -> None:
    """Writes a segment's postings: `vocabulary[term[i]]` occurs `count[i]` times in piece `piece[i]`.

    Piece numbers are delta-encoded. All deltas of a term have the same width, the smallest that fits the largest one.

    Args:
        piece: the piece numbers, in ascending order for each term.
    """
    if not len(term):
        return
    order = np.argsort(term, kind="stable")
    term = term[order]
    piece = piece[order].astype(np.uint32)
    count = count[order]
    starts = np.flatnonzero(np.r_[True, term[1:] != term[:-1]])
    ends = np.r_[starts[1:], len(term)]
    differences = np.diff(piece, prepend=np.uint32(0))
    differences[starts] = 0
    largest = np.maximum.reduceat(differences, starts)
    widths = np.where(largest < 1 << 8, 1, np.where(largest < 1 << 16, 2, 4)).tolist()
    packed = {width: differences.astype(kind).data.cast("B") for width, kind in _WIDTHS.items()}
    counts = count.data.cast("B")
    firsts = piece[starts].astype("<u4").data.cast("B")
    names = term[starts].tolist()

    def rows() -> Iterator[tuple]:
        for place, (start, end, width) in enumerate(zip(starts.tolist(), ends.tolist(), widths, strict=True)):
            head = bytes(firsts[4 * place : 4 * place + 4])
            tail = bytes(packed[width][(start + 1) * width : end * width])
            yield vocabulary[names[place]], segment, width, head + tail, bytes(counts[start:end])

    # If rows are inserted in key order, SQLite does not have to move pages.
    database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)", sorted(rows()))


def unpack(width: int, pieces: bytes) -> np.ndarray:
    """Decodes a term's pieces in one segment. They are in ascending order, int64[n]."""
    first = np.frombuffer(pieces, "<u4", 1)
    differences = np.frombuffer(pieces, _WIDTHS[width], offset=4)
    return np.cumsum(np.concatenate([first, differences]), dtype=np.int64)


def count_segments(database: sqlite3.Connection) -> int:
    """Returns the number of segments."""
    return database.execute("SELECT count(*) FROM segments").fetchone()[0]


def compact(database: sqlite3.Connection) -> None:
    """Merges the segments and renumbers files and pieces, if there are many segments or many dead pieces."""
    segments = Segments(database)
    files = database.execute("SELECT id, first, count FROM files ORDER BY first").fetchall()
    old = np.array(files, np.int64).reshape(-1, 3)
    counts = old[:, 2]
    total = int(counts.sum())
    # Each segment stores its terms again, so a few segments would double the size of a small index.
    few = count_segments(database) <= min(MAX_SEGMENTS, 1 + total // SEGMENT_PIECES)
    if few and len(segments.lengths) <= total * (1 + MAX_DEAD_SHARE):
        return
    firsts = np.cumsum(counts) - counts
    taken = np.repeat(old[:, 1] - firsts, counts) + np.arange(total)
    new_piece = np.full(len(segments.lengths), -1, np.int64)
    new_piece[taken] = np.arange(total)
    vocabulary = []
    piece = [np.zeros(0, np.int32)]
    count = [np.zeros(0, np.uint8)]
    rows = database.execute("SELECT term, width, pieces, counts FROM postings ORDER BY term, segment")
    for name, same in itertools.groupby(rows, operator.itemgetter(0)):
        pieces, times = segments.joined([row[1:] for row in same])
        if len(pieces):
            vocabulary.append(name)
            piece.append(new_piece[pieces].astype(np.int32))
            count.append(times)
    term = np.repeat(np.arange(len(vocabulary), dtype=np.int32), [len(pieces) for pieces in piece[1:]])
    for table in ("postings", "segments", "dead"):
        database.execute(f"DELETE FROM {table}")
    # Files first get negative ids, so that no two files ever have the same id.
    database.execute("CREATE TEMP TABLE moves (new INTEGER, first INTEGER, old INTEGER PRIMARY KEY)")
    moves = zip(range(len(files)), firsts.tolist(), old[:, 0].tolist(), strict=True)
    database.executemany("INSERT INTO moves VALUES (?, ?, ?)", moves)
    for table, key in (("files", "id"), ("contents", "file"), ("vectors", "file")):
        database.execute(f"DELETE FROM {table} WHERE {key} NOT IN (SELECT old FROM moves)")
        database.execute(f"UPDATE {table} SET {key} = -1 - (SELECT new FROM moves WHERE old = {key})")
        database.execute(f"UPDATE {table} SET {key} = -1 - {key}")
    database.execute("UPDATE files SET first = (SELECT first FROM moves WHERE new = id)")
    database.execute("DROP TABLE moves")
    insert_postings(database, 0, vocabulary, term, np.concatenate(piece), np.concatenate(count))
    owners = np.repeat(np.arange(len(files)), counts)
    kept = old[:, 0]
    by_piece = segments.lengths[taken], owners, segments.kinds[taken]
    insert_segment(database, 0, *by_piece, segments.languages[kept], segments.traits[kept])


def insert_segment(database: sqlite3.Connection, number: int, *arrays: Sequence) -> None:
    """Stores the arrays that ranking needs: each piece's length, file and kind; each file's language and traits."""
    blobs = [np.asarray(array).astype(kind).tobytes() for array, kind in zip(arrays, _ARRAYS.values(), strict=True)]
    database.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?)", (number, *blobs))


class Segments:
    """The concatenated arrays of all segments.

    Attributes:
        lengths, owners, kinds: each piece's number of terms, file and kind.
        languages, traits: each file's language and traits.
        live: False for a file that has been removed.
        firsts: each file's first piece, followed by the number of pieces.
    """

    def __init__(self, database: sqlite3.Connection):
        self.database = database
        self.lengths = self._column("lengths")
        self.owners = self._column("owners")
        self.kinds = self._column("kinds")
        self.languages = self._column("languages")
        self.traits = self._column("traits").reshape(-1, len(TRAITS))
        self.live = np.ones(len(self.languages), bool)
        self.live[[file for (file,) in database.execute("SELECT file FROM dead")]] = False
        self.firsts = np.searchsorted(self.owners, np.arange(len(self.languages) + 1))

    def _column(self, name: str) -> np.ndarray:
        """Reads one array across all segments."""
        rows = self.database.execute(f"SELECT {name} FROM segments ORDER BY id")
        return np.frombuffer(b"".join(blob for (blob,) in rows), _ARRAYS[name])

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the live pieces with a term in ascending order, int64[n], and its count in each, float32[n]."""
        query = "SELECT width, pieces, counts FROM postings WHERE term = ? ORDER BY segment"
        rows = self.database.execute(query, (term,)).fetchall()
        if not rows:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        pieces, counts = self.joined(rows)
        return pieces, counts.astype(np.float32)

    def joined(self, rows: list[tuple[int, bytes, bytes]]) -> tuple[np.ndarray, np.ndarray]:
        """Joins a term's postings across segments. Returns the live pieces and the term's count in each, uint8[n].

        Args:
            rows: (width, pieces, counts) for each segment.
        """
        pieces = np.concatenate([unpack(width, blob) for width, blob, _ in rows])
        counts = np.frombuffer(b"".join(row[2] for row in rows), np.uint8)
        if self.live.all():
            return pieces, counts
        live = self.live[self.owners[pieces]]
        return pieces[live], counts[live]


class JoinedSegments:
    """The segments of several indexes, with the same attributes as `Segments`."""

    def __init__(self, parts: tuple[Segments, ...]):
        self.parts = parts
        self.lengths = joined_arrays(parts, "lengths")
        self.kinds = joined_arrays(parts, "kinds")
        self.languages = joined_arrays(parts, "languages")
        self.traits = joined_arrays(parts, "traits")
        self.live = joined_arrays(parts, "live")
        self.first_pieces = []
        owners = []
        files = pieces = 0
        for part in parts:
            self.first_pieces.append(pieces)
            owners.append(part.owners + files)
            files += len(part.languages)
            pieces += len(part.lengths)
        self.owners = np.concatenate(owners)
        self.firsts = np.searchsorted(self.owners, np.arange(files + 1))

    def postings(self, term: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the live pieces in any index that contain a term, and its count in each. See `Segments.postings`."""
        pieces = []
        counts = []
        for part, first in zip(self.parts, self.first_pieces, strict=True):
            own, times = part.postings(term)
            pieces.append(own + first)
            counts.append(times)
        return np.concatenate(pieces), np.concatenate(counts)


@lru_cache(maxsize=2)
def joined_segments(parts: tuple[Segments, ...]) -> Segments | JoinedSegments:
    """Joins the segments of several indexes."""
    if len(parts) == 1:
        return parts[0]
    return JoinedSegments(parts)


def joined_arrays(parts: Sequence, name: str) -> np.ndarray:
    """Concatenates an attribute of several objects."""
    return np.concatenate([getattr(part, name) for part in parts])
