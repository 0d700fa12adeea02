"""Turns files into what the index stores: text, pieces, and how often each term occurs in each piece."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import chain, count

import numpy as np

from soft_trainer.mining.rules import identifier_words, is_test_path
from soft_trainer.mining.source_files import read_text
from soft_trainer.search.listing import maybe_vendored
from soft_trainer.search.pieces import TEXT_LANGUAGES, Piece, first_paragraph, language_of, split
from soft_trainer.search.words import source_words, stem, terms, whole, words

# A term's first letter says what it is found in; a term of the text has none.
DEFINED, NAME, PATH, OWN_NAME, SUMMARY = "=", "@", "/", "//", "~"
MAX_COUNT = 255
_PACKAGE_FILES = {"__init__", "index", "mod"}


@dataclass
class FileEntry:
    """One file as it is stored; `pieces` are `[start, end, name]`, `traits` the numbers of `store.TRAITS`."""

    path: str
    language: str
    digest: bytes
    text: bytes
    traits: tuple[int, ...]
    pieces: list[list] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    name_words: list[int] = field(default_factory=list)


@dataclass
class Batch:
    """Files that were read together, and their terms.

    Entry i says that `vocabulary[term[i]]` is `count[i]` times in `piece[i]`, counted from 0 over all `files`. Of the
    other files, `skipped` has those that no person wrote, with the reason, and `touched` those that are as they were.
    """

    files: list[FileEntry]
    skipped: dict[str, str]
    touched: list[str]
    vocabulary: list[str]
    term: np.ndarray
    piece: np.ndarray
    count: np.ndarray


def read_batch(root: str, known: Mapping[str, tuple | None]) -> Batch:
    """Reads files, splits them and counts their terms; `known` maps their paths to (digest, language) in the index."""
    files, skipped, touched = [], {}, []
    numbers = defaultdict(count().__next__)
    term: list[int] = []
    sizes: list[int] = []

    @cache
    def numbers_of(word: str) -> list[int]:
        return [numbers[one] for one in terms(word)]

    for path, as_indexed in known.items():
        source = read_text(root, path)
        if isinstance(source, str):
            skipped[path] = source
            continue
        digest, language = blake2b(source, digest_size=16).digest(), language_of(path, source)
        if (digest, language) == as_indexed:
            touched.append(path)
            continue
        entry = FileEntry(path, language, digest, zlib.compress(source, 1), _traits(path, language))
        for piece, text, marked in _pieces(path, source, language):
            before = len(term)
            term.extend(chain.from_iterable(map(numbers_of, source_words(text))))
            entry.lengths.append(min(len(term) - before, 65_535))
            term.extend(map(numbers.__getitem__, marked))
            sizes.append(len(term) - before)
            entry.pieces.append([piece.start, piece.end, piece.name])
            entry.name_words.append(min(len(identifier_words(piece.name.rsplit(".", 1)[-1])), 255))
        files.append(entry)
    # NumPy sorts numbers faster than Python counts them, so a pair of term and piece is one number.
    pairs = np.array(term, np.int64) * len(sizes) + np.repeat(np.arange(len(sizes)), sizes)
    pairs, times = np.unique(pairs, return_counts=True)
    term_of, piece_of = (part.astype(np.int32) for part in np.divmod(pairs, max(len(sizes), 1)))
    times = np.minimum(times, MAX_COUNT).astype(np.uint8)
    return Batch(files, skipped, touched, list(numbers), term_of, piece_of, times)


def _pieces(path: str, source: bytes, language: str) -> Iterator[tuple[Piece, bytes, set[str]]]:
    """Yields the pieces of a file with their text and the terms of names, path and documentation."""
    lines = source.split(b"\n")
    marked = path_terms(path)  # of the first piece
    for piece in split(source, language) or [Piece(1, 1)]:  # a file without a word is found by its path
        text = b"\n".join(lines[piece.start - 1 : piece.end])
        marked |= {DEFINED + whole(name) for name in piece.defines}
        named = [piece.name, *piece.defines] if piece.defines else []
        marked |= {NAME + stem(part) for name in named for part in identifier_words(name)}
        marked |= {SUMMARY + term for word in source_words(first_paragraph(text)) for term in terms(word)}
        yield piece, text, marked
        marked = set()


def _traits(path: str, language: str) -> tuple[int, ...]:
    own, _ = name_and_folders(path)
    depth, parts = min(path.count("/"), 255), min(len(identifier_words(own)), 255)
    flags = is_test_path(path, language), language in TEXT_LANGUAGES, maybe_vendored(path)
    test, text, vendored = map(int, flags)
    return test, depth, parts, text, vendored


def path_terms(path: str) -> set[str]:
    """The terms of a path: one sign before those of its folders, two before those of the file name."""
    own, folders = name_and_folders(path)
    own_terms = {OWN_NAME + term for word in words(own) for term in terms(word)}
    return own_terms | {PATH + term for word in words(folders) for term in terms(word)}


def name_and_folders(path: str) -> tuple[str, str]:
    """Splits a path into the file name without its ending and the folders. `__init__` takes the folder's name."""
    folders, _, name = path.rpartition("/")
    own = name.lstrip(".").rsplit(".", 1)[0]
    if own.lower() in _PACKAGE_FILES and folders:
        folders, _, own = folders.rpartition("/")
    return own, folders
