"""Files to what the index stores: text, pieces, and how often each term stands in each piece."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from soft_trainer.mining.pieces import Piece, language_of, split
from soft_trainer.mining.rules import is_test_path
from soft_trainer.mining.source_files import read_text
from soft_trainer.mining.words import WORD, name_parts, stem, terms, whole

# A term's first letter says what it is found in; a term of the text has none.
DEFINED, NAME, PATH, OWN_NAME = "=", "@", "/", "//"
MAX_COUNT = 255
_PACKAGE_FILES = {"__init__", "index", "mod"}


@dataclass
class FileEntry:
    """One file as it is stored; `pieces` are `[start, end, name]`, `traits` the numbers of `store.TRAITS`."""

    path: str
    language: str
    traits: tuple[int, int, int]
    digest: bytes
    text: bytes
    pieces: list[list]
    lengths: list[int]


@dataclass
class Batch:
    """Files that were read together, and their terms.

    Entry i says that `vocabulary[term[i]]` is `count[i]` times in `piece[i]`, counted from 0 over all files.
    """

    files: list[FileEntry] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=list)
    term: np.ndarray | None = None
    piece: np.ndarray | None = None
    count: np.ndarray | None = None


def read_batch(root: str, paths: list[str]) -> Batch:
    """Read files, split them and count their terms."""
    batch, vocabulary = Batch(), _Vocabulary()
    term, count, sizes = [], [], []
    for path in paths:
        source = read_text(root, path)
        if isinstance(source, str):
            batch.skipped[path] = source
            continue
        entry, counts = _read(path, source, vocabulary)
        batch.files.append(entry)
        for terms_of_piece in counts:
            term.extend(terms_of_piece)
            count.extend(terms_of_piece.values())
            sizes.append(len(terms_of_piece))
    batch.vocabulary = list(vocabulary.numbers)
    batch.term = np.array(term, np.int32)
    batch.piece = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    batch.count = np.minimum(np.array(count, np.int64), MAX_COUNT).astype(np.uint8)
    return batch


class _Vocabulary:
    """Numbers for the terms of a batch."""

    def __init__(self):
        self.numbers: dict[str, int] = {}
        self._words: dict[str, tuple[int, ...]] = {}

    def number(self, term: str) -> int:
        """The number of a term."""
        return self.numbers.setdefault(term, len(self.numbers))

    def word(self, word: str) -> tuple[int, ...]:
        """The numbers of a word's terms."""
        known = self._words.get(word)
        if known is None:
            known = self._words[word] = tuple(map(self.number, terms(word)))
        return known


def _read(path: str, source: bytes, vocabulary: _Vocabulary) -> tuple[FileEntry, list[dict[int, int]]]:
    """One file, and how often each term stands in each of its pieces."""
    language = language_of(path, source)
    lines = source.decode(errors="replace").split("\n")
    pieces, counts, lengths = [], [], []
    # a file without a word is found by its path
    for place, piece in enumerate(split(source, language) or [Piece(1, 1)]):
        counted: dict[int, int] = {}
        for word, times in Counter(WORD.findall("\n".join(lines[piece.start - 1 : piece.end]))).items():
            for number in vocabulary.word(word):
                counted[number] = counted.get(number, 0) + times
        lengths.append(min(sum(counted.values()), 65_535))
        named = [DEFINED + whole(name) for name in piece.defines]
        named += [NAME + stem(part) for name in piece.defines for part in name_parts(name)]
        counted |= dict.fromkeys(map(vocabulary.number, named + (path_terms(path) if place == 0 else [])), 1)
        pieces.append([piece.start, piece.end, piece.name])
        counts.append(counted)
    own, _ = name_and_folders(path)
    traits = int(is_test_path(path, language)), min(path.count("/"), 255), min(len(name_parts(own)), 255)
    digest = blake2b(source, digest_size=16).digest()
    return FileEntry(path, language, traits, digest, zlib.compress(source, 1), pieces, lengths), counts


def path_terms(path: str) -> list[str]:
    """The terms of a path: of its folders with one sign in front, of the file's own name with two."""
    own, folders = name_and_folders(path)
    return [
        *{OWN_NAME + term for word in WORD.findall(own) for term in terms(word)},
        *{PATH + term for word in WORD.findall(folders) for term in terms(word)},
    ]


def name_and_folders(path: str) -> tuple[str, str]:
    """The file's own name without endings, and its folders; `__init__` and its like have the folder's name."""
    folders, _, name = path.rpartition("/")
    own = name.lstrip(".").split(".")[0]
    if own.lower() in _PACKAGE_FILES and folders:
        folders, _, own = folders.rpartition("/")
    return own, folders


def pieces_json(pieces: list[list]) -> str:
    """Pieces as the store keeps them."""
    return json.dumps(pieces, ensure_ascii=False, separators=(",", ":"))
