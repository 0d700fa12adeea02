"""Measures a search: judged queries, or the documentation of a tree's own functions, put to its index."""

from __future__ import annotations

import math
import os
import random
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.files import read_json_lines
from soft_trainer.mining.definitions import parse
from soft_trainer.mining.functions import comment_spans, functions
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.rules import DOCUMENT_RULES, first_broken
from soft_trainer.mining.source_files import read_text
from soft_trainer.search.index import CodeIndex
from soft_trainer.search.listing import list_tree
from soft_trainer.search.pieces import language_of

CUT = 10
MAX_DOCUMENT_QUERIES = 200


@dataclass(frozen=True)
class JudgedQuery:
    """A query, the tree to search, and the paths that answer it; `groups` names the means that it counts in."""

    tree: str
    query: str
    targets: frozenset[str]
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class QueryOutcome:
    """The answer to a query: nDCG@10, reciprocal rank of the first right file, seconds, and the paths, best first."""

    judged: JudgedQuery
    ndcg: float
    reciprocal_rank: float
    seconds: float
    paths: tuple[str, ...]


def read_queries(path: str | os.PathLike[str]) -> list[JudgedQuery]:
    """Reads judged queries from JSON lines with `repo query relevant secondary`, and `category language` for groups.

    Raises:
        UserError: no such file, or a line that is no such row.
    """
    queries = []
    for place, row in read_json_lines(path):
        try:
            targets = frozenset([*row["relevant"], *row.get("secondary", [])])
            groups = tuple(f"{name} {row[name]}" for name in ("category", "language") if name in row)
            queries.append(JudgedQuery(row["repo"], row["query"], targets, groups))
        except (KeyError, TypeError) as error:
            raise UserError(f"{place}: no judged query (repo, query, relevant): {error}") from error
    if not queries:
        raise UserError(f"{path}: no query in it")
    return queries


def ask(index: CodeIndex, queries: Iterable[JudgedQuery], lexical: bool = False) -> list[QueryOutcome]:
    """Runs queries on an open index."""
    outcomes = []
    for judged in queries:
        started = time.perf_counter()
        results = index.search(judged.query, CUT, lexical=lexical)
        seconds = time.perf_counter() - started
        paths = tuple(result.path for result in results)
        outcomes.append(
            QueryOutcome(judged, ndcg(paths, judged.targets), reciprocal_rank(paths, judged.targets), seconds, paths)
        )
    return outcomes


def ndcg(paths: Sequence[str], targets: frozenset[str]) -> float:
    """nDCG@10 of ranked paths: each target counts once, at the first place that names it; repeats fill places."""
    firsts = {path: place for place, path in reversed(list(enumerate(paths[:CUT]))) if path in targets}
    ideal = sum(1 / math.log2(place + 2) for place in range(min(CUT, len(targets))))
    return sum(1 / math.log2(place + 2) for place in firsts.values()) / ideal if ideal else 0.0


def reciprocal_rank(paths: Sequence[str], targets: frozenset[str]) -> float:
    """1 / rank of the first path that is a target, 0 without one."""
    return next((1 / rank for rank, path in enumerate(paths, 1) if path in targets), 0.0)


def summary_rows(outcomes: Sequence[QueryOutcome]) -> list[list]:
    """Rows (group, queries, nDCG@10, MRR@10, p50 ms, p95 ms): all queries first, then each group."""
    groups: dict[str, list[QueryOutcome]] = {"all": list(outcomes)}
    for outcome in outcomes:
        for group in outcome.judged.groups:
            groups.setdefault(group, []).append(outcome)
    rows = []
    for name in ["all", *sorted(set(groups) - {"all"})]:
        own = groups[name]
        times = sorted(1000 * outcome.seconds for outcome in own)
        means = [sum(values) / len(own) for values in ([o.ndcg for o in own], [o.reciprocal_rank for o in own])]
        rows.append([name, len(own), *means, times[len(times) // 2], times[int(0.95 * (len(times) - 1))]])
    return rows


def peak_memory() -> float:
    """Peak memory of the process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def documentation_queries(folder: str, output_dir: str, count: int = MAX_DOCUMENT_QUERIES) -> list[JudgedQuery]:
    """Makes queries from the documentation of functions, and writes the tree without comments to `output_dir`.

    The first paragraph of a function's documentation is the query, its file the answer. In the copy every comment is
    blank, or the query would find itself; lines keep their numbers.

    Raises:
        UserError: no documented function.
    """
    queries = []
    for path in list_tree(folder).files:
        source = read_text(folder, path)
        if isinstance(source, str) or (language := language_of(path, source)) not in SOURCE_LANGUAGES:
            continue
        documents, bare = _without_comments(source, language, path)
        copy = Path(output_dir, path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(bare)
        queries += [JudgedQuery("", text, frozenset([path]), (f"language {language}",)) for text in documents]
    if not queries:
        raise UserError(f"{folder}: no documented function in it to make a query of")
    random.Random(0).shuffle(queries)
    return queries[:count]


def _without_comments(source: bytes, language: str, path: str) -> tuple[list[str], bytes]:
    """The documentation of a file's functions, and the file with blanks in place of comments and docstrings."""
    root = parse(source, language)
    if root is None:
        return [], source
    rows = [row for row, _ in functions(root, source, language, path)]
    documents = [
        " ".join(row["docstring_tokens"])
        for row in rows
        if row["docstring_tokens"] and not first_broken(row, DOCUMENT_RULES)
    ]
    bare = bytearray(source)
    for start, end in comment_spans(root, language):
        bare[start:end] = bytes(letter if letter == 10 else 32 for letter in source[start:end])
    return documents, bytes(bare)
