"""Answers queries with one index, or with several as if they were one.

A query takes these steps:

1. `parse_query` (ranking/ranking.py) extracts the query's significant words and their terms. `parse_text`
   (ranking/texts.py) turns a text of several lines into three queries; `failure_first` first turns a pasted failure.
2. Each index provides a `Snapshot` (snapshot.py), which reads everything a search needs in one transaction. `_View`
   combines the snapshots.
3. `score` (ranking/ranking.py) scores all files and chunks by words, by an encoder and by past commits, and `fuse`
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
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search.commits.memory import NO_VOTES, Votes
from soft_trainer.search.index.store import joined_segments, storable
from soft_trainer.search.index.words import WORD, composed, source_words, terms
from soft_trainer.search.ranking import ranking
from soft_trainer.search.ranking.messages import message_words, words_raised
from soft_trainer.search.ranking.results import TESTS, SearchResult, check_limit
from soft_trainer.search.ranking.texts import Frame, failure_first, files_at, frames, fuse, named_files, parse_text
from soft_trainer.search.ranking.weakness import is_weak
from soft_trainer.search.snapshot import Snapshot

CANDIDATES = 60  # the chunks among which an error message is looked for, and the frames that are looked for
FRAMES = 2  # the frames of a stack trace that come first
MAX_MESSAGE = 60  # words; a longer line is no message
# Filtering by one of these languages also allows the languages in its list.
_RELATED = {"typescript": ["tsx"], "c++": ["cpp"], "c#": ["csharp"], "js": ["javascript"], "ts": ["typescript", "tsx"]}
SIMILAR_TERMS = 16  # the number of terms that represent a chunk in a search for similar chunks


class Search:
    """Searches one index, or several indexes as if they were one, so that all scores are comparable.

    With several indexes, a result's path starts with the name of the indexed folder. If two folders have the same
    name, the path starts with the folder's full path.

    If one folder is inside another, its files are searched only once: with the outer folder's index if that index
    includes them, otherwise with the inner folder's index.

    Args:
        indexes: one `CodeIndex`, or several.

    Attributes:
        ranked_by: what the latest search ranked results by: always "words", plus "commits" and the encoder's name if
            they were used.

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

    def evidence(self, lexical: bool = False) -> list[str]:
        """Returns what a search in any of the indexes can rank results by; see `CodeIndex.evidence`."""
        return list(dict.fromkeys(chain.from_iterable(index.evidence(lexical) for index in self.members)))

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
        commits: bool = True,
        tests: str | None = None,
    ) -> list[SearchResult]:
        """Finds the chunks that answer a query, best first. An empty query finds nothing.

        Args:
            query: a name, words, a sentence, or a text of several lines, such as an issue or the output of a failing
                command.
            limit: the maximum number of results.
            path: search only files that match this pattern, such as `src/**`, `*.py` or `**/views/*`. With several
                indexes, the pattern may start with the name of an indexed folder.
            language: search only files in this language.
            name: search only functions and classes with this name, such as `get`, `Session.get` or `Session.*`.
            lexical: ignore embeddings.
            commits: use the votes of commits.
            tests: "only" to search only tests, "no" to search everything else.

        Raises:
            UserError: nothing is indexed, no file is in this language, `tests` has another value, or the limit is not
                a positive whole number.
        """
        query = failure_first(composed(storable(query)))  # tokenizers refuse text with surrogates
        queries = parse_text(query)
        check_limit(limit)
        if not (queries[-1].terms or queries[-1].words):
            return []
        with self._view() as view:
            allowed = view.allowed(path, language, name, tests)
            if allowed is not None and not allowed.any():
                return []
            similarity = None
            trust = 1.0
            if not lexical and self._has_one_encoder(view):
                if view.parts[0].snapshot.state["runtime"] == "static":
                    trust = ranking.STATIC
                pairs = zip(self.members, view.parts, strict=True)
                similarity = np.concatenate([index.similarity_to(query, part.snapshot) for index, part in pairs])
            votes = NO_VOTES
            if commits:
                votes = view.votes(queries[0])
            each = [ranking.score(parsed, view.segments, similarity, votes.shares, trust) for parsed in queries]
            scores = each[0]
            if len(queries) > 1:
                scores = fuse(each, queries, named_files(query, view.segments), view.segments, allowed)
            if not (scores.matched or any(view.stands_out(similarity, part.chunks) for part in view.parts)):
                self.members[0].notify("no word of the query is in the index")
                return []
            self.ranked_by = view.ranked_by(similarity, votes)
            return view.best(queries[-1], scores, similarity, allowed, limit, votes, query)

    def similar(self, path: str, line: int, limit: int = 10, lexical: bool = False) -> list[SearchResult]:
        """Finds chunks similar to the chunk at a line of a file, best first.

        Similar chunks share rare words with that chunk and, if there is an encoder, have a similar embedding.

        Raises:
            UserError: the file is not in the index or has no chunk at this line, or the limit is not a positive whole
                number.
        """
        check_limit(limit)
        with self._view() as view:
            chunk = view.chunk_at(path, line)
            similarity = None
            if not lexical and self._has_one_encoder(view):
                similarity = view.similarity_to_chunk(chunk)
            others = np.ones(len(view.segments.lengths), bool)
            others[chunk] = False
            query = view.query_like(chunk)
            scores = ranking.score(query, view.segments, similarity)
            self.ranked_by = view.ranked_by(similarity, NO_VOTES)
            return view.best(query, scores, similarity, others, limit)

    def files_by_language(self) -> Counter[str]:
        """Returns the number of files in each language."""
        counts = Counter()
        for index in self.members:
            counts.update(index.files_by_language())
        return counts

    def text_of(self, path: str) -> str | None:
        """Returns the text that a file had when it was indexed, or None if the file is not in the index."""
        texts = (index.text_of(own) for index, own in self._located(path))
        return next((text for text in texts if text is not None), None)

    def full_path(self, path: str) -> str:
        """Returns the absolute path of a file in a result."""
        return next((f"{index.folder}/{own}" for index, own in self._located(path)), path)

    def _located(self, path: str) -> Iterator[tuple[Any, str]]:
        """Yields each index to which a result with this path may belong, and the path in the index."""
        for index, label in zip(self.members, self._labels, strict=True):
            if path.startswith(label):
                yield index, path.removeprefix(label)

    def _has_one_encoder(self, view: _View) -> bool:
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
    def _view(self) -> Iterator[_View]:
        """Yields a view of all indexes for one search. Raises UserError if nothing is indexed."""
        with ExitStack() as stack:
            for index in sorted(self.members, key=id):  # in one order, so that two threads never wait for each other
                stack.enter_context(index.lock)
            snapshots = [stack.enter_context(index.snapshot()) for index in self.members]
            view = _View(self._labels, snapshots)
            if not len(view.segments.languages):
                commands = "; ".join(f"`{index.command('--skipped')}`" for index in self.members)
                why = f"no files are indexed; {commands} indexes again and lists skipped files"
                raise UserError(f"{self.folder}: {why}")
            yield view


class _Part(NamedTuple):
    """One index in a view: the label of its paths, its snapshot, and its slice of all chunks."""

    label: str
    snapshot: Snapshot
    chunks: slice


class _View:
    """Combines the snapshots of several indexes. Files and chunks are numbered across all of them.

    Args:
        labels: what to put before the paths of each snapshot.
    """

    def __init__(self, labels: Sequence[str], snapshots: Sequence[Snapshot]):
        self.parts: list[_Part] = []
        first = 0
        for label, snapshot in zip(labels, snapshots, strict=True):
            last = first + len(snapshot.segments.lengths)
            self.parts.append(_Part(label, snapshot, slice(first, last)))
            first = last
        self.segments = joined_segments(tuple(snapshot.segments for snapshot in snapshots))

    def allowed(
        self, path: str | None, language: str | None, name: str | None, tests: str | None
    ) -> np.ndarray | None:
        """Returns the chunks that pass the filters, bool[chunks], or None without filters.

        Raises:
            UserError: no file is in this language, or `tests` is neither "only" nor "no".
        """
        if tests and tests not in TESTS:
            raise UserError(f"tests={tests!r}: expected {' or '.join(TESTS)}")
        if not (path or language or name or tests):  # agents give "" for none
            return None
        languages = None
        if language:
            known = set().union(*(part.snapshot.languages for part in self.parts))
            languages = known & {language.lower(), *_RELATED.get(language.lower(), ())}
            if not languages:
                raise UserError(f"language={language!r}: no such files; the index has {', '.join(sorted(known))}")
        kept = np.concatenate([part.snapshot.allowed(path, languages, name, part.label) for part in self.parts])
        if tests:
            kept &= self.segments.traits["test"][self.segments.owners] == (tests == "only")
        return kept

    def similarity_to_chunk(self, chunk: int) -> np.ndarray | None:
        """Computes the similarity of every chunk to one chunk, or NaN for a chunk without an embedding.

        Returns None if that chunk has no embedding.
        """
        own = self._part_of(chunk)
        row = own.snapshot.slots[chunk - own.chunks.start]
        if row < 0:
            return None
        embedding = own.snapshot.vectors[row].astype(np.float32)
        return np.concatenate([part.snapshot.similarity(embedding) for part in self.parts])

    def votes(self, query: ranking.Query) -> Votes:
        """Returns the weighted votes of all indexes' commits for chunks that may answer the query."""
        shares = []
        commits = {}
        for part in self.parts:
            own = part.snapshot.memory.weighted_votes(query)
            shares.append(own.shares)
            for chunk, numbers in own.commits.items():
                commits[part.chunks.start + chunk] = numbers
        return Votes(np.concatenate(shares), commits)

    def ranked_by(self, similarity: np.ndarray | None, votes: Votes) -> list[str]:
        """Returns what a ranking used: words, and possibly commits and the encoder."""
        found = ["words"]
        if votes.commits:
            found.append("commits")
        if similarity is not None and not np.isnan(similarity).all():
            found.append(f"encoder {self.parts[0].snapshot.state['model']}")
        return found

    def best(
        self,
        query: ranking.Query,
        scores: ranking.Scores,
        similarity: np.ndarray | None,
        allowed: np.ndarray | None,
        limit: int,
        votes: Votes = NO_VOTES,
        text: str = "",
    ) -> list[SearchResult]:
        """Returns the best chunks that pass the filters, with the commits that voted for them.

        Args:
            text: the query as typed. If it is an error message or a stack trace, what it comes from is first.
        """
        ranked = dict(ranking.order_chunks(scores, self.segments, allowed, limit + CANDIDATES))
        ranked |= self._sources(text, list(ranked)[:CANDIDATES], allowed, query.test_factor)
        results: dict[Any, SearchResult] = {}
        for chunk, score in sorted(ranked.items(), key=lambda pair: -pair[1]):
            if len(results) == limit:
                break
            part = self._part_of(chunk)
            commits = votes.commits.get(chunk, ())
            result = part.snapshot.result(chunk - part.chunks.start, score, part.label, commits)
            key = " ".join(result.text.split()) if result.name else chunk
            if key in results:  # a copy
                same = results[key]
                results[key] = replace(same, also_in=(*same.also_in, f"{result.path}:{result.start_line}"))
                continue
            file = int(self.segments.owners[chunk])
            weak = is_weak(query, scores, file, result.commits)
            weak = weak and not self.stands_out(similarity, slice(chunk, chunk + 1))
            results[key] = replace(result, weak=weak)
        return list(results.values())

    def _sources(
        self, text: str, chunks: list[int], allowed: np.ndarray | None, test_factor: float
    ) -> dict[int, float]:
        """Returns a score for each chunk that a message or a stack trace comes from, higher than all other scores.

        Args:
            chunks: the chunks among which an error message is looked for.
        """
        raising = {}
        message = message_words(text)
        if "\n" not in text.strip() and 1 < len(message) <= MAX_MESSAGE:
            for chunk in sorted(chunks):
                part = self._part_of(chunk)
                result = part.snapshot.result(chunk - part.chunks.start)
                if size := words_raised(message, result, part.snapshot.text_of):
                    if self.segments.traits["test"][self.segments.owners[chunk]]:
                        size *= test_factor
                    raising[chunk] = ranking.EXACT_MEMBER + size
        innermost = {}
        trace = frames(text)[:CANDIDATES]
        for frame, files in zip(trace, files_at([frame.path for frame in trace], self.segments, 2), strict=True):
            if files and len(innermost) < FRAMES:
                chunk = self._chunk_of(frame, files[0])
                if chunk is not None and (allowed is None or allowed[chunk]):
                    innermost.setdefault(chunk, ranking.EXACT_MEMBER + FRAMES - len(innermost))
        return raising | innermost

    def _chunk_of(self, frame: Frame, file: int) -> int | None:
        """Returns the chunk at a frame's line, or the nearest chunk with the function's name if the line has moved.

        Many trees have a file such as `setup.py` or `index.js` outside folders. It is the frame's file only if it
        defines the function; otherwise, returns None.
        """
        path = self.segments.paths[file]
        chunks = np.arange(*self.segments.firsts[file : file + 2])
        names = zip(chunks.tolist(), self.segments.names(chunks), strict=True)
        named = [chunk for chunk, name in names if frame.words.intersection(WORD.findall(name)[-1:])]
        if not named and "/" not in path and len(frame.path) > 1:
            return None
        part = self._part_of(int(chunks[0]))
        at_line = part.snapshot.chunk_at(path, frame.line)
        there = chunks[-1] if at_line is None else part.chunks.start + at_line
        return min(named, key=lambda chunk: abs(chunk - there), default=int(there))

    def chunk_at(self, path: str, line: int) -> int:
        """Returns the chunk that contains a line of a file.

        Raises:
            UserError: the file is not in the index or has no chunk at this line.
        """
        for part in self.parts:
            if path.startswith(part.label):
                chunk = part.snapshot.chunk_at(path.removeprefix(part.label), line)
                if chunk is not None:
                    return part.chunks.start + chunk
        raise UserError(f"{path}:{line}: not in the index; pass a path and a line from a search result")

    def query_like(self, chunk: int) -> ranking.Query:
        """Creates a query from a chunk's rare words that also occur in other chunks."""
        part = self._part_of(chunk)
        text = part.snapshot.result(chunk - part.chunks.start).text
        counts = Counter()
        for word in source_words(text.encode()):
            counts.update(terms(word))
        weights = {}
        for term, count in counts.items():
            others = len(self.segments.postings(term)[0]) - 1
            if others > 0:
                weights[term] = count / (count + 1) * np.log(len(self.segments.lengths) / others)
        chosen = sorted(weights, key=lambda term: (-weights[term], term))[:SIMILAR_TERMS]
        return ranking.Query("sentence", (), dict.fromkeys(chosen, 1.0))

    def stands_out(self, similarity: np.ndarray | None, chunks: slice) -> bool:
        """Returns True if one of these chunks is more similar to the query than any chunk is to random letters.

        Args:
            chunks: a slice of one part's chunks.
        """
        if similarity is None or np.isnan(similarity[chunks]).all():
            return False
        part = self._part_of(chunks.start)
        return bool(np.nanmax(similarity[chunks]) > part.snapshot.noise())

    def _part_of(self, chunk: int) -> _Part:
        """Returns the part that contains a chunk."""
        return next(part for part in self.parts if chunk < part.chunks.stop)
