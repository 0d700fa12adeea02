"""Reads what a search needs from one index: segments, embeddings, filters, and the texts of results."""

from __future__ import annotations

import json
import re
import sqlite3
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import numpy as np

from soft_trainer.search.commits.memory import SHOWN_COMMITS, CommitMemory
from soft_trainer.search.index import store, vectors
from soft_trainer.search.index.globs import path_filter
from soft_trainer.search.index.parsing import DEFINED, NAME
from soft_trainer.search.index.words import stem, whole
from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.source.names import identifier_words

_decompressed = lru_cache(maxsize=1)(zlib.decompress)  # a file's chunks are often read one after another


class Snapshot:
    """Everything that a search reads from one index, in a single transaction.

    Attributes:
        state: the state of the embeddings, or None if the index has no encoder.
        noise: the highest similarity of any chunk to random letters, or None until it is computed.

    Args:
        prefix: the start of a path. Only files whose path starts with `prefix` are read. Results omit the prefix.
    """

    def __init__(self, database: sqlite3.Connection, index_dir: Path, prefix: str = ""):
        self.database = database
        self.prefix = prefix
        self.segments = store.Segments(database, prefix)
        known = store.get_meta(database, "languages", [])
        # The number of each language that occurs. A language whose files have all been removed is not listed.
        present = np.flatnonzero(np.bincount(self.segments.languages))  # `np.unique` imports numpy.ma, which is slow
        self.languages = {known[number]: number for number in present.tolist()}
        self.memory = CommitMemory(database, self.segments)
        self.noise: float | None = None
        self.state: dict | None = store.get_meta(database, "vectors")
        if self.state:
            self.vectors = vectors.open_vectors(index_dir, self.state)
            self.slots = np.full(len(self.segments.lengths), -1)  # the row of each chunk's embedding, -1 for none
            for file, blob in database.execute("SELECT file, slots FROM vectors JOIN files ON id = file"):
                first = self.segments.first_chunk(file)
                if first is not None:
                    slots = np.frombuffer(blob, "<i4")
                    self.slots[first : first + len(slots)] = slots

    def similarity(self, embedding: np.ndarray) -> np.ndarray:
        """Computes each chunk's similarity to a query, float32[chunks], or NaN for a chunk without an embedding."""
        return np.append(vectors.similarities(self.vectors, embedding), np.float32(np.nan))[self.slots]

    def embedding(self, chunk: int) -> np.ndarray | None:
        """Returns a chunk's embedding, or None if it has none."""
        if not self.state or self.slots[chunk] < 0:
            return None
        return self.vectors[self.slots[chunk]].astype(np.float32)

    def allowed(self, path: str | None, languages: set[str] | None, name: str | None, label: str) -> np.ndarray:
        """Returns which chunks pass the filters, bool[chunks]. Paths are matched with and without the `label`."""
        segments = self.segments
        files = np.ones(len(segments.languages), bool)
        if languages is not None:
            numbers = [number for known, number in self.languages.items() if known in languages]
            files &= np.isin(segments.languages, numbers)
        if path:
            pattern = path_filter(path)
            matching = np.zeros(len(files), bool)
            for file, full in self.database.execute("SELECT id, path FROM files"):
                number = segments.number_of.get(file)
                if number is not None:
                    own = full.removeprefix(self.prefix)
                    matching[number] = bool(pattern.fullmatch(own) or pattern.fullmatch(label + own))
            files &= matching
        chunks = files[segments.owners]
        if name:
            chunks &= self._named(name)
        return chunks

    def _named(self, name: str) -> np.ndarray:
        """Returns which chunks define a name, bool[chunks]. A `*` in the name matches anything.

        `Session.get` also finds `api.Session.get`.
        """
        segments = self.segments
        parts = re.findall(r"[\w$*]+", name)
        named = np.zeros(len(segments.lengths), bool)
        for term in self._terms_of_name("".join(parts[-1:])):
            named[segments.postings(term)[0]] = True
        for part in parts[:-1]:
            for word in identifier_words(part) if "*" not in part else ():
                named &= np.isin(np.arange(len(named)), segments.postings(NAME + stem(word))[0])
        if len(parts) > 1:
            pattern = whole(".".join(parts))
            for chunk, own in zip(np.flatnonzero(named), segments.names(np.flatnonzero(named)), strict=True):
                qualified = "." + whole(".".join(re.findall(r"[\w$]+", own)))
                named[chunk] = fnmatchcase(qualified, f"*.{pattern}")
        return named

    def _terms_of_name(self, name: str) -> list[str]:
        """Returns the index terms for definitions of an unqualified name, in which `*` matches anything."""
        term = DEFINED + whole(name)
        if "*" not in term:
            return [term]
        query = "SELECT DISTINCT term FROM postings WHERE term >= '=' AND term < '>'"
        return [known for (known,) in self.database.execute(query) if fnmatchcase(known, term)]

    def chunk_at(self, path: str, line: int) -> int | None:
        """Returns the chunk that contains a line of a file, or the next chunk if no chunk contains the line.

        Returns None if the file is not in the index, or if the line is after the file's last chunk.
        """
        query = "SELECT id, chunks FROM files JOIN contents ON file = id WHERE path = ?"
        row = self.database.execute(query, (store.storable(self.prefix + path),)).fetchone()
        if row is None:
            return None
        file, chunks = row
        first = self.segments.first_chunk(file)
        for chunk, (_, end, _) in enumerate(json.loads(chunks), first):
            if line <= end:
                return chunk
        return None

    def result(self, chunk: int, score: float = 0.0, label: str = "", votes: Sequence[int] = ()) -> SearchResult:
        """Returns a chunk as a search result, with its text and the most similar commits that voted for it.

        Args:
            label: a prefix for the path.
            votes: the numbers of the commits that voted for the chunk, most similar first.
        """
        file = int(self.segments.owners[chunk])
        query = "SELECT path, language, chunks, text FROM files JOIN contents ON file = id WHERE id = ?"
        path, language, chunks, text = self.database.execute(query, (int(self.segments.ids[file]),)).fetchone()
        start, end, name = json.loads(chunks)[chunk - int(self.segments.firsts[file])]
        lines = _decompressed(text).split(b"\n", end)[start - 1 : end]
        shown = b"\n".join(lines).decode(errors="replace")
        commits = tuple(self.memory.commit(number) for number in votes[:SHOWN_COMMITS])
        return SearchResult(label + path.removeprefix(self.prefix), start, end, language, name, score, shown, commits)
