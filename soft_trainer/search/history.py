"""Measures a search by a repository's later commits: given the subject of one, find the functions that it changes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from soft_trainer.errors import UserError
from soft_trainer.mining.changes import is_mined_path
from soft_trainer.mining.history import MinedHistory, mine_history
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.repository import open_repository, reporting_missing_objects, tree_files, write_tree
from soft_trainer.search.index import CodeIndex, SearchResult

CUT = 10
DEPTH = 100  # results that are looked at
LEVELS = ("files", "functions")


@dataclass(frozen=True)
class HistoryQuery:
    """The query that a later commit gives, the ids of the functions that it changes, and their files."""

    query: str
    functions: frozenset[str]
    files: frozenset[str]


@dataclass(frozen=True)
class Measures:
    """The reciprocal rank of the first right answer, nDCG@10, and the share of right answers among the first ten."""

    mrr: float
    ndcg: float
    recall: float


def history_queries(
    repository: str | os.PathLike[str], language: str | None, output_dir: str | os.PathLike[str]
) -> tuple[list[HistoryQuery], MinedHistory]:
    """Queries from the newest commits of a repository, and the tree before the oldest of them in `output_dir`.

    Args:
        language: of the functions; by default the one with most files.

    Raises:
        UserError: as `mine_history`, or no source file in a known language.
    """
    mined = mine_history(repository, language or main_language(repository))
    opened = open_repository(repository)
    with reporting_missing_objects(repository):
        write_tree(opened, mined.cut, output_dir)
    targets: dict[str, set[str]] = {}
    for judged in mined.relevance:
        targets.setdefault(judged["query"], set()).add(judged["url"])
    queries = [
        HistoryQuery(query, frozenset(urls), frozenset(mined.places[url][0] for url in urls))
        for query, urls in targets.items()
    ]
    return queries, mined


def main_language(repository: str | os.PathLike[str]) -> str:
    """The language with most source files in the newest tree.

    Raises:
        UserError: no repository that can be read, or no source file in a known language.
    """
    opened = open_repository(repository)
    with reporting_missing_objects(repository):
        paths = [path for path, _ in tree_files(opened, opened[opened.head.target].tree)]
    counts = Counter({name: sum(is_mined_path(path, name) for path in paths) for name in SOURCE_LANGUAGES})
    language, count = counts.most_common(1)[0]
    if not count:
        raise UserError(
            f"{repository}: no source file in one of {', '.join(SOURCE_LANGUAGES)}; choose with --language"
        )
    return language


def measure(
    index: CodeIndex, queries: Sequence[HistoryQuery], mined: MinedHistory, lexical: bool
) -> dict[str, list[Measures]]:
    """Puts the queries to an index of the tree, and returns the measures of each by level."""
    functions: dict[str, list[tuple[int, int, str]]] = {}
    for url, (path, first, last) in mined.places.items():
        functions.setdefault(path, []).append((first, last, url))
    found: dict[str, list[Measures]] = {level: [] for level in LEVELS}
    for query in queries:
        results = index.search(query.query, DEPTH, lexical=lexical)
        found["files"].append(measures([result.path for result in results], query.files))
        named = (name for result in results for name in _functions_of(result, functions))
        found["functions"].append(measures(named, query.functions))
    return found


def _functions_of(result: SearchResult, functions: dict[str, list[tuple[int, int, str]]]) -> list[Hashable]:
    """The functions that a result shows. One that shows none is a place that is lost."""
    shown = [
        url
        for first, last, url in functions.get(result.path, ())
        if first <= result.end_line and last >= result.start_line
    ]
    return shown or [(result.path, result.start_line)]


def measures(ranked: Iterable[Hashable], targets: frozenset[str]) -> Measures:
    """The measures of a ranking, in which repeats count once, at their first place."""
    places = [place for place, item in enumerate(dict.fromkeys(ranked), 1) if item in targets]
    near = [place for place in places if place <= CUT]
    ideal = sum(1 / math.log2(place + 1) for place in range(1, min(CUT, len(targets)) + 1))
    gained = sum(1 / math.log2(place + 1) for place in near)
    return Measures(1 / places[0] if places else 0.0, gained / ideal, len(near) / len(targets))


def table_rows(name: str, found: dict[str, list[Measures]]) -> list[list]:
    """Rows (level, name, queries, MRR, nDCG@10, recall@10)."""
    return [
        [
            level,
            name,
            len(own),
            *(sum(getattr(each, field) for each in own) / len(own) for field in ("mrr", "ndcg", "recall")),
        ]
        for level, own in found.items()
    ]
