"""Evaluates a search with judged queries, or with the documentation of functions."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.mining.rules import DOCUMENT_RULES, first_broken
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.index.chunks import language_of
from soft_trainer.search.index.listing import list_tree
from soft_trainer.source.definitions import BLANKS, parse
from soft_trainer.source.functions import FileFunctions, comments
from soft_trainer.source.languages import SOURCE_LANGUAGES
from soft_trainer.source.source_files import read_text
from soft_trainer.system.files import read_json_lines

CUT = 10
DEPTH = 100  # the number of chunks in which to look for the first files


class Measures(NamedTuple):
    """One ranking's metrics: the reciprocal rank of the first relevant file, and nDCG@10."""

    mrr: float
    ndcg: float


def measures(ranked: Iterable[Hashable], targets: frozenset[str]) -> Measures:
    """Computes the metrics of a ranking without repetitions, given the relevant `targets`."""
    ranks = np.array([rank for rank, item in enumerate(ranked, 1) if item in targets], float)
    near = ranks[ranks <= CUT]
    ideal = np.arange(1, min(CUT, len(targets)) + 1)
    return Measures(float(1 / ranks.min(initial=np.inf)), _gain(near) / _gain(ideal))


def _gain(ranks: np.ndarray) -> float:
    """Returns the discounted cumulative gain of relevant files at these ranks, which start at 1."""
    return float(np.sum(1 / np.log2(ranks + 1)))


class JudgedQuery(NamedTuple):
    """A query, the tree to search and the relevant files.

    Args:
        tree: the name of the tree to search.
        query: the query's text.
        targets: the paths of the relevant files.
        groups: the query's groups, such as "language python". A mean is reported for each group.
    """

    tree: str
    query: str
    targets: frozenset[str]
    groups: tuple[str, ...] = ()


class QueryOutcome(NamedTuple):
    """One query's metrics, search time in seconds, and results as paths, best first."""

    judged: JudgedQuery
    measures: Measures
    seconds: float
    paths: list[str]


def read_queries(path: str | Path) -> list[JudgedQuery]:
    """Reads judged queries: JSON lines with `repo`, `query`, `relevant`, `secondary`, and `category` or `language`.

    Raises:
        UserError: the file cannot be read, a line lacks a required key, `repo` is not inside the trees, or `relevant`
            is not a list of paths.
    """
    queries = []
    for line, row in read_json_lines(path):
        try:
            paths = [*row["relevant"], *row.get("secondary", [])]
            if not paths or isinstance(row["relevant"], str):
                raise UserError(f"{line}: relevant={row['relevant']!r}: expected a list of paths")
            if row["repo"].startswith("/") or ".." in row["repo"].split("/"):  # an index would be written there
                raise UserError(f"{line}: repo={row['repo']!r}: expected the name of a folder inside the trees")
            groups = tuple(f"{name} {row[name]}" for name in ("category", "language") if name in row)
            queries.append(JudgedQuery(row["repo"], row["query"], frozenset(paths), groups))
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{line}: expected a judged query with repo, query and relevant: {error}") from error
    if not queries:
        raise UserError(f"{path}: the file contains no queries")
    return queries


def documentation_queries(folder: str, output_dir: str, count: int) -> list[JudgedQuery]:
    """Creates queries from documented functions, and writes a copy of the tree without comments to `output_dir`.

    A query is the first paragraph of a function's documentation, and the relevant file is the file with the function.
    Comments are blanked in the copy, because a query would otherwise find itself. Line numbers stay the same.

    Raises:
        UserError: no function has documentation.
    """
    queries = []
    for path in sorted(list_tree(folder).files):
        source = read_text(folder, path)
        if isinstance(source, str) or (language := language_of(path, source)) not in SOURCE_LANGUAGES:
            continue
        documents, bare = _without_comments(source, language, path)
        copy = Path(output_dir, path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(bare)
        queries += [JudgedQuery("", text, frozenset([path]), (f"language {language}",)) for text in documents]
    if not queries:
        raise UserError(f"{folder}: no documented functions to make queries from")
    random.Random(0).shuffle(queries)
    return queries[:count]


def _without_comments(source: bytes, language: str, path: str) -> tuple[list[str], bytes]:
    """Returns the documentation of a file's functions, and the file with its comments and docstrings blanked."""
    root = parse(source, language)
    if root is None:
        return [], source
    documents = []
    for row in FileFunctions(root, source, language, path).rows():
        if row["docstring_tokens"] and not first_broken(row, DOCUMENT_RULES):
            documents.append(" ".join(row["docstring_tokens"]))
    bare = bytearray(source)
    for start, end in (node.byte_range for node in comments(root, source, language)):
        bare[start:end] = source[start:end].translate(BLANKS)
    return documents, bytes(bare)


def ask(index: CodeIndex, queries: Iterable[JudgedQuery], lexical: bool) -> list[QueryOutcome]:
    """Runs queries on an open index. Returns each query's metrics, time and results.

    The measured time is for a search with ten results. If several results are in one file, only the first is used.
    """
    outcomes = []
    for judged in queries:
        started = time.perf_counter()
        index.search(judged.query, CUT, lexical=lexical)
        seconds = time.perf_counter() - started
        found = index.search(judged.query, DEPTH, lexical=lexical)
        paths = list(dict.fromkeys(result.path for result in found))[:CUT]
        outcomes.append(QueryOutcome(judged, measures(paths, judged.targets), seconds, paths))
    return outcomes


def summary_rows(outcomes: Sequence[QueryOutcome]) -> list[list]:
    """Returns rows of (group, queries, nDCG@10, MRR@10, p50 ms, p95 ms), for all queries and then for each group."""
    rows = []
    for name in ("all", *sorted({group for outcome in outcomes for group in outcome.judged.groups})):
        own = [outcome for outcome in outcomes if name in ("all", *outcome.judged.groups)]
        mean = Measures(*np.mean([outcome.measures for outcome in own], axis=0))
        times = np.percentile([1000 * outcome.seconds for outcome in own], (50, 95))
        rows.append([name, len(own), mean.ndcg, mean.mrr, *times])
    return rows
