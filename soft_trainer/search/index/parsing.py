"""Reads files for the index, splits them into chunks and counts the terms in each chunk."""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from soft_trainer.search.index.chunks import LANGUAGES, TEXT_LANGUAGES, Chunk, first_paragraph, language_of, split
from soft_trainer.search.index.listing import maybe_vendored
from soft_trainer.search.index.notebooks import is_notebook, notebook_text
from soft_trainer.search.index.store import DIGESTS, KINDS, LENGTHS, TRAITS
from soft_trainer.search.index.vectors import digest as digest_of, embedded_text
from soft_trainer.search.index.words import WORD, composed, source_words, stem, terms, whole
from soft_trainer.source.names import identifier_words, is_test_path
from soft_trainer.source.source_files import MAX_FILE_BYTES, is_generated, read_regular, readable

# The prefix of a term tells where the term occurs. Terms from the text have no prefix.
DEFINED = "="
NAME = "@"
OWN_NAME = "//"
SUMMARY = "~"
MAX_COUNT = 255
MAX_NOTEBOOK_BYTES = 20_000_000  # including its pictures, which are not indexed
_PACKAGE_FILES = {"__init__", "index", "mod"}


class ReadFile(NamedTuple):
    """A file in the format of the index, without its terms.

    Args:
        spans: the `[start, end, name]` of each chunk, as JSON.
        text: the compressed text.
        others: the other columns of the table `files`, beginning with the language.
    """

    path: str
    chunks: int
    spans: str
    text: bytes
    others: dict[str, str | bytes]


class Batch(NamedTuple):
    """A batch of files with their terms.

    Args:
        files: the files that have changed.
        skipped: the files that cannot be searched, with the reasons.
        touched: the files with a new modification time but unchanged content.
        vocabulary: the terms.
        term, chunk, count: term `vocabulary[term[i]]` occurs `count[i]` times in chunk `chunk[i]`. Chunks are numbered
            across all `files`.
    """

    files: list[ReadFile]
    skipped: dict[str, str]
    touched: list[str]
    vocabulary: list[str]
    term: np.ndarray
    chunk: np.ndarray
    count: np.ndarray


def read_batch(root: str, known: Mapping[str, tuple | None], included: Collection[str] = ()) -> Batch:
    """Reads files, splits them into chunks and counts their terms.

    Args:
        root: the indexed folder.
        known: the files to read, as paths mapped to (digest, language) from the index, or to None for a new file.
        included: files to read even if they are minified.
    """
    files = []
    skipped = {}
    touched = []
    numbers = defaultdict(count().__next__)
    term = []
    sizes = []
    numbers_of = cache(lambda word: [numbers[one] for one in terms(word)])
    for path, as_indexed in known.items():
        read = read_source(root, path, path in included)
        if isinstance(read, str):
            skipped[path] = read
            continue
        source, language = read
        digest = blake2b(source, digest_size=16).digest()
        if (digest, language) == as_indexed:
            touched.append(path)
            continue
        spans = []
        lengths = []
        kinds = []
        digests = []
        broken = 0
        lines = source.split(b"\n")
        for chunk, text, marked in _chunks(path, source, language):
            before = len(term)
            term.extend(chain.from_iterable(map(numbers_of, source_words(text))))
            lengths.append(min(len(term) - before, 65_535))
            term.extend(map(numbers.__getitem__, marked))
            sizes.append(len(term) - before)
            spans.append([chunk.start, chunk.end, chunk.name])
            kinds.append(chunk.kind)
            broken = max(broken, chunk.broken)
            digests.append(digest_of(embedded_text(path, chunk.name, lines[chunk.start - 1 : chunk.end])))
        traits = {
            "test": is_test_path(path, language),
            "depth": min(path.count("/"), 255),
            "name_parts": min(len(identifier_words(_own_name(path))), 255),
            "text": language in TEXT_LANGUAGES,
            "vendored": maybe_vendored(path),
            "generated": is_generated(source),
            "broken": broken,
        }
        others = {
            "language": language,
            "digest": digest,
            "traits": bytes(traits[trait] for trait in TRAITS),
            "lengths": np.array(lengths, LENGTHS).tobytes(),
            "kinds": np.array(kinds, KINDS).tobytes(),
            "digests": np.array(digests, DIGESTS).tobytes(),
        }
        chunks = json.dumps(spans, ensure_ascii=False, separators=(",", ":"))
        files.append(ReadFile(path, len(spans), chunks, zlib.compress(source, 1), others))
    # Each pair of a term and a chunk is encoded as one integer. NumPy sorts integers faster than Python counts pairs.
    pairs = np.array(term, np.int64) * len(sizes) + np.repeat(np.arange(len(sizes)), sizes)
    pairs, times = np.unique(pairs, return_counts=True)
    terms_and_chunks = np.divmod(pairs, max(len(sizes), 1))
    postings = (*(some.astype(np.int32) for some in terms_and_chunks), np.minimum(times, MAX_COUNT).astype(np.uint8))
    return Batch(files, skipped, touched, list(numbers), *postings)


def read_source(root: str, path: str, included: bool = False) -> tuple[bytes, str] | str:
    """Returns a file's text and language, or the reason to skip the file.

    Args:
        included: True to read the file even if it is minified.
    """
    full = os.path.join(root, path)
    language = ""
    if is_notebook(path):
        source = read_regular(full, MAX_NOTEBOOK_BYTES)
        if isinstance(source, bytes):
            source, language = notebook_text(source) or (source, "")
            if language and language not in LANGUAGES:
                language = "text"  # languages are shown outside the marks of untrusted text
        if len(source) > MAX_FILE_BYTES:
            return f"over {MAX_FILE_BYTES:,} bytes"
    else:
        source = read_regular(full, MAX_FILE_BYTES)
    source = readable(source, path, minified=included)
    if isinstance(source, str):
        return source
    return source, language or language_of(path, source)


def _chunks(path: str, source: bytes, language: str) -> Iterator[tuple[Chunk, bytes, set[str]]]:
    """Yields each chunk with its text and marked terms, which come from names, the path and documentation."""
    if not source.isascii():  # letters that are composed of other characters, but the same lines
        source = composed(source.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    lines = source.split(b"\n")
    marked = _marked(OWN_NAME, WORD.findall(_own_name(composed(path))))  # of the first chunk
    chunks = split(source, language, is_notebook(path))
    for chunk in chunks or [Chunk(1, 1)]:  # a file without words can be found by its path
        text = b"\n".join(lines[chunk.start - 1 : chunk.end])
        marked |= _marked(SUMMARY, source_words(first_paragraph(text)))
        if chunk.defines:
            for name in (chunk.name, *chunk.defines):
                marked |= {NAME + stem(part) for part in identifier_words(name)}
            marked |= {DEFINED + whole(name) for name in chunk.defines}
        yield chunk, text, marked
        marked = set()


def _marked(sign: str, words: list[str]) -> set[str]:
    """Returns the words' terms, each with the prefix `sign`."""
    return {sign + term for word in words for term in terms(word)}


def _own_name(path: str) -> str:
    """Returns the name of a file without its extension.

    If the file name is `__init__`, `index` or `mod`, the folder's name is used instead.
    """
    folders, _, name = path.rpartition("/")
    own = name.lstrip(".").rsplit(".", 1)[0]
    if own.lower() in _PACKAGE_FILES and folders:
        own = folders.rpartition("/")[2]
    return own
