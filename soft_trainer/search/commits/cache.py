"""Keeps what was parsed of a repository's commits, so that no other index of the repository parses them again.

A commit never changes. All working trees of a repository share one file in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from soft_trainer.search.index import store
from soft_trainer.source.git import pygit2
from soft_trainer.source.repositories import common_dir

WAIT_SECONDS = 1  # for another process, before looking again at what it has parsed
MAX_WAITS = 60  # then a process parses commits itself, and keeps nothing
_SCHEMA = """
CREATE TABLE IF NOT EXISTS commits (id TEXT PRIMARY KEY, parsed TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS repository (path TEXT PRIMARY KEY);
"""


class ParsedCommit(NamedTuple):
    """What an index keeps of a commit.

    Attributes:
        date: the time of the commit, in seconds since 1970.
        subject: the subject as a query.
        functions: [path, name] of each changed function.
        renames: [old path, new path] of each renamed source file.
        missing: what a later fetch may add, an object or the parent of a shallow clone's last commit. Such a commit is
            never in the cache.
    """

    date: int = 0
    subject: str = ""
    functions: Sequence[Sequence[str]] = ()
    renames: Sequence[Sequence[str]] = ()
    missing: str = ""


class CommitCache:
    """The parsed commits of one repository; see `open_cache`."""

    def __init__(self, database: sqlite3.Connection):
        self.database = database

    def read(self, commits: Sequence[str], parse: Callable[[str], ParsedCommit]) -> list[ParsedCommit]:
        """Returns the parsed commits, from the cache or from `parse`.

        If another process is parsing, waits until the commits are in the cache or the process has ended its turn.
        """
        for _ in range(MAX_WAITS):
            known = self._known(commits)
            if len(known) == len(commits) or self._begin():
                break
        known |= self._known(commits)  # another process may have added some before this one's turn
        missing = {commit: parse(commit) for commit in commits if commit not in known}
        if self.database.in_transaction:
            rows = [(commit, json.dumps(parsed[:-1])) for commit, parsed in missing.items() if not parsed.missing]
            self.database.executemany("INSERT INTO commits VALUES (?, ?)", rows)
            self.database.execute("COMMIT")
        return [known.get(commit) or missing[commit] for commit in commits]

    def forget_missing(self, repository: pygit2.Repository) -> None:
        """Deletes the commits that the repository no longer has, because they may have held a secret."""
        if self._begin():
            commits = self.database.execute("SELECT id FROM commits").fetchall()
            gone = [row for row in commits if row[0] not in repository]
            self.database.executemany("DELETE FROM commits WHERE id = ?", gone)
            self.database.execute("COMMIT")

    def _known(self, commits: Sequence[str]) -> dict[str, ParsedCommit]:
        marks = ",".join("?" * len(commits))
        rows = self.database.execute(f"SELECT id, parsed FROM commits WHERE id IN ({marks})", commits)
        return {commit: ParsedCommit(*json.loads(parsed)) for commit, parsed in rows}

    def _begin(self) -> bool:
        """Begins this process's turn, or returns False if another process had the turn for `WAIT_SECONDS`."""
        with suppress(sqlite3.OperationalError):  # also for a cache that cannot be written to
            self.database.execute("BEGIN IMMEDIATE")
        return self.database.in_transaction


@contextmanager
def open_cache(repository: str) -> Iterator[CommitCache]:
    """Opens the cache of a repository. Makes the file again if it is damaged or has another format.

    If there can be no file, as on a full disk, the cache is in memory.
    """
    shared = os.path.realpath(common_dir(repository))
    path = store.commit_caches() / f"{hashlib.sha256(os.fsencode(shared)).hexdigest()[:32]}.sqlite"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            database = _connect(path, shared)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            path.unlink()
            database = _connect(path, shared)
    except (OSError, sqlite3.OperationalError):
        database = _connect(":memory:", shared)
    with closing(database):
        yield CommitCache(database)


def _connect(path: str | Path, shared: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=WAIT_SECONDS * MAX_WAITS, isolation_level=None)
    for setting in ("synchronous = NORMAL", "secure_delete = ON"):
        database.execute(f"PRAGMA {setting}")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == 0:
        with store.transaction(database):
            for statement in [*_SCHEMA.split(";"), f"PRAGMA user_version = {store.FORMAT}"]:
                database.execute(statement)
            database.execute("INSERT OR IGNORE INTO repository VALUES (?)", (store.storable(shared),))
    elif version != store.FORMAT:
        raise sqlite3.DatabaseError(version)
    database.execute(f"PRAGMA busy_timeout = {1000 * WAIT_SECONDS}")
    return database
