"""Reads what a search needs from one index: segments, embeddings, filters, and the texts of results."""

from __future__ import annotations

import fnmatch
import random
import re
import sqlite3
import zlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from soft_trainer.encoders.text_encoder import TextEncoder
from soft_trainer.search.index import store, vectors
from soft_trainer.search.index.globs import path_filter
from soft_trainer.search.index.parsing import DEFINED, NAME, OWN_NAME
from soft_trainer.search.index.words import composed, parts, stem, whole
from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.source.definitions import compact_name
from soft_trainer.source.names import identifier_words

# A name and what stands before it, as in `Session.get`, `Parser::parse`, `Cart#total`, `cart->total`, `(*Server).Run`.
_QUALIFIED = re.compile(r"(?:(.*[\w)*>])(?:\.|::|#|->)(?=.))?(.*)")
MAX_QUALIFIERS = 8  # the last qualifiers of a query that may be part of a name
_PUNCTUATION = "?!()&.,:;#~"
_decompressed = lru_cache(maxsize=1)(zlib.decompress)  # a file's chunks are often read one after another


class Snapshot:
    """Everything that a search reads from one index, in a single transaction.

    Attributes:
        state: the state of the embeddings, or None if the index has no encoder.

    Args:
        prefix: the start of a path. Only files whose path starts with `prefix` are read. Results omit the prefix.
        encoder: returns the encoder that computed the embeddings.
    """

    def __init__(self, database: sqlite3.Connection, prefix: str, encoder: Callable[[], TextEncoder]):
        self.encoder = encoder
        self.database = database
        self.prefix = prefix
        self.segments = store.Segments(database, prefix)
        self.languages = set(self.segments.languages.tolist())
        self._noise: float | None = None
        self.state: dict | None = store.get_meta(database, "vectors")
        if self.state:
            self.vectors = vectors.read_vectors(database)
            self.slots = vectors.rows_of(database, self.segments.digests)  # -1 for a chunk without an embedding
            self.missing = int((self.slots < 0).sum())

    def similarity(self, embedding: np.ndarray) -> np.ndarray:
        """Computes each chunk's similarity to a query, float32[chunks], or NaN for a chunk without an embedding."""
        return np.append(vectors.similarities(self.vectors, embedding), np.float32(np.nan))[self.slots]

    def noise(self) -> float:
        """Returns the highest similarity between any chunk and meaningless queries of random letters."""
        if self._noise is None:
            letters = random.Random(0)
            texts = []
            for _ in range(24):
                word = letters.choices("bcdfghjklmnpqrstvwxyz", k=letters.randint(3, 9))
                texts.append("".join(word))
            embeddings = self.encoder().encode(texts, "query")
            self._noise = max(float(np.nanmax(self.similarity(embedding))) for embedding in embeddings)
        return self._noise

    def text_of(self, path: str) -> str | None:
        """Returns the text that a file had when it was indexed, or None if the file is not in the index."""
        query = "SELECT text FROM contents JOIN files ON file = id WHERE path = ?"
        path = store.indexed_path(self.database, self.prefix + path)
        for (text,) in self.database.execute(query, (path,)):
            return _decompressed(text).decode(errors="replace")
        return None

    def similarity_to_chunk(self, chunk: int) -> np.ndarray | None:
        """Computes each chunk's similarity to one chunk, or returns None if that chunk has no embedding."""
        row = self.slots[chunk]
        return None if row < 0 else self.similarity(self.vectors[row].astype(np.float32))

    def allowed(self, path: str | None, languages: set[str] | None, name: str | None) -> np.ndarray:
        """Returns which chunks pass the filters, bool[chunks]."""
        segments = self.segments
        files = np.ones(len(segments.languages), bool)
        if languages is not None:
            files &= np.isin(segments.languages, list(languages))
        if path:
            pattern = path_filter(path)
            for number, own in enumerate(map(composed, segments.paths)):
                files[number] &= bool(pattern.fullmatch(own))
        chunks = files[segments.owners]
        if name:
            chunks &= self._named(name)
        return chunks

    def exact(self, name: str) -> np.ndarray:
        """Returns the chunks that define a qualified name or a name with signs: `Cart.save`, `save!`, `operator==`.

        The first qualifiers may be packages and modules, which are not part of a chunk's name. An identifier that no
        text has is the beginning of a name.
        """
        around, own = _QUALIFIED.fullmatch(name).groups("")
        if own == name and own.isidentifier() and parts(own) and not len(self.segments.postings(stem(whole(own)))[0]):
            return np.flatnonzero(self._defining(own + "*"))
        qualifiers = re.findall(r"[\w$*]+", around)[-MAX_QUALIFIERS:]
        named = np.zeros(len(self.segments.lengths), bool)
        for first in range(len(qualifiers) + (not own.isidentifier() and "*" not in own)):
            named = named if named.any() else self._named(".".join([*qualifiers[first:], own]))
        for module in qualifiers[-1:] if not named.any() else ():
            files = self.segments.owners[self.segments.postings(OWN_NAME + stem(whole(module)))[0]]
            named = self._named(own) & np.isin(self.segments.owners, files)
        return np.flatnonzero(named)

    def _named(self, name: str) -> np.ndarray:
        """Returns which chunks define a name, bool[chunks]. A `*` in the name matches anything.

        `Session.get` also finds `api.Session.get`. A name with signs, such as `Vec.operator[]` or `valid?`, finds only
        itself. If nothing has such a name, signs around it are ignored, as in `parse_date()`.
        """
        around, own = _QUALIFIED.fullmatch(compact_name(composed(name))).groups("")
        named = self._defining(own)
        if not named.any():
            own = own.strip(_PUNCTUATION)
            named = self._defining(own)
        qualifiers = re.findall(r"[\w$*]+", around)
        for qualifier in qualifiers:
            for word in identifier_words(qualifier) if "*" not in qualifier else ():
                named &= np.isin(np.arange(len(named)), self.segments.postings(NAME + stem(word))[0])
        if qualifiers:
            pattern = _fnmatch_pattern("*." + ".".join([*qualifiers, own]))
            for chunk, known in zip(np.flatnonzero(named), self.segments.names(np.flatnonzero(named)), strict=True):
                forms = known, ".".join(re.findall(r"[\w$]+", known))
                named[chunk] = any(fnmatch.fnmatchcase("." + whole(form), pattern) for form in forms)
        return named

    def _defining(self, name: str) -> np.ndarray:
        """Returns which chunks define an unqualified name, in which `*` matches anything, bool[chunks]."""
        terms = [DEFINED + whole(name)]
        if "*" in name and not len(self.segments.postings(terms[0])[0]):  # `operator*`
            query = "SELECT DISTINCT term FROM postings WHERE term >= '=' AND term < '>'"
            known = (term for (term,) in self.database.execute(query))
            terms = fnmatch.filter(known, _fnmatch_pattern(DEFINED + name))
        named = np.zeros(len(self.segments.lengths), bool)
        for term in terms:
            named[self.segments.postings(term)[0]] = True
        return named

    def terms_like(self, term: str) -> set[str]:
        """Returns the index's terms with the same first letter and nearly the same length."""
        query = "SELECT DISTINCT term FROM postings WHERE term >= ?1 AND term < ?2 AND abs(length(term) - ?3) <= 3"
        rows = self.database.execute(query, (term[0], chr(ord(term[0]) + 1), len(term)))
        return {known for (known,) in rows}

    def chunk_at(self, path: str, line: int) -> int | None:
        """Returns the chunk that contains a line of a file, or the next chunk if no chunk contains the line.

        Returns None if the file is not in the index, or if the line is after the file's last chunk.
        """
        path = store.indexed_path(self.database, self.prefix + path)
        return next((chunk for chunk, end in self.segments.chunks_of(path) if line <= end), None)

    def result(self, chunk: int, score: float = 0.0) -> SearchResult:
        """Returns a chunk as a search result, with its text."""
        file = int(self.segments.owners[chunk])
        segments = self.segments
        query = "SELECT text FROM contents WHERE file = ?"
        (text,) = self.database.execute(query, (segments.ids[file],)).fetchone()
        start, end, name = segments.spans(file)[chunk - int(segments.firsts[file])]
        lines = _decompressed(text).split(b"\n", end)[start - 1 : end]
        shown = b"\n".join(lines).decode(errors="replace")
        language = str(segments.languages[file])
        return SearchResult(segments.paths[file], start, end, language, name, score, shown)


def _fnmatch_pattern(name: str) -> str:
    """Returns a pattern in which only `*` is special."""
    return re.sub(r"[\[?]", r"[\g<0>]", whole(name))
