"""Reads a repository's commits into an index: each commit's subject and the functions that the commit changed.

Commits are selected as in mining. Functions are stored with their path and name at the time of the commit. A search
looks up where the functions are now.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.mining.changes import INCOMPLETE, SHALLOW_END, ChangeReader
from soft_trainer.search.commits.cache import CommitCache, ParsedCommit, open_cache
from soft_trainer.search.commits.memory import CommitMemory, choose_weight
from soft_trainer.search.index import store
from soft_trainer.search.index.parsing import MAX_COUNT
from soft_trainer.search.index.words import composed, telling_terms
from soft_trainer.source import git
from soft_trainer.terminal import Progress, print_on_main

MAX_SUBJECT = 300  # characters
PARSE_SECONDS = 2.0  # a file that takes longer counts as having no functions
MIN_SHOWN = 200  # fewer commits are read without a progress bar
MAX_GROWTH = 0.1  # the weight is tuned again when the number of commits has grown by this fraction
LATEST_DATE = 253_402_300_799  # the end of the year 9999; a commit may claim any date
_AT_ONCE = 50  # commits to write in one transaction


@dataclass
class State:
    """How far a repository's commits have been read.

    Attributes:
        head, target, done: all commits that can be reached from `head` have been read, and so have the first `done`
            commits that can be reached only from `target`.
        source: the folder in the repository, and the commits at which a shallow clone ends.
        read: the number of commits that have been read.
        kept: the number of commits that can vote.
        unreadable: the number of commits with missing objects.
        number: the number for the next commit. Parents have smaller numbers than their children.
        weight: how much the commits' votes count, relative to the score of the words.
        weighed: the number of commits that could vote when `weight` was chosen.
        measured: the measurements from which `weight` was chosen (a `Choice`, as a dictionary).
    """

    source: list[str]
    head: str = ""
    target: str = ""
    done: int = 0
    read: int = 0
    kept: int = 0
    unreadable: int = 0
    number: int = 0
    weight: float = 0.0
    weighed: int = 0
    measured: dict | None = None

    @classmethod
    def of(cls, database: sqlite3.Connection) -> State | None:
        """Returns the state stored in an index, or None if no commits have been read yet."""
        kept = store.get_meta(database, "memory")
        return cls(**kept) if kept else None

    def save(self, database: sqlite3.Connection) -> None:
        """Stores the state in the database."""
        store.set_meta(database, "memory", asdict(self))


def remember(
    database: sqlite3.Connection,
    repository: str,
    prefix: str,
    progress: bool = False,
    tip: str | None = None,
    seconds: float = math.inf,
) -> list[str]:
    """Reads new commits from a repository. Tunes the weight again if the number of commits changed a lot.

    Args:
        prefix: the path of the indexed folder in the repository.
        tip: the commit whose tree is in the folder. By default, HEAD.
        seconds: about how long to read. The next call continues, and until the end no search uses the new commits.

    Returns:
        Notices for the user about problems.
    """
    problems = []
    try:
        read_commits(database, repository, prefix, tip, progress, seconds)
    except UserError as error:
        problems.append(f"New commits were not read: {error}")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    state = State.of(database)
    if state is None:
        return problems
    if state.target:
        print_on_main(
            f"{state.read:,} commits were read, and later searches continue; `soft-trainer index DIR` reads the "
            "others now, and `soft-trainer index DIR --history false` reads none"
        )
        return problems
    if state.unreadable:
        lacking = f"skipped {state.unreadable:,} of {state.read:,} commits, because objects are missing"
        problems.append(f"{lacking}; {git.REFETCH}, then index with history=False and with history=True")
    if state.measured is None or abs(state.kept - state.weighed) > MAX_GROWTH * state.weighed:
        choice = choose_weight(database)
        state.weight = choice.weight
        state.weighed = state.kept
        state.measured = choice._asdict()
        with store.transaction(database):
            state.save(database)
    return problems


def read_commits(
    database: sqlite3.Connection,
    repository: str,
    prefix: str,
    tip: str | None,
    progress: bool,
    seconds: float = math.inf,
) -> None:
    """Reads the commits made since the last call, and deletes commits that have left the history, as after a rebase.

    Args:
        prefix: the path of the indexed folder in the repository.
        tip: the newest commit. By default, HEAD.
        seconds: about how long to read. The next call continues.

    Raises:
        UserError: the repository cannot be read, or an object is missing.
    """
    with git.reporting_missing_objects(repository):
        reader = ChangeReader(repository, seconds=PARSE_SECONDS, names_only=True)
        opened = reader.repository
        tip = tip or str(opened.head.target)
        source = [prefix, git.shallow_ends(repository)]
        state = State.of(database)
        known = state is not None and state.source == source
        if not known or any(commit and commit not in opened for commit in (state.head, state.target)):
            state = State(source)
            forget(database)
        if state.head == tip and not state.target:
            return
        deadline = time.monotonic() + seconds
        with open_cache(repository) as cache:
            cache.forget_missing(opened)
            while state.head != tip or state.target:
                if not state.target:
                    gone = git.commits_oldest_first(opened, state.head, tip) if state.head else []
                    with store.transaction(database):
                        for table in ("commits", "renames"):
                            database.executemany(f"DELETE FROM {table} WHERE id = ?", ((commit,) for commit in gone))
                        state.read -= len(gone)
                        state.target = tip
                        state.save(database)
                if not _read_to_target(reader, cache, database, state, progress, deadline):
                    return
        with store.transaction(database):
            state.kept = _write_postings(database)
            state.save(database)


def forget(database: sqlite3.Connection) -> None:
    """Deletes all commits from an index."""
    with store.transaction(database):
        for table in ("commits", "renames", "memory", "commit_postings"):
            database.execute(f"DELETE FROM {table}")
        database.execute("DELETE FROM meta WHERE key = 'memory'")


def _read_to_target(
    reader: ChangeReader,
    cache: CommitCache,
    database: sqlite3.Connection,
    state: State,
    progress: bool,
    deadline: float,
) -> bool:
    """Reads the commits between `head` and `target` in groups, so that little work is lost on interruption.

    Returns False if the deadline has passed before the last group.
    """
    waiting = git.commits_oldest_first(reader.repository, state.target, state.head)[state.done :]
    label = None
    if progress and len(waiting) >= MIN_SHOWN:
        label = "Reading commits"
        print_on_main(f"reading {len(waiting):,} commits, which later searches use; Ctrl-C is safe")
    with Progress(label, len(waiting), "commit") as bar:
        for start in range(0, len(waiting), _AT_ONCE):
            some = waiting[start : start + _AT_ONCE]
            parsed = cache.read(some, partial(_parse, reader))
            with store.transaction(database):
                for commit, found in zip(some, parsed, strict=True):
                    _keep(commit, found, database, state)
                state.save(database)
            bar.update(len(some))
            if time.monotonic() > deadline and start + _AT_ONCE < len(waiting):
                return False
    state.head = state.target
    state.target = ""
    state.done = 0
    return True


def _parse(reader: ChangeReader, commit: str) -> ParsedCommit:
    """Parses what a commit changes. The result is empty if an object is missing."""
    change = reader.read_if_complete(commit)
    if change.outcome == INCOMPLETE:
        return ParsedCommit(missing=INCOMPLETE)
    functions = list(dict.fromkeys((row["path"], composed(row["func_name"])) for row in change.functions))
    date = min(max(git.read_object(reader.repository, commit).commit_time, 0), LATEST_DATE)
    missing = SHALLOW_END if change.outcome == SHALLOW_END else ""
    return ParsedCommit(date, change.query[:MAX_SUBJECT], functions, change.renames, missing)


def _keep(commit: str, parsed: ParsedCommit, database: sqlite3.Connection, state: State) -> None:
    """Stores a commit's functions and renames, and updates the state."""
    # Functions and renames outside the indexed folder are stored too, because a file may move into the folder later.
    if parsed.functions:
        values = state.number, commit, parsed.date, parsed.subject, json.dumps(parsed.functions)
        database.execute("INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?)", values)
    for old, new in parsed.renames:
        database.execute("INSERT OR REPLACE INTO renames VALUES (?, ?, ?, ?)", (old, state.number, new, commit))
    state.unreadable += parsed.missing == INCOMPLETE
    state.number += 1
    state.read += 1
    state.done += 1


def _write_postings(database: sqlite3.Connection) -> int:
    """Rewrites the postings for the subjects of commits that changed a function in the indexed folder.

    This takes less time than reading the commits. Returns the number of such commits.
    """
    for table in ("memory", "commit_postings"):
        database.execute(f"DELETE FROM {table}")
    memory = CommitMemory(database, store.Segments(database))
    rows = []
    for number, subject, functions in database.execute("SELECT number, subject, functions FROM commits ORDER BY 1"):
        if any(memory.present_path(path, number) is not None for path, _ in json.loads(functions)):
            rows.append((number, subject))
    if not rows:
        return 0
    vocabulary = {}
    entries = []
    lengths = []
    for position, (_, subject) in enumerate(rows):
        counts = Counter(telling_terms(subject))
        lengths.append(sum(counts.values()))
        entries += [(vocabulary.setdefault(term, len(vocabulary)), position, count) for term, count in counts.items()]
    term, position, count = np.array(entries, np.int32).reshape(-1, 3).T
    numbers = np.array([number for number, _ in rows], "<i4")
    database.execute("INSERT INTO memory VALUES (?, ?)", (numbers.tobytes(), np.array(lengths, "<u2").tobytes()))
    counts = np.minimum(count, MAX_COUNT).astype(np.uint8)
    store.insert_postings(database, 0, list(vocabulary), term, position, counts, table="commit_postings")
    return len(rows)
