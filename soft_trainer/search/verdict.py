"""Compares searches of a repository on its latest commits: by words, by commits and by encoders."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from soft_trainer.mining.history import MinedHistory
from soft_trainer.search import vectors
from soft_trainer.search.evaluation import DEPTH, JudgedQuery, Measures, Place, history_queries, measure
from soft_trainer.search.index import CodeIndex

WORDS = "words"
MEMORY = "words + memory"
POPULARITY = "popularity"
Search = Callable[[str], Sequence[Place]]


class Verdict(NamedTuple):
    """The outcome of a comparison.

    Args:
        queries: the queries.
        cut: the commit whose tree was searched.
        measured: the measures of every query, by system and by level, which is "files" or "functions".
        notices: remarks for the user.
    """

    queries: list[JudgedQuery]
    cut: str
    measured: dict[str, dict[str, list[Measures]]]
    notices: list[str]


def compare_searches(
    repository: str | os.PathLike[str],
    language: str | None = None,
    models: Sequence[str] = (),
    truncate_dim: int | None = None,
    index_dir: str | os.PathLike[str] | None = None,
) -> Verdict:
    """Searches the tree before the newest commits for the functions that they changed. Their subjects are the queries.

    Args:
        language: the language of the functions. By default, the one that most files are in.
        models: the encoders. Each is used together with words.
        index_dir: the folder of the index. By default, a temporary one.

    Raises:
        UserError: there are no queries (see `history_queries`), or a model cannot be loaded.
    """
    for model in models:
        vectors.open_encoder(model, truncate_dim)  # raises an error now rather than after hours
    with tempfile.TemporaryDirectory(prefix="soft_trainer-") as scratch:
        tree = f"{scratch}/tree"
        queries, mined = history_queries(repository, language, tree)
        measured = {}
        with CodeIndex.build(tree, index_dir or f"{scratch}/index", progress=True) as index:
            index.remember(progress=True, repository=os.fspath(repository), tip=mined.cut)
            for name, search in _systems(index, mined, models, truncate_dim):
                measured[name] = measure(queries, mined, search)
            notices = list(dict.fromkeys(index.notices))
    return Verdict(queries, mined.cut, measured, notices)


def _systems(
    index: CodeIndex, mined: MinedHistory, models: Sequence[str], truncate_dim: int | None
) -> Iterator[tuple[str, Search]]:
    """Yields the name and the search of each system. A search is valid until the next one is requested."""
    yield WORDS, search_of(index, lexical=True, commits=False)
    yield MEMORY, search_of(index, lexical=True, commits=True)
    yield POPULARITY, popular(mined)
    for model in models:
        index.encode(model, progress=True, truncate_dim=truncate_dim)
        yield model, search_of(index, lexical=False, commits=False)
        yield f"{model} + memory", search_of(index, lexical=False, commits=True)


def search_of(index: CodeIndex, lexical: bool, commits: bool) -> Search:
    """Returns a search of an index, optionally with its embeddings and with the votes of its commits."""

    def search(query: str) -> list[Place]:
        results = index.search(query, DEPTH, lexical=lexical, commits=commits)
        return [Place(result.path, result.start_line, result.end_line) for result in results]

    return search


def popular(mined: MinedHistory) -> Search:
    """Returns a search that ignores the query and lists the functions that most commits changed."""
    earlier = Counter(row["url"] for split in ("train", "valid") for row in mined.rows[split])
    ranked = [Place(*mined.places[url]) for url, _ in earlier.most_common() if url in mined.places]
    return lambda query: ranked[:DEPTH]
