"""Lets the commits in an index vote for the functions that they changed, and chooses the weight of the votes.

The commits whose subjects are most similar to the query vote. A query for a function often uses the same words as the
commits that changed the function, even if the function itself uses other words. The weight is tuned on the
repository's newest commits: each commit's subject becomes a query, answered using only earlier commits.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from soft_trainer.search.index import store
from soft_trainer.search.index.store import Segments
from soft_trainer.search.ranking import ranking
from soft_trainer.search.ranking.ranking import Query, inverse_frequency, length_norm, saturated
from soft_trainer.search.ranking.results import Commit

NEAREST = 20  # commits that vote
SYMBOL = 0.1  # a factor on the votes if the query is a name, because it asks for a definition
SHOWN_COMMITS = 3  # commits to show with a result
WEIGHTS = (0.0, 0.5, 1.0, 2.0)  # to choose from
MIN_QUERIES = 50  # with fewer, the choice of a weight would be arbitrary
MAX_QUERIES = 200
DEPTH = 100  # chunks to consider when a weight is chosen


class Votes(NamedTuple):
    """Past commits' votes for the chunks that may answer a query.

    Args:
        shares: float32[chunks], each chunk's votes, or None if no commits voted.
        commits: for each chunk with votes, the numbers of the commits that voted for the chunk, most similar first.
    """

    shares: np.ndarray | None
    commits: dict[int, list[int]]


NO_VOTES = Votes(None, {})


class CommitMemory:
    """The commits in an index, which vote for chunks. `reading.py` reads commits from the repository.

    Attributes:
        weight: the weight of the votes in the ranking, or 0 if votes do not help.
    """

    def __init__(self, database: sqlite3.Connection, segments: Segments):
        self.database = database
        self.segments = segments
        self.number_of_chunks = len(segments.lengths)
        state = store.get_meta(database, "memory", {"weight": 0.0, "source": ["", ""]})
        self.weight = state["weight"]
        self.folder: str = state["source"][0]  # the indexed folder in the repository; empty, or ends with a slash
        numbers, lengths = database.execute("SELECT numbers, lengths FROM memory").fetchone() or (b"", b"")
        self.numbers = np.frombuffer(numbers, "<i4")
        self.lengths = np.frombuffer(lengths, "<u2").astype(np.float32)
        self._by_path: dict[str, dict[str, list[int]]] = {}

    def weighted_votes(self, query: Query) -> Votes:
        """Returns the votes for each chunk, multiplied by `weight`."""
        if not self.weight:
            return Votes(np.zeros(self.number_of_chunks, np.float32), {})
        shares, commits = self.votes(query)
        return Votes(np.float32(self.weight) * shares, commits)

    def votes(self, query: Query, before: int | None = None) -> Votes:
        """Lets the commits most similar to a query vote for the functions that they changed, as they are now.

        Args:
            before: if set, only commits with smaller numbers vote.
        """
        scores, perfect = self._scores(query, before)
        nearest = np.argsort(-scores, kind="stable")[:NEAREST]
        shares = np.zeros(self.number_of_chunks, np.float32)
        commits = defaultdict(list)
        for position in nearest[scores[nearest] > 0].tolist():
            number = int(self.numbers[position])
            functions = self.functions(number)
            for chunk in set().union(*functions):
                shares[chunk] += scores[position] / math.sqrt(len(functions))
                commits[chunk].append(number)
        if commits:
            # The geometric mean of two scales: the best chunk's votes, and the score of a subject with all words.
            shares /= math.sqrt(shares.max() * perfect)
            if query.kind == "symbol":
                shares *= SYMBOL
        return Votes(shares, commits)

    def functions(self, number: int) -> list[list[int]]:
        """Returns the chunks of each function that a commit changed. Functions that no longer exist are omitted."""
        found = []
        for (functions,) in self.database.execute("SELECT functions FROM commits WHERE number = ?", (number,)):
            found += [self._chunks(path, name, number) for path, name in json.loads(functions)]
        return list(filter(None, found))

    def commit(self, number: int) -> Commit:
        """Returns a commit's short hash, date and subject, to display with a result."""
        query = "SELECT id, date, subject FROM commits WHERE number = ?"
        name, date, subject = self.database.execute(query, (number,)).fetchone()
        return Commit(name[:10], time.strftime("%Y-%m-%d", time.gmtime(date)), subject)

    def _scores(self, asked: Query, before: int | None) -> tuple[np.ndarray, float]:
        """Scores each commit's subject against a query with BM25. Returns float32[commits].

        Also returns the score of a typical subject that contains the whole query.
        """
        count = len(self.numbers) if before is None else int(np.searchsorted(self.numbers, before))
        scores = np.zeros(count, np.float32)
        perfect = 0.0
        norm = length_norm(self.lengths[:count])
        for term, weight in asked.terms.items():
            if weight < 1:  # neighbouring words joined into one term
                continue
            query = "SELECT width, chunks, counts FROM commit_postings WHERE term = ?"
            commits, counts = store.decode_postings(self.database.execute(query, (term,)))
            near = np.searchsorted(commits, count)
            commits = commits[:near]
            rarity = inverse_frequency(len(commits), count)
            scores[commits] += rarity * saturated(counts[:near].astype(np.float32), norm[commits])
            perfect += rarity
        return scores, perfect

    def _chunks(self, path: str, name: str, number: int) -> list[int]:
        """Returns a function's current chunks, given the function's path and name in a commit."""
        path = self.present_path(path, number)
        if path is None:
            return []
        if path not in self._by_path:
            chunks = defaultdict(list)
            for chunk, _, own in self.segments.chunks_of(path):
                chunks[own].append(chunk)
            self._by_path[path] = chunks
        chunks = self._by_path[path]
        # The name of a chunk may include enclosing functions, which mining drops.
        inner = (own for own in chunks if own.endswith(f".{name}"))
        return chunks.get(name) or chunks.get(next(inner, None), [])

    def present_path(self, path: str, number: int) -> str | None:
        """Returns a file's current path in the indexed folder, following renames since a commit.

        Args:
            path: the path in the repository at the time of the commit.

        Returns:
            The path, or None if the file is now outside the indexed folder.
        """
        seen = set()
        while path not in seen:
            seen.add(path)
            query = "SELECT new, number FROM renames WHERE old = ? AND number > ? ORDER BY number LIMIT 1"
            row = self.database.execute(query, (path, number)).fetchone()
            if row is None and path.startswith(self.folder):  # other files are assumed to exist
                query = "SELECT 1 FROM files WHERE path = ?"
                if not self.database.execute(query, (path.removeprefix(self.folder),)).fetchone():
                    # The file was renamed in one branch and changed in another.
                    query = "SELECT new, number FROM renames WHERE old = ? ORDER BY number DESC LIMIT 1"
                    row = self.database.execute(query, (path,)).fetchone()
            if row is None:
                break
            path, number = row
        if path.startswith(self.folder):
            return path.removeprefix(self.folder)
        return None


class Choice(NamedTuple):
    """The weight chosen for commits' votes, the number of queries, and the MRR for each weight."""

    weight: float
    queries: int
    mrr: dict[str, float]


def choose_weight(database: sqlite3.Connection) -> Choice:
    """Chooses the smallest weight for commits' votes whose MRR is within one standard error of the best MRR.

    With fewer than 50 queries, the weight is 0.
    """
    segments = store.Segments(database)
    memory = CommitMemory(database, segments)
    queries = _queries(database, memory)
    if len(queries) < MIN_QUERIES:
        return Choice(0.0, len(queries), {})
    ranks = np.zeros((len(queries), len(WEIGHTS)))  # reciprocal ranks, 0 below rank `DEPTH`
    for row, (number, text, right) in zip(ranks, queries, strict=True):
        query = ranking.parse_query(text)
        scores = ranking.score(query, segments)
        votes = memory.votes(query, before=number)
        for column, weight in enumerate(WEIGHTS):
            voted = ranking.with_votes(scores, segments, weight * votes.shares)
            ranked = ranking.order_chunks(voted, segments, None, DEPTH)
            row[column] = next((1 / rank for rank, (chunk, _) in enumerate(ranked, 1) if chunk in right), 0.0)
    mrr = dict(zip(map(str, WEIGHTS), ranks.mean(0).round(4).tolist(), strict=True))
    return Choice(smallest_good_weight(ranks), len(queries), mrr)


def smallest_good_weight(ranks: np.ndarray) -> float:
    """Returns the smallest of `WEIGHTS` whose mean is within one standard error of the best.

    Args:
        ranks: each query's reciprocal rank for each weight, float[queries, weights].
    """
    behind = ranks[:, [ranks.mean(0).argmax()]] - ranks
    error = behind.std(0, ddof=1) / np.sqrt(len(ranks))
    return WEIGHTS[int(np.argmax(behind.mean(0) <= error))]


def _queries(database: sqlite3.Connection, memory: CommitMemory) -> list[tuple[int, str, set[int]]]:
    """Returns (number, subject, chunks) for the newest commits that changed functions that still exist.

    As in mining, a commit is skipped if an earlier commit has the same subject, because that commit would vote.
    """
    rows = database.execute("SELECT number, subject FROM commits ORDER BY number DESC").fetchall()
    firsts = {subject.casefold(): number for number, subject in rows}
    queries = []
    for number, subject in rows:
        right = set().union(*memory.functions(number))
        if right and firsts[subject.casefold()] == number:
            queries.append((number, subject, right))
        if len(queries) == MAX_QUERIES:
            break
    return queries
