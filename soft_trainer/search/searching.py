"""Answers queries with one index.

A query takes these steps:

1. `parse_query` (ranking/ranking.py) extracts the query's significant words and their terms. `parse_text`
   (ranking/texts.py) turns a text of several lines into three queries; `failure_first` first turns a pasted failure.
2. The index provides a `Snapshot` (snapshot.py), which reads everything a search needs in one transaction. `View`
   (view.py) picks the results from it.
3. `score` (ranking/ranking.py) scores all files and chunks by words and by an encoder, and `fuse`
   (ranking/texts.py) combines the scores of a text's queries.
4. `order_chunks` (ranking/ranking.py) takes the best chunks that pass the filters, and the snapshot reads their texts.
   What raises an error message (ranking/messages.py) and the frames of a stack trace (ranking/texts.py) come first.
   `is_weak` (ranking/weakness.py) marks results that may match by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search.index.store import storable
from soft_trainer.search.index.words import composed
from soft_trainer.search.ranking import ranking
from soft_trainer.search.ranking.results import SearchResult, check_limit
from soft_trainer.search.ranking.texts import failure_first, fuse, named_files, parse_text, plain
from soft_trainer.search.view import View

CodeIndex = Any  # the class in code_index.py, which imports this module


def search(
    index: CodeIndex,
    query: str,
    limit: int,
    path: str | None,
    language: str | None,
    name: str | None,
    lexical: bool,
    tests: str | None,
) -> list[SearchResult]:
    """Does what `CodeIndex.search` describes."""
    typed = index.inside(plain(composed(storable(query).strip())))  # tokenizers refuse text with surrogates
    query = failure_first(typed)
    queries = parse_text(query)
    check_limit(limit)
    if not (queries[-1].terms or queries[-1].words):
        return []
    with _view(index) as view:
        allowed = view.allowed(path and index.inside(path), language, name, tests)
        if allowed is not None and not allowed.any():
            return []
        similarity = None
        trust = 1.0
        if not lexical and view.snapshot.state:
            if view.snapshot.state["runtime"] == "static":
                trust = ranking.STATIC
            similarity = index.similarity_to(query, view.snapshot)
        sources, failing = view.failed_at(typed, allowed)
        if failing:
            queries.insert(-1, ranking.parse_query(failing))
        exact = ()
        if len(queries) == 1 and " " not in query.partition("operator")[0]:
            exact = view.snapshot.exact(query)
        each = [ranking.score(parsed, view.segments, similarity, trust, exact) for parsed in queries]
        scores = each[0]
        if len(queries) > 1:
            scores = fuse(each, queries, named_files(query, view.segments), view.segments, allowed)
        if scores.matched or sources or view.stands_out(similarity):
            index.ranked_by = view.ranked_by(similarity)
            return view.best(queries[-1], scores, similarity, allowed, limit, query, sources)
        nearest = view.nearest_words(queries[0])
    if not nearest:
        index.notify("no word of the query is in the index")
        return []
    index.notify(f"no word of the query is in the index; searched for words like {', '.join(nearest)}")
    return search(index, " ".join(nearest), limit, path, language, name, lexical, tests)


def similar(index: CodeIndex, path: str, line: int, limit: int, lexical: bool) -> list[SearchResult]:
    """Does what `CodeIndex.similar` describes."""
    check_limit(limit)
    with _view(index) as view:
        chunk = view.snapshot.chunk_at(index.inside(path), line)
        if chunk is None:
            raise UserError(f"{path}:{line}: not in the index; pass a path and a line from a search result")
        similarity = None
        if not lexical and view.snapshot.state:
            similarity = view.snapshot.similarity_to_chunk(chunk)
        others = np.ones(len(view.segments.lengths), bool)
        others[chunk] = False
        query = view.query_like(chunk)
        scores = ranking.score(query, view.segments, similarity)
        index.ranked_by = view.ranked_by(similarity)
        return view.best(query, scores, similarity, others, limit, "", {})


@contextmanager
def _view(index: CodeIndex) -> Iterator[View]:
    """Yields a view of an index for one search. Raises UserError if nothing is indexed."""
    with index.snapshot() as snapshot:
        if not snapshot.segments.paths:
            why = f"no files are indexed; `{index.command('--skipped')}` indexes again and lists skipped files"
            raise UserError(f"{index.folder}: {why}")
        yield View(snapshot)
