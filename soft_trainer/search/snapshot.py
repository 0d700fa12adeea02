"""Gives a search its view of an index: segments, embeddings, filters, and the texts of results."""

from __future__ import annotations

import json
import re
import sqlite3
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from soft_trainer.search.commits.memory import SHOWN_COMMITS, CommitMemory
from soft_trainer.search.index import store, vectors
from soft_trainer.search.index.globs import path_filter
from soft_trainer.search.index.terms import DEFINED
from soft_trainer.search.index.words import whole
from soft_trainer.search.ranking.results import SearchResult


class Snapshot:
    """Everything that a search reads from one index, in a single transaction.

    Attributes:
        state: the state of the embeddings, or None if the index has no encoder.
        noise: the similarity that random letters reach, once it has been computed.
    """

    def __init__(self, database: sqlite3.Connection, index_dir: Path):
        self.database = database
        self.segments = store.Segments(database)
        self.languages: list[str] = store.get_meta(database, "languages", [])
        self.memory = CommitMemory(database, self.segments)
        self.noise: float | None = None
        self.state: dict | None = store.get_meta(database, "vectors")
        if self.state:
            self.vectors = vectors.open_vectors(index_dir, self.state)
            firsts = self.segments.firsts
            self.slots = np.full(len(self.segments.lengths), -1)  # the row of each piece's embedding, -1 for none
            for file, blob in database.execute("SELECT file, slots FROM vectors JOIN files ON id = file"):
                self.slots[firsts[file] : firsts[file + 1]] = np.frombuffer(blob, "<i4")

    def similarity(self, embedding: np.ndarray) -> np.ndarray:
        """Computes each piece's similarity to a query, float32[pieces]. It is NaN for a piece without an embedding."""
        return np.append(vectors.similarities(self.vectors, embedding), np.float32(np.nan))[self.slots]

    def embedding(self, piece: int) -> np.ndarray | None:
        """Returns a piece's embedding, or None if it has none."""
        if not self.state or self.slots[piece] < 0:
            return None
        return self.vectors[self.slots[piece]].astype(np.float32)

    def allowed(self, path: str | None, languages: set[str] | None, name: str | None, label: str) -> np.ndarray:
        """Returns the pieces that pass the filters, bool[pieces]. Paths are matched with and without the `label`."""
        segments = self.segments
        files = segments.live.copy()
        if languages is not None:
            numbers = [number for number, known in enumerate(self.languages) if known in languages]
            files &= np.isin(segments.languages, numbers)
        if path is not None:
            pattern = path_filter(path)
            matching = np.zeros(len(files), bool)
            for file, own in self.database.execute("SELECT id, path FROM files"):
                matching[file] = bool(pattern.fullmatch(own) or pattern.fullmatch(label + own))
            files &= matching
        pieces = files[segments.owners]
        if name is not None:
            named = np.zeros(len(pieces), bool)
            for term in self._terms_of_name(name):
                named[segments.postings(term)[0]] = True
            pieces &= named
        return pieces

    def _terms_of_name(self, name: str) -> list[str]:
        """Returns the index terms of the definitions with a name. A `*` in the name matches anything."""
        plain = re.findall(r"[\w$*]+", name)[-1:]  # without its classes
        term = DEFINED + whole("".join(plain))
        if "*" not in term:
            return [term]
        query = "SELECT DISTINCT term FROM postings WHERE term >= '=' AND term < '>'"
        return [known for (known,) in self.database.execute(query) if fnmatchcase(known, term)]

    def piece_at(self, path: str, line: int) -> int | None:
        """Returns the piece that contains a line of a file, or the next piece if none contains it.

        Returns None if the file is not in the index, or if the line is after its last piece.
        """
        query = "SELECT first, pieces FROM files JOIN contents ON file = id WHERE path = ?"
        row = self.database.execute(query, (path,)).fetchone()
        if row is None:
            return None
        first, pieces = row
        for piece, (_, end, _) in enumerate(json.loads(pieces), first):
            if line <= end:
                return piece
        return None

    def result(self, piece: int, score: float = 0.0, label: str = "", votes: Sequence[int] = ()) -> SearchResult:
        """Returns a piece as a search result, with its text and the most similar commits that voted for it.

        Args:
            label: a prefix for the path.
            votes: the numbers of the commits, most similar first.
        """
        file = int(self.segments.owners[piece])
        query = "SELECT path, language, pieces, text FROM files JOIN contents ON file = id WHERE id = ?"
        path, language, pieces, text = self.database.execute(query, (file,)).fetchone()
        start, end, name = json.loads(pieces)[piece - int(self.segments.firsts[file])]
        lines = zlib.decompress(text).split(b"\n", end)[start - 1 : end]
        shown = b"\n".join(lines).decode(errors="replace")
        commits = tuple(self.memory.commit(number) for number in votes[:SHOWN_COMMITS])
        return SearchResult(label + path, start, end, language, name, score, shown, commits)
