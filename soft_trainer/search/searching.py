"""Answers queries with one index, or with several as if they were one.

A query takes these steps:

1. `parse_query` (ranking/ranking.py) extracts the query's significant words and their terms. `parse_text`
   (ranking/texts.py) turns a text of several lines into three queries; `failure_first` first turns a pasted failure.
2. Each index provides a `Snapshot` (snapshot.py), which reads everything a search needs in one transaction. `View`
   (view.py) combines the snapshots.
3. `score` (ranking/ranking.py) scores all files and chunks by words and by an encoder, and `fuse`
   (ranking/texts.py) combines the scores of a text's queries.
4. `order_chunks` (ranking/ranking.py) takes the best chunks that pass the filters, and the snapshots read their texts.
   What raises an error message (ranking/messages.py) and the frames of a stack trace (ranking/texts.py) come first.
   `is_weak` (ranking/weakness.py) marks results that may match by chance.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search.index.store import storable
from soft_trainer.search.index.words import composed
from soft_trainer.search.ranking import ranking
from soft_trainer.search.ranking.results import SearchResult, check_limit
from soft_trainer.search.ranking.texts import failure_first, fuse, named_files, parse_text
from soft_trainer.search.view import View


class Search:
    """Searches one index, or several indexes as if they were one, so that all scores are comparable.

    With several indexes, a result's path starts with the name of the indexed folder. If two folders have the same
    name, the path starts with the folder's full path.

    If one folder is inside another, its files are searched only once: with the outer folder's index if that index
    includes them, otherwise with the inner folder's index.

    Args:
        indexes: one `CodeIndex`, or several.

    Attributes:
        ranked_by: what the latest search ranked results by: always "words", plus the encoder's name if it was used.

    Raises:
        UserError: `indexes` is empty.

    Example:
        >>> both = Search([CodeIndex.build("server"), CodeIndex.build("client")])
        >>> both.search("parse a date")[0].path
        'server/dates.py'
    """

    def __init__(self, indexes: Sequence):
        if not indexes:
            raise UserError("indexes: expected at least one")
        self.members = [index for index in indexes if not any(other.contains(index.folder) for other in indexes)]
        self.ranked_by = ["words"]
        names = Counter(os.path.basename(index.folder) for index in self.members)
        self._labels = []  # of `members`, which are put before their paths
        for index in self.members:
            label = os.path.basename(index.folder)
            if names[label] > 1:
                label = index.folder.rstrip("/")
            self._labels.append(f"{label}/" if len(self.members) > 1 else "")

    def __repr__(self) -> str:
        return f"Search({self.members!r})"

    @property
    def folder(self) -> str:
        """The indexed folders, separated by commas, for messages."""
        return ", ".join(index.folder for index in self.members)

    @property
    def notices(self) -> list[str]:
        """The notices of all indexes, without duplicates."""
        return list(dict.fromkeys(chain.from_iterable(index.notices for index in self.members)))

    def update(self, progress: bool = False) -> bool:
        """Updates all indexes. Returns True if files have changed."""
        return any([index.update(progress=progress) for index in self.members])

    def search(
        self,
        query: str,
        limit: int = 10,
        path: str | None = None,
        language: str | None = None,
        name: str | None = None,
        lexical: bool = False,
        tests: str | None = None,
    ) -> list[SearchResult]:
        """Finds the chunks that answer a query, best first. An empty query finds nothing.

        Args:
            query: a name, words, a sentence, or a text of several lines, such as an issue or the output of a failing
                command.
            limit: the maximum number of results.
            path: search only files that match this pattern, such as `src/**`, `*.{ts,tsx}` or `**/views/*`. The
                pattern may start with the full path of an indexed folder and, with several indexes, with its name.
            language: search only files in this language.
            name: search only functions and classes with this name, such as `get`, `Session.get` or `Session.*`.
            lexical: ignore embeddings.
            tests: "only" to search only tests, "no" to search everything else.

        Raises:
            UserError: nothing is indexed, no file matches the path or is in this language, `tests` has another value,
                or the limit is not a positive whole number.
        """
        typed = composed(storable(query))  # tokenizers refuse text with surrogates
        query = failure_first(typed)
        queries = parse_text(query)
        check_limit(limit)
        if not (queries[-1].terms or queries[-1].words):
            return []
        with self._view() as view:
            allowed = view.allowed(path and self._inside(path), language, name, tests)
            if allowed is not None and not allowed.any():
                return []
            similarity = None
            trust = 1.0
            if not lexical and self._has_one_encoder(view):
                if view.parts[0].snapshot.state["runtime"] == "static":
                    trust = ranking.STATIC
                pairs = zip(self.members, view.parts, strict=True)
                similarity = np.concatenate([index.similarity_to(query, part.snapshot) for index, part in pairs])
            sources, tests = view.failed_at(typed, query, allowed)
            if tests:
                queries.insert(-1, ranking.parse_query(tests))
            each = [ranking.score(parsed, view.segments, similarity, trust) for parsed in queries]
            scores = each[0]
            if len(queries) > 1:
                scores = fuse(each, queries, named_files(query, view.segments), view.segments, allowed)
            if scores.matched or any(view.stands_out(similarity, part.chunks) for part in view.parts):
                self.ranked_by = view.ranked_by(similarity)
                return view.best(queries[-1], scores, similarity, allowed, limit, self._inside(query), sources)
            nearest = view.nearest_words(queries[0])
        if not nearest:
            self.members[0].notify("no word of the query is in the index")
            return []
        self.members[0].notify(f"no word of the query is in the index; searched for words like {', '.join(nearest)}")
        return self.search(" ".join(nearest), limit, path, language, name, lexical, tests)

    def similar(self, path: str, line: int, limit: int = 10, lexical: bool = False) -> list[SearchResult]:
        """Finds chunks similar to the chunk at a line of a file, best first.

        Similar chunks share rare words with that chunk and, if there is an encoder, have a similar embedding.

        Raises:
            UserError: the file is not in the index or has no chunk at this line, or the limit is not a positive whole
                number.
        """
        check_limit(limit)
        with self._view() as view:
            chunk = view.chunk_at(self._inside(path), line)
            similarity = None
            if not lexical and self._has_one_encoder(view):
                similarity = view.similarity_to_chunk(chunk)
            others = np.ones(len(view.segments.lengths), bool)
            others[chunk] = False
            query = view.query_like(chunk)
            scores = ranking.score(query, view.segments, similarity)
            self.ranked_by = view.ranked_by(similarity)
            return view.best(query, scores, similarity, others, limit)

    def files_by_language(self) -> Counter[str]:
        """Returns the number of files in each language."""
        counts = Counter()
        for index in self.members:
            counts.update(index.files_by_language())
        return counts

    def text_of(self, path: str) -> str | None:
        """Returns the text that a file had when it was indexed, or None if the file is not in the index."""
        texts = (index.text_of(own) for index, own in self._located(self._inside(path)))
        return next((text for text in texts if text is not None), None)

    def full_path(self, path: str) -> str:
        """Returns the absolute path of a file in a result."""
        return next((f"{index.folder}/{own}" for index, own in self._located(self._inside(path))), path)

    def _inside(self, path: str) -> str:
        """Returns a path as results have it, without `./` or the path of an indexed folder at the start."""
        for index, label in zip(self.members, self._labels, strict=True):
            if f"{path}/".startswith(f"{index.folder}/"):
                return label + path[len(index.folder) + 1 :]
        return path.removeprefix("./")

    def _located(self, path: str) -> Iterator[tuple[Any, str]]:
        """Yields each index to which a result with this path may belong, and the path in the index."""
        for index, label in zip(self.members, self._labels, strict=True):
            if path.startswith(label):
                yield index, path.removeprefix(label)

    def _has_one_encoder(self, view: View) -> bool:
        """Returns True if all indexes have the same encoder. Adds a notice if only some do, or if encoders differ.

        Similarities from different encoders cannot be compared, and chunks of an index without an encoder would rank
        too low.
        """
        encoders = {(part.snapshot.state or {}).get("fingerprint") for part in view.parts}
        if len(encoders) > 1:
            why = "the indexes do not all have the same encoder; set one with model=NAME"
            self.members[0].notify(f"searching only by words: {why}")
        return len(encoders) == 1 and encoders != {None}

    @contextmanager
    def _view(self) -> Iterator[View]:
        """Yields a view of all indexes for one search. Raises UserError if nothing is indexed."""
        with ExitStack() as stack:
            for index in sorted(self.members, key=id):  # in one order, so that two threads never wait for each other
                stack.enter_context(index.lock)
            snapshots = [stack.enter_context(index.snapshot()) for index in self.members]
            view = View(self._labels, snapshots)
            if not len(view.segments.languages):
                commands = "; ".join(f"`{index.command('--skipped')}`" for index in self.members)
                why = f"no files are indexed; {commands} indexes again and lists skipped files"
                raise UserError(f"{self.folder}: {why}")
            yield view
