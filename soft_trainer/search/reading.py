"""Files to what the index stores: text, pieces, and how often each term stands in each piece."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from soft_trainer.search.pieces import language_of, split
from soft_trainer.search.tree import read_text
from soft_trainer.search.words import WORD, name_parts, stem, terms, whole

# A term's first letter says what it is found in; a term of the text has none.
DEFINED, NAME, PATH, OWN_NAME = "=", "@", "/", "//"
_TEST_PATH = re.compile(r"(?i)(^|[/_.-])(tests?|specs?|testdata|__tests__)([/_.-]|$)")
_TEST_CLASS = re.compile(r"(Test|Tests|Spec)\.[a-z]+$")
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
    """Files that were read together, and their terms: entry i says that `terms[term[i]]` is `count[i]` times in a piece.

    Pieces are counted from 0 over the files of the batch.
    """

    files: list[FileEntry] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    vocabulary: list[str] = field(default_factory=list)
    term: np.ndarray | None = None
    piece: np.ndarray | None = None
    count: np.ndarray | None = None


def read_batch(root: str, paths: list[str]) -> Batch:
    """Read files, split them and count their terms."""
    batch, numbers = Batch(), {}
    term, piece, count = [], [], []
    number = 0
    for path in paths:
        source = read_text(root, path)
        if isinstance(source, str):
            batch.skipped[path] = source
            continue
        entry, counts = _read(path, source)
        batch.files.append(entry)
        for terms_of_piece in counts:
            for name, times in terms_of_piece.items():
                term.append(numbers.setdefault(name, len(numbers)))
                count.append(times if times < MAX_COUNT else MAX_COUNT)
            piece += [number] * len(terms_of_piece)
            number += 1
    batch.vocabulary = list(numbers)
    batch.term, batch.piece = np.array(term, np.int32), np.array(piece, np.int32)
    batch.count = np.array(count, np.uint8)
    return batch


def _read(path: str, source: bytes) -> tuple[FileEntry, list[Counter]]:
    """One file and the terms of each of its pieces."""
    language = language_of(path, source)
    lines = source.split(b"\n")
    pieces, counts, lengths = [], [], []
    for place, piece in enumerate(split(source, language)):
        text = b"\n".join(lines[piece.start - 1 : piece.end]).decode(errors="replace")
        counted: Counter = Counter()
        for word, times in Counter(WORD.findall(text)).items():
            for name in terms(word):
                counted[name] += times
        lengths.append(min(sum(counted.values()), 65_535))
        for name in piece.defines:
            counted[DEFINED + whole(name)] += 1
            counted.update(NAME + stem(part) for part in name_parts(name))
        if place == 0:
            counted.update(path_terms(path))
        pieces.append([piece.start, piece.end, piece.name])
        counts.append(counted)
    if not pieces:  # a file without a word is found by its path
        pieces, counts, lengths = [[1, 1, ""]], [Counter(path_terms(path))], [0]
    own, _ = name_and_folders(path)
    traits = int(is_test(path)), min(path.count("/"), 255), min(len(name_parts(own)), 255)
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
    """The file's own name without endings, and its folders; `__init__`, `index` and their like have the folder's name."""
    folders, _, name = path.rpartition("/")
    own = name.lstrip(".").split(".")[0]
    if own.lower() in _PACKAGE_FILES and folders:
        folders, _, own = folders.rpartition("/")
    return own, folders


def is_test(path: str) -> bool:
    """True if a path looks like a test or what a test reads."""
    return bool(_TEST_PATH.search(path) or _TEST_CLASS.search(path))


def pieces_json(pieces: list[list]) -> str:
    """Pieces as the store keeps them."""
    return json.dumps(pieces, ensure_ascii=False, separators=(",", ":"))
