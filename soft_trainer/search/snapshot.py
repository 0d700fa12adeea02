"""All that a search reads of an index: its segments and embeddings, the filters, and the text of a result."""

from __future__ import annotations

import json
import re
import sqlite3
import zlib
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search import store, vectors
from soft_trainer.search.globs import STAR, expression, path_filter
from soft_trainer.search.results import SearchResult
from soft_trainer.search.terms import DEFINED
from soft_trainer.search.words import whole

# A filter by language finds these with it.
_RELATED = {"typescript": ["tsx"], "c++": ["cpp"], "c#": ["csharp"], "js": ["javascript"], "ts": ["typescript", "tsx"]}


class Snapshot:
    """Everything a search reads, in one transaction; `state` is that of the embeddings, None without an encoder."""

    def __init__(self, database: sqlite3.Connection, index_dir: Path):
        self.database = database
        self.segments = store.Segments(database)
        self.state: dict | None = store.get_meta(database, "vectors")
        if self.state:
            self.vectors = vectors.open_vectors(index_dir, self.state)
            firsts = self.segments.firsts
            self.slots = np.full(len(self.segments.lengths), -1)  # the row of each piece's embedding
            for file, blob in database.execute("SELECT file, slots FROM vectors JOIN files ON id = file"):
                self.slots[firsts[file] : firsts[file + 1]] = np.frombuffer(blob, "<i4")

    def similarity(self, embedding: np.ndarray) -> np.ndarray:
        """Computes the similarity of every piece to a query, float32[pieces]; NaN for one without an embedding."""
        return np.append(vectors.similarities(self.vectors, embedding), np.float32(np.nan))[self.slots]

    def allowed(self, path: str | None, language: str | None, name: str | None) -> np.ndarray | None:
        """Returns the pieces that the filters leave, bool[pieces]; None without a filter."""
        segments = self.segments
        if path is None and language is None and name is None:
            return None
        files = segments.live.copy()
        if language is not None:
            wanted = {language.lower(), *_RELATED.get(language.lower(), ())}
            languages = store.get_meta(self.database, "languages", [])
            numbers = [number for number, known in enumerate(languages) if known in wanted]
            if not numbers:
                raise UserError(f"language={language!r}: the index has {', '.join(sorted(languages))}")
            files &= np.isin(segments.languages, numbers)
        if path is not None:
            pattern = path_filter(path)
            rows = self.database.execute("SELECT id, path FROM files")
            files &= np.isin(np.arange(len(files)), [file for file, own in rows if pattern.fullmatch(own)])
        pieces = files[segments.owners]
        if name is not None:
            key = DEFINED + whole("".join(re.findall(r"[\w$*]+", name)[-1:]))
            pattern = re.compile(expression([STAR if letter == "*" else re.escape(letter) for letter in key]))
            query = "SELECT DISTINCT term FROM postings WHERE term >= '=' AND term < '>'"
            terms = [term for (term,) in self.database.execute(query)] if "*" in key else [key]
            found = [segments.postings(term)[0] for term in terms if pattern.fullmatch(term)]
            pieces &= np.isin(np.arange(len(pieces)), np.concatenate(found) if found else [])
        return pieces

    def result(self, piece: int, score: float) -> SearchResult:
        """Reads a piece with its text."""
        file = int(self.segments.owners[piece])
        query = "SELECT path, language, pieces, text FROM files JOIN contents ON file = id WHERE id = ?"
        path, language, pieces, text = self.database.execute(query, (file,)).fetchone()
        start, end, name = json.loads(pieces)[piece - int(self.segments.firsts[file])]
        lines = zlib.decompress(text).split(b"\n", end)[start - 1 : end]
        return SearchResult(path, start, end, language, name, score, b"\n".join(lines).decode(errors="replace"))
