"""Chooses the weight of an index's commit memory by testing it on the repository's newest commits.

Each commit's subject is a query, and only earlier commits vote. The query should find the functions that the commit
changed.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

import numpy as np

from soft_trainer.search.commits.memory import CommitMemory
from soft_trainer.search.index import store
from soft_trainer.search.ranking import ranking

WEIGHTS = (0.0, 0.5, 1.0, 2.0)
MIN_QUERIES = 50  # with fewer, the choice would be arbitrary
MAX_QUERIES = 200
DEPTH = 100  # chunks to consider


class Choice(NamedTuple):
    """The chosen weight, the number of queries, and the MRR for each weight."""

    weight: float
    queries: int
    mrr: dict[str, float]


def choose_weight(database: sqlite3.Connection) -> Choice:
    """Returns the smallest weight whose MRR is within one standard error of the best.

    With fewer than 50 queries, the weight is 0.
    """
    segments = store.Segments(database)
    memory = CommitMemory(database, segments)
    queries = _queries(database, memory)
    if len(queries) < MIN_QUERIES:
        return Choice(0.0, len(queries), {})
    found = np.array([_reciprocal_ranks(number, text, right, segments, memory) for number, text, right in queries])
    best = found[:, found.mean(0).argmax()]
    behind = best[:, None] - found
    error = behind.std(0, ddof=1) / np.sqrt(len(queries))
    weight = WEIGHTS[int(np.argmax(behind.mean(0) <= error))]
    mrr = dict(zip(map(str, WEIGHTS), found.mean(0).round(4).tolist(), strict=True))
    return Choice(weight, len(queries), mrr)


def _queries(database: sqlite3.Connection, memory: CommitMemory) -> list[tuple[int, str, set[int]]]:
    """Returns (number, subject, chunks) for the newest commits that changed functions that still exist.

    As in mining, a commit is skipped if an earlier one has the same subject, because the memory would find that one.
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


def _reciprocal_ranks(
    number: int, text: str, right: set[int], segments: store.Segments, memory: CommitMemory
) -> list[float]:
    """Returns, for each weight, the reciprocal rank of the first relevant chunk, or 0 below rank `DEPTH`."""
    query = ranking.parse_query(text)
    scores = ranking.score(query, segments)
    votes = memory.votes(query, before=number)
    found = []
    for weight in WEIGHTS:
        voted = ranking.with_votes(scores, segments, weight * votes.shares)
        ranked = ranking.order_chunks(voted, segments, None, DEPTH)
        found.append(next((1 / place for place, (chunk, _) in enumerate(ranked, 1) if chunk in right), 0.0))
    return found
