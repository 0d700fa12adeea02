"""Turns files into what the index stores: text, pieces, and how often each term occurs in each piece."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice

import numpy as np

from soft_trainer.mining.identifiers import identifier_words
from soft_trainer.mining.rules import is_test_path
from soft_trainer.mining.source_files import read_text
from soft_trainer.search.listing import maybe_vendored
from soft_trainer.search.pieces import TEXT_LANGUAGES, Piece, first_paragraph, language_of, split
from soft_trainer.search.words import source_words, stem, terms, whole, words

# A term's first letter says what it is found in; a term of the text has none.
DEFINED, NAME, PATH, OWN_NAME, SUMMARY = "=", "@", "/", "//", "~"
MAX_WORDS = 400_000  # of a vocabulary, which takes about 150 MB
MAX_COUNT = 255
_PACKAGE_FILES = {"__init__", "index", "mod"}


@dataclass
class FileEntry:
    """One file as it is stored; `pieces` are `[start, end, name]`, `traits` the numbers of `store.TRAITS`."""

    path: str
    language: str
    traits: tuple[int, ...]
    digest: bytes
    text: bytes
    pieces: list[list]
    lengths: list[int]
    name_words: list[int]


@dataclass
class Batch:
    """Files that were read together, and their terms.

    Entry i says that term `term[i]` is `count[i]` times in `piece[i]`, counted from 0 over all files. A process
    numbers the terms as it meets them; `new_terms` are those that it had in no batch before. When its vocabulary is
    full, it begins a new one: `reader` is the process and the number of its vocabulary.
    """

    reader: tuple[int, int]
    files: list[FileEntry] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    new_terms: list[str] = field(default_factory=list)
    term: np.ndarray | None = None
    piece: np.ndarray | None = None
    count: np.ndarray | None = None


class Numbers(dict):
    """Numbers of strings, in the order in which they are first looked up."""

    def __missing__(self, string: str) -> int:
        number = self[string] = len(self)
        return number


class Reader:
    """Reads the files of a tree in batches: splits them and counts their terms."""

    def __init__(self, root: str):
        self.root = root
        self.vocabulary = -1
        self._begin_vocabulary()

    def _begin_vocabulary(self) -> None:
        self.vocabulary += 1
        self.numbers = Numbers()
        self.numbers_of_word = _TermsOfWords(self.numbers)

    def read(self, paths: list[str]) -> Batch:
        """Reads files and skips those that no person wrote."""
        if len(self.numbers_of_word) > MAX_WORDS:
            self._begin_vocabulary()
        batch, known = Batch((os.getpid(), self.vocabulary)), len(self.numbers)
        term: list[int] = []
        sizes: list[int] = []
        for path in paths:
            source = read_text(self.root, path)
            if isinstance(source, str):
                batch.skipped[path] = source
                continue
            batch.files.append(self._read(path, source, term, sizes))
        batch.new_terms = list(islice(self.numbers, known, None))
        # NumPy sorts numbers faster than Python counts them, so a pair of term and piece is one number.
        piece = np.repeat(np.arange(len(sizes)), sizes)
        pairs, count = np.unique(np.array(term, np.int64) * len(sizes) + piece, return_counts=True)
        batch.term, batch.piece = (part.astype(np.int32) for part in np.divmod(pairs, max(len(sizes), 1)))
        batch.count = np.minimum(count, MAX_COUNT).astype(np.uint8)
        return batch

    def _read(self, path: str, source: bytes, term: list[int], sizes: list[int]) -> FileEntry:
        """Reads one file; appends the terms of its pieces to `term` and their number for each piece to `sizes`."""
        language = language_of(path, source)
        lines = source.split(b"\n")
        pieces, lengths, name_words = [], [], []
        # a file without a word is found by its path
        for place, piece in enumerate(split(source, language) or [Piece(1, 1)]):
            before = len(term)
            text = b"\n".join(lines[piece.start - 1 : piece.end])
            found = source_words(text)
            term.extend(chain.from_iterable(map(self.numbers_of_word.__getitem__, found)))
            lengths.append(min(len(term) - before, 65_535))
            marked = {DEFINED + whole(name) for name in piece.defines}
            named = [piece.name, *piece.defines] if piece.defines else []
            marked |= {NAME + stem(part) for name in named for part in identifier_words(name)}
            marked |= {SUMMARY + term for word in source_words(first_paragraph(text)) for term in terms(word)}
            marked |= path_terms(path) if place == 0 else set()
            term.extend(map(self.numbers.__getitem__, marked))
            sizes.append(len(term) - before)
            pieces.append([piece.start, piece.end, piece.name])
            name_words.append(min(len(identifier_words(piece.name.rsplit(".", 1)[-1])), 255))
        own, _ = name_and_folders(path)
        depth, parts = min(path.count("/"), 255), min(len(identifier_words(own)), 255)
        kinds = language in TEXT_LANGUAGES, maybe_vendored(path)
        traits = int(is_test_path(path, language)), depth, parts, *map(int, kinds)
        digest = blake2b(source, digest_size=16).digest()
        return FileEntry(path, language, traits, digest, zlib.compress(source, 1), pieces, lengths, name_words)


class _TermsOfWords(dict):
    """The numbers of each word's terms."""

    def __init__(self, numbers: Numbers):
        self.numbers = numbers

    def __missing__(self, word: str) -> tuple[int, ...]:
        numbers = self[word] = tuple([self.numbers[term] for term in terms(word)])
        return numbers


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
