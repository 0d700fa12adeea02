"""Answers queries with one index, or with several as if they were one.

A query takes these steps:

1. `parse_query` (ranking/ranking.py) extracts the query's significant words and their terms.
2. Each index provides a `Snapshot` (snapshot.py), which reads everything a search needs in one transaction. `_View`
   combines the snapshots.
3. `score` (ranking/ranking.py) scores all files and pieces by words, by an encoder and by past commits.
4. `order_pieces` (ranking/ranking.py) takes the best pieces that pass the filters, and the snapshots read their texts.
   `is_weak` (ranking/weakness.py) marks those that may be there by chance.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from soft_trainer.errors import UserError, for_caller, name_option
from soft_trainer.search.commits.memory import NO_VOTES, Votes
from soft_trainer.search.index.store import joined_segments
from soft_trainer.search.index.words import source_words, terms
from soft_trainer.search.ranking import ranking
from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.search.ranking.weakness import is_weak
from soft_trainer.search.snapshot import Snapshot

# A filter by one of these languages also allows the others in its list.
_RELATED = {"typescript": ["tsx"], "c++": ["cpp"], "c#": ["csharp"], "js": ["javascript"], "ts": ["typescript", "tsx"]}
SIMILAR_TERMS = 16  # the number of terms that represent a piece in a search for similar pieces


class OneIndex(Protocol):
    """The methods of one folder's index that a search calls. `CodeIndex` implements them."""

    folder: str
    database: sqlite3.Connection
    notices: list[str]

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """Yields the index as it is now."""

    def similarity_to(self, query: str, snapshot: Snapshot) -> np.ndarray:
        """Computes each piece's similarity to a query, float32[pieces]."""

    def noise(self, snapshot: Snapshot) -> float:
        """Returns the similarity that unrelated pieces reach."""

    def indexed_text(self, path: str) -> str | None:
        """Returns a file's text as it was when indexed."""

    def command(self, *options: str) -> str:
        """Returns the command that indexes the folder with these options."""

    def update(self, model: str | None = None, progress: bool = False, truncate_dim: int | None = None) -> bool:
        """Brings the index up to date."""

    def refresh(self, encode: bool = True) -> None:
        """Updates the index before a search."""


class Searchable(AbstractContextManager):
    """The base class for one index and for several. It has everything that users can ask of them.

    Args:
        labelled: the indexes, keyed by the label that precedes their paths.
    """

    def __init__(self, labelled: dict[str, OneIndex]):
        self._labelled = labelled

    @property
    def members(self) -> list[OneIndex]:
        """The indexes that are searched."""
        return list(self._labelled.values())

    def search(
        self,
        query: str,
        limit: int = 10,
        path: str | None = None,
        language: str | None = None,
        name: str | None = None,
        lexical: bool = False,
        commits: bool = True,
    ) -> list[SearchResult]:
        """Finds the pieces that answer a query, best first. An empty query finds nothing.

        Args:
            query: a name, words, or a sentence.
            limit: the maximum number of results.
            path: search only files that match this pattern, such as `src/**`, `*.py` or `**/views/*`. With several
                indexes, the pattern may start with the name of a folder.
            language: search only files in this language.
            name: search only functions and classes with this name, in which `*` matches anything.
            lexical: ignore embeddings.
            commits: use the votes of commits.

        Raises:
            UserError: nothing is indexed, or no file is in this language.
        """
        parsed = ranking.parse_query(query)
        if limit < 1 or not (parsed.terms or parsed.words):
            return []
        with self._view() as view:
            allowed = view.allowed(path, language, name)
            if allowed is not None and not allowed.any():
                return []
            similarity = None
            if not lexical:
                similarity = view.similarity_to_query(query)
            votes = NO_VOTES
            if commits:
                votes = view.votes(parsed)
            scores = ranking.score(parsed, view.segments, similarity, votes.shares)
            if not (scores.matched or any(view.stands_out(similarity, part.pieces) for part in view.parts)):
                return []
            return view.best(parsed, scores, similarity, allowed, limit, votes)

    def similar(self, path: str, line: int, limit: int = 10, lexical: bool = False) -> list[SearchResult]:
        """Finds pieces like the one at a line of a file, best first.

        Similar pieces share its rare words and, if there is an encoder, have a similar embedding.

        Raises:
            UserError: the file is not in the index, or it has no piece at this line.
        """
        with self._view() as view:
            piece = view.piece_at(path, line)
            similarity = None
            if not lexical:
                similarity = view.similarity_to_piece(piece)
            others = np.ones(len(view.segments.lengths), bool)
            others[piece] = False
            query = view.query_like(piece)
            scores = ranking.score(query, view.segments, similarity)
            return view.best(query, scores, similarity, others, limit)

    def languages(self) -> list[str]:
        """Returns the languages of the files, most common first."""
        counts: Counter[str] = Counter()
        for index in self.members:
            counts.update(dict(index.database.execute("SELECT language, count(*) FROM files GROUP BY 1")))
        return sorted(counts, key=counts.get, reverse=True)

    def text_of(self, path: str) -> str | None:
        """Returns a file's text as it was when indexed, or None if the path is not in the index."""
        for label, index in self._labelled.items():
            if path.startswith(label):
                text = index.indexed_text(path.removeprefix(label))
                if text is not None:
                    return text
        return None

    def full_path(self, path: str) -> str:
        """Returns the absolute path of a file in a result."""
        for label, index in self._labelled.items():
            if path.startswith(label):
                return f"{index.folder}/{path.removeprefix(label)}"
        return path

    def close(self) -> None:
        """Closes the databases."""
        for index in self.members:
            index.database.close()

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _view(self) -> Iterator[_View]:
        """Yields everything that a search reads. Raises UserError if nothing is indexed."""
        with ExitStack() as stack:
            view = _View(self._labelled, stack)
            if not view.segments.live.any():
                folders = ", ".join(index.folder for index in self.members)
                commands = "; ".join(f"`{index.command('--skipped')}`" for index in self.members)
                remedy = for_caller(
                    f"{commands} indexes it and lists what is left out",
                    "`skipped()` of an index lists what is left out",
                )
                raise UserError(f"nothing is indexed of {folders}; {remedy}")
            yield view


class CodeIndexes(Searchable):
    """Several indexes that are searched as one, so that their scores are comparable.

    A result's path starts with the name of its folder. If two folders have the same name, it starts with their full
    paths.

    Example:
        >>> both = CodeIndexes([CodeIndex.build("server"), CodeIndex.build("client")])
        >>> both.search("parse a date")[0].path
        'server/dates.py'
    """

    def __init__(self, indexes: Sequence[OneIndex]):
        if not indexes:
            raise UserError("indexes: one or more are expected")
        names = Counter(os.path.basename(index.folder) for index in indexes)
        labelled = {}
        for index in indexes:
            label = os.path.basename(index.folder)
            if not label or names[label] > 1:
                label = index.folder.rstrip("/")
            labelled[f"{label}/"] = index
        super().__init__(labelled)

    def __repr__(self) -> str:
        return f"CodeIndexes({self.members!r})"

    @property
    def folder(self) -> str:
        """The names of the folders, for use in messages."""
        return ", ".join(index.folder for index in self.members)

    @property
    def notices(self) -> list[str]:
        """The notices of all indexes, without duplicates."""
        notices = []
        for index in self.members:
            notices += index.notices
        return list(dict.fromkeys(notices))

    def update(self, progress: bool = False) -> bool:
        """Updates all indexes. Returns True if files have changed."""
        changed = False
        for index in self.members:
            changed |= index.update(progress=progress)
        return changed

    def refresh(self, encode: bool = True) -> None:
        """Updates all indexes before a search; see `CodeIndex.refresh`."""
        for index in self.members:
            index.refresh(encode)


class _Part(NamedTuple):
    """One index in a view: the label of its paths, its snapshot, and the slice of all pieces that belongs to it."""

    label: str
    index: OneIndex
    snapshot: Snapshot
    pieces: slice


class _View:
    """Combines the snapshots of several indexes. Files and pieces are numbered across all of them.

    Args:
        labelled: see `Searchable`.
        stack: closes the snapshots when it exits.
    """

    def __init__(self, labelled: dict[str, OneIndex], stack: ExitStack):
        self.parts: list[_Part] = []
        first = 0
        for label, index in labelled.items():
            snapshot = stack.enter_context(index.snapshot())
            last = first + len(snapshot.segments.lengths)
            self.parts.append(_Part(label, index, snapshot, slice(first, last)))
            first = last
        self.segments = joined_segments(tuple(part.snapshot.segments for part in self.parts))

    def allowed(self, path: str | None, language: str | None, name: str | None) -> np.ndarray | None:
        """Returns the pieces that pass the filters, bool[pieces], or None if there is no filter.

        Raises:
            UserError: no file is in this language.
        """
        if path is None and language is None and name is None:
            return None
        languages = None
        if language is not None:
            known = set().union(*(part.snapshot.languages for part in self.parts))
            languages = known & {language.lower(), *_RELATED.get(language.lower(), ())}
            if not languages:
                raise UserError(f"language={language!r}: the index has {', '.join(sorted(known))}")
        allowed = [part.snapshot.allowed(path, languages, name, part.label) for part in self.parts]
        return np.concatenate(allowed)

    def similarity_to_query(self, query: str) -> np.ndarray | None:
        """Computes each piece's similarity to a query. It is NaN for a piece without an embedding.

        Returns None if there is no encoder, or if the indexes have different encoders, whose similarities cannot be
        compared.
        """
        encoded = [part for part in self.parts if part.snapshot.state]
        encoders = {part.snapshot.state["identity"] for part in encoded}
        if len(encoders) > 1:
            why = f"the indexes have different encoders, so name one with {name_option('model')}"
            encoded[0].index.notices.append(f"searching only by words: {why}")
        if len(encoders) != 1:
            return None
        similarity = np.full(len(self.segments.lengths), np.nan, np.float32)
        for part in encoded:
            similarity[part.pieces] = part.index.similarity_to(query, part.snapshot)
        return similarity

    def similarity_to_piece(self, piece: int) -> np.ndarray | None:
        """Computes each piece's similarity to a given piece, or returns None if that piece has no embedding."""
        own = self._part_of(piece)
        embedding = own.snapshot.embedding(piece - own.pieces.start)
        if embedding is None:
            return None
        similarity = np.full(len(self.segments.lengths), np.nan, np.float32)
        for part in self.parts:
            state = part.snapshot.state
            if state and state["identity"] == own.snapshot.state["identity"]:
                similarity[part.pieces] = part.snapshot.similarity(embedding)
        return similarity

    def votes(self, query: ranking.Query) -> Votes:
        """Returns the weighted votes of commits in all indexes."""
        shares = []
        commits = {}
        for part in self.parts:
            own = part.snapshot.memory.weighted_votes(query)
            shares.append(own.shares)
            for piece, numbers in own.commits.items():
                commits[part.pieces.start + piece] = numbers
        return Votes(np.concatenate(shares), commits)

    def best(
        self,
        query: ranking.Query,
        scores: ranking.Scores,
        similarity: np.ndarray | None,
        allowed: np.ndarray | None,
        limit: int,
        votes: Votes = NO_VOTES,
    ) -> list[SearchResult]:
        """Returns the best pieces that the filters allow, with the commits that voted for them."""
        results = []
        for piece, score in ranking.order_pieces(scores, self.segments, allowed, limit):
            part = self._part_of(piece)
            commits = votes.commits.get(piece, ())
            result = part.snapshot.result(piece - part.pieces.start, score, part.label, commits)
            file = int(self.segments.owners[piece])
            weak = is_weak(query, scores, file, result.commits)
            if weak and self.stands_out(similarity, slice(piece, piece + 1)):
                weak = False
            results.append(replace(result, weak=weak))
        return results

    def piece_at(self, path: str, line: int) -> int:
        """Returns the piece that contains a line of a file.

        Raises:
            UserError: the file is not in the index, or it has no piece at this line.
        """
        for part in self.parts:
            if path.startswith(part.label):
                piece = part.snapshot.piece_at(path.removeprefix(part.label), line)
                if piece is not None:
                    return part.pieces.start + piece
        raise UserError(f"{path}:{line}: not in the index; give a path and a line as in a search result")

    def query_like(self, piece: int) -> ranking.Query:
        """Makes a query from those words of a piece that are rare but also occur elsewhere."""
        part = self._part_of(piece)
        text = part.snapshot.result(piece - part.pieces.start).text
        counts: Counter[str] = Counter()
        for word in source_words(text.encode()):
            counts.update(terms(word))
        weights = {}
        for term, count in counts.items():
            others = len(self.segments.postings(term)[0]) - 1
            if others > 0:
                weights[term] = count / (count + 1) * np.log(len(self.segments.lengths) / others)
        chosen = sorted(weights, key=lambda term: (-weights[term], term))[:SIMILAR_TERMS]
        return ranking.Query("sentence", (), dict.fromkeys(chosen, 1.0))

    def stands_out(self, similarity: np.ndarray | None, pieces: slice) -> bool:
        """Returns True if one of these pieces is more similar to the query than any piece is to random letters.

        Args:
            pieces: pieces of one part.
        """
        if similarity is None or np.isnan(similarity[pieces]).all():
            return False
        part = self._part_of(pieces.start)
        return bool(np.nanmax(similarity[pieces]) > part.index.noise(part.snapshot))

    def _part_of(self, piece: int) -> _Part:
        """Returns the part that contains a piece."""
        return next(part for part in self.parts if piece < part.pieces.stop)
