"""The index on disk: one SQLite file. What a transaction has not committed was never there.

Postings (which pieces hold a term) are blobs, one a term and segment, that NumPy reads at once. FTS5 was measured
against this: over 250,000 pieces its `bm25()` takes 300 ms for a question of common words, since it visits row by row.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError

DATABASE, LOCK = "index.sqlite", "lock"
FORMAT = 1
# of each file: 1 for a test; folders above it; parts of its own name
TRAITS = ("test", "depth", "name_parts")
# more dead postings than this are cleared away, and more segments than this are joined
MAX_DEAD_SHARE = 0.05
MAX_SEGMENTS = 8
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE files (id INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, changed INTEGER, language TEXT,
                    first INTEGER, count INTEGER, digest BLOB);
CREATE TABLE contents (file INTEGER PRIMARY KEY, pieces TEXT, text BLOB);
CREATE TABLE skipped (path TEXT PRIMARY KEY, reason TEXT, size INTEGER, changed INTEGER) WITHOUT ROWID;
CREATE TABLE segments (id INTEGER PRIMARY KEY, postings INTEGER, first_piece INTEGER, first_file INTEGER,
                       lengths BLOB, owners BLOB, languages BLOB, traits BLOB);
CREATE TABLE dead (file INTEGER PRIMARY KEY);
CREATE TABLE postings (term TEXT, segment INTEGER, width INTEGER, pieces BLOB, counts BLOB,
                       PRIMARY KEY (term, segment)) WITHOUT ROWID;
CREATE TABLE vectors (file INTEGER PRIMARY KEY, digests BLOB, slots BLOB);
"""
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def default_index_dir(folder: str | os.PathLike[str]) -> Path:
    """The place of a folder's index in the user's cache directory: never in the tree, whose owner may be another."""
    import hashlib

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    real = os.path.realpath(folder)
    name = "".join(letter if letter.isalnum() else "-" for letter in os.path.basename(real))[:40]
    return cache / "soft_trainer" / "search" / f"{name}-{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}"


def find_index_dir(folder: str | os.PathLike[str]) -> Path:
    """The default place of the index of a folder, or of the nearest folder above it that has one.

    Raises:
        UserError: none has one.
    """
    real = Path(os.path.realpath(folder))
    for parent in (real, *real.parents):
        if (place := default_index_dir(parent)) and (place / DATABASE).is_file():
            return place
    raise UserError(f"{folder}: no index yet; make one with `soft-trainer index {folder}`")


def make_index_dir(index_dir: Path, folder: str) -> None:
    """Make a private folder for an index.

    Raises:
        UserError: it lies inside the tree, belongs to somebody else, or cannot be made.
    """
    real = os.path.realpath(index_dir)
    if os.path.commonpath([real, folder]) == folder:
        raise UserError(
            f"index_dir={index_dir}: it lies in the tree that is indexed; choose a folder outside {folder}"
        )
    try:
        index_dir.parent.mkdir(parents=True, exist_ok=True)
        index_dir.mkdir(mode=0o700, exist_ok=True)
        if index_dir.stat().st_uid == os.geteuid():
            index_dir.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"{index_dir}: the index cannot be written there ({error.strerror}); choose another index_dir"
        ) from error
    _check_owner(index_dir)


def _check_owner(index_dir: Path) -> None:
    """Raise a UserError where somebody else could have written the index."""
    database = index_dir / DATABASE
    for path in (index_dir, database):
        if os.path.lexists(path) and (path.stat() if path == index_dir else path.lstat()).st_uid != os.geteuid():
            raise UserError(f"{path}: it belongs to somebody else, so it is not trusted; choose another index_dir")
    if database.is_symlink():
        raise UserError(f"{database}: it is a link, so it is not trusted; choose another index_dir")


@contextmanager
def write_lock(index_dir: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the one right to write an index; gives False where another process has it and `wait` is False."""
    with open(os.open(index_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def connect(index_dir: Path, create: bool = False) -> sqlite3.Connection:
    """Open an index.

    Raises:
        UserError: there is none, it is not readable, or a newer version of the package has made it.
    """
    path = index_dir / DATABASE
    if not create and not path.is_file():
        raise UserError(f"{index_dir}: no index there; make one with `soft-trainer index DIR`")
    _check_owner(index_dir)
    try:
        return _connect(path, create)
    except sqlite3.Error as error:
        raise UserError(f"{path}: {error}; delete {index_dir} and index again") from error


def _connect(path: Path, create: bool) -> sqlite3.Connection:
    # A folder that may not be written has no room for SQLite's log: the file is then read as it is.
    writable = os.access(path.parent, os.W_OK)
    mode = "rwc" if create else "rw" if writable else "ro&immutable=1"
    if create and not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    uri = path.absolute().as_uri() + f"?mode={mode}"
    database = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA trusted_schema = OFF")
    database.execute("PRAGMA cache_size = -65536")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT:
        raise UserError(
            f"{path.parent}: a newer version of soft_trainer made this index (format {version}, here {FORMAT}); "
            "upgrade, or delete it and index again"
        )
    if writable:
        _prepare(database, version, create)
    return database


def _prepare(database: sqlite3.Connection, version: int, create: bool) -> None:
    """Make the tables; of an older format only the knowledge which folder it was remains."""
    if version == 0 and create:
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA journal_size_limit = 0")
    if version < FORMAT and create:
        with transaction(database):
            if database.execute("PRAGMA user_version").fetchone()[0] < FORMAT:
                for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    database.execute(f'DROP TABLE "{name}"')
                for statement in _SCHEMA.split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {FORMAT}")


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def get_meta(database: sqlite3.Connection, key: str, default=None):
    """A value that was kept with `set_meta`."""
    row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return json.loads(row[0]) if row else default


def set_meta(database: sqlite3.Connection, key: str, value) -> None:
    """Keep a value as JSON."""
    database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def insert_postings(
    database: sqlite3.Connection,
    segment: int,
    vocabulary: list[str],
    term: np.ndarray,
    piece: np.ndarray,
    count: np.ndarray,
) -> None:
    """Write a segment's postings: entry i says that `vocabulary[term[i]]` is `count[i]` times in piece `piece[i]`.

    Pieces are in ascending order. They are kept as differences, in as few bytes as the largest needs.
    """
    if not len(term):
        return
    order = np.argsort(term, kind="stable")
    term, piece, count = term[order], piece[order].astype(np.uint32), count[order]
    starts = np.flatnonzero(np.r_[True, term[1:] != term[:-1]])
    ends = np.r_[starts[1:], len(term)]
    differences = np.diff(piece, prepend=np.uint32(0))
    differences[starts] = 0
    largest = np.maximum.reduceat(differences, starts)
    widths = np.where(largest < 1 << 8, 1, np.where(largest < 1 << 16, 2, 4)).tolist()
    packed = {width: differences.astype(kind).data.cast("B") for width, kind in _WIDTHS.items()}
    counts, firsts = count.data.cast("B"), piece[starts].astype("<u4").data.cast("B")
    names = term[starts].tolist()

    def rows() -> Iterator[tuple]:
        for place, (start, end, width) in enumerate(zip(starts.tolist(), ends.tolist(), widths, strict=True)):
            head = bytes(firsts[4 * place : 4 * place + 4])
            tail = bytes(packed[width][(start + 1) * width : end * width])
            yield vocabulary[names[place]], segment, width, head + tail, bytes(counts[start:end])

    # in the order of the key, or SQLite moves every page about
    database.executemany("INSERT INTO postings VALUES (?, ?, ?, ?, ?)", sorted(rows()))


def unpack(width: int, pieces: bytes) -> np.ndarray:
    """The numbers of the pieces of one term and segment, int64[n], ascending."""
    first = int.from_bytes(pieces[:4], "little")
    differences = np.frombuffer(pieces, _WIDTHS[width], offset=4)
    numbers = np.empty(len(differences) + 1, np.int64)
    numbers[0] = first
    np.cumsum(differences, out=numbers[1:])
    numbers[1:] += first
    return numbers


def compact(database: sqlite3.Connection) -> bool:
    """Join segments and clear dead files away where that pays; returns whether it did. Inside a transaction."""
    segments = database.execute("SELECT id, postings FROM segments ORDER BY id").fetchall()
    dead = database.execute("SELECT count(*), max(id) FROM files").fetchone()
    pieces = database.execute("SELECT sum(count) FROM files").fetchone()[0] or 0
    rows = database.execute("SELECT sum(length(lengths)) / 2 FROM segments").fetchone()[0] or 0
    if len(segments) <= MAX_SEGMENTS and rows <= pieces * (1 + MAX_DEAD_SHARE) + 50:
        return False
    del dead
    _rewrite(database)
    return True


def _rewrite(database: sqlite3.Connection) -> None:
    """Write all live postings again as one segment, with files and pieces numbered anew."""
    files = database.execute("SELECT id, first, count FROM files ORDER BY first").fetchall()
    segments = load_segments(database)
    old = np.array(files, np.int64).reshape(-1, 3)
    counts = old[:, 2]
    firsts = np.cumsum(counts) - counts
    new_piece = np.full(len(segments.lengths), -1, np.int64)
    taken = np.repeat(old[:, 1] - firsts, counts) + np.arange(counts.sum())
    new_piece[taken] = np.arange(counts.sum())
    vocabulary, term, piece, count = [], [], [], []
    query = "SELECT term, width, pieces, counts FROM postings ORDER BY term, segment"
    for name, width, blob, times in database.execute(query):
        numbers = new_piece[unpack(width, blob)]
        live = numbers >= 0
        if not live.any():
            continue
        if not vocabulary or vocabulary[-1] != name:
            vocabulary.append(name)
        term.append(np.full(int(live.sum()), len(vocabulary) - 1, np.int32))
        piece.append(numbers[live].astype(np.int32))
        count.append(np.frombuffer(times, np.uint8)[live])
    for table in ("postings", "segments", "dead"):
        database.execute(f"DELETE FROM {table}")
    moves = [
        (place, first, number)
        for place, (number, first) in enumerate(zip(old[:, 0].tolist(), firsts.tolist(), strict=True))
    ]
    _renumber(database, moves)
    joined = [np.concatenate(part) if part else np.empty(0, np.int32) for part in (term, piece, count)]
    insert_postings(database, 0, vocabulary, *joined)
    owners = np.repeat(np.arange(len(files)), counts).astype(np.int32)
    insert_segment(
        database,
        0,
        len(joined[0]),
        0,
        0,
        segments.lengths[taken],
        owners,
        segments.languages[old[:, 0]],
        segments.traits[old[:, 0]],
    )


def _renumber(database: sqlite3.Connection, moves: list[tuple[int, int, int]]) -> None:
    """Give files new numbers, (new, first piece, old); through negative ones, so that no two meet."""
    database.execute("CREATE TEMP TABLE moves (new INTEGER, first INTEGER, old INTEGER PRIMARY KEY)")
    database.executemany("INSERT INTO moves VALUES (?, ?, ?)", moves)
    for table, key in (("files", "id"), ("contents", "file"), ("vectors", "file")):
        database.execute(f"DELETE FROM {table} WHERE {key} NOT IN (SELECT old FROM moves)")
        database.execute(f"UPDATE {table} SET {key} = -1 - (SELECT new FROM moves WHERE old = {key})")
        database.execute(f"UPDATE {table} SET {key} = -1 - {key}")
    database.execute("UPDATE files SET first = (SELECT first FROM moves WHERE new = id)")
    database.execute("DROP TABLE moves")


def insert_segment(
    database: sqlite3.Connection,
    number: int,
    postings: int,
    first_piece: int,
    first_file: int,
    lengths: np.ndarray,
    owners: np.ndarray,
    languages: np.ndarray,
    traits: np.ndarray,
) -> None:
    """Write what ranking needs of a segment: terms and file of each piece, language and traits of each file."""
    blobs = (lengths.astype("<u2"), owners.astype("<i4"), languages.astype(np.uint8), traits.astype(np.uint8))
    values = (number, postings, first_piece, first_file, *(blob.tobytes() for blob in blobs))
    database.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)


class Segments:
    """All segments side by side: `lengths` and `owners` by piece; `languages`, `traits`, `live` and `firsts` by file.

    `firsts[file]` is the number of the file's first piece, `firsts[file + 1]` that of the next file's.
    """

    def __init__(self, rows: list[tuple], dead: list[int]):
        kinds = ("<u2", "<i4", np.uint8, np.uint8)
        columns = [b"".join(row[place] for row in rows) for place in range(4)]
        self.lengths, self.owners, self.languages, traits = (
            np.frombuffer(column, kind) for column, kind in zip(columns, kinds, strict=True)
        )
        self.traits = traits.reshape(len(self.languages), len(TRAITS))
        self.live = np.ones(len(self.languages), bool)
        self.live[dead] = False
        self.firsts = np.searchsorted(self.owners, np.arange(len(self.languages) + 1))


def load_segments(database: sqlite3.Connection) -> Segments:
    """Read all segments; some bytes a piece."""
    rows = database.execute("SELECT lengths, owners, languages, traits FROM segments ORDER BY id").fetchall()
    return Segments(rows, [row[0] for row in database.execute("SELECT file FROM dead")])
