"""Scores files and pieces for a query, using the index's postings.

A file's score is a weighted sum of features from 0 to 1. The weights were chosen by cross-validation over 769 judged
queries for 39 repositories, on a coarse grid of 0, half, one and two times each weight. `benchmarks/search_study.md`
has the results, including those on eleven repositories that were never used to choose weights.
"""

from __future__ import annotations

import re
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from soft_trainer.search.index.pieces import CLASS, LINES
from soft_trainer.search.index.store import TRAITS, Segments
from soft_trainer.search.index.terms import DEFINED, NAME, OWN_NAME, PATH, SUMMARY
from soft_trainer.search.index.words import STOP_WORDS, WORD, stem, terms, whole
from soft_trainer.source.names import identifier_words

# The usual parameters of BM25.
K1 = 1.2
B = 0.75
FILE_TEXT = 1.0  # BM25 of the whole file, for words that are spread over several pieces
OWN_NAME_WORDS = 0.5  # the share of the query that is in the file's own name
OWN_NAME_COVERED = 1.0  # the share of the file's own name that is in the query
FOLDER_WORDS = 0.3  # the share of the query that is in the names of its folders
DEFINED_WORDS = 0.5  # the share of the query that is in the names that the file defines
DEFINED_NAME = 0.25  # the file defines a word of the query, which may be chance: `result = ...`
DEFINED_SYMBOL = 1.0  # the same if the word can only be a name: `parseDate`, `parse_date`, or the whole query
DEFINED_MEMBER = 2.0  # the same for the query `Parser.parse`, if the file defines `parse` in `Parser`
# Wrappers, compatibility layers and vendored copies are in deeper folders than the original.
DEPTH_DISCOUNT = 0.1
DISCOUNTS = {
    "test": 0.5,
    "text": 0.3,  # people who search code want the code before a page about it
    "vendored": 0.5,  # in `external` or `deps`, which may be a copy of other people's code
    "generated": 0.5,  # written by a program, from something that people wrote
}
# A piece's score within its file adds up BM25, a weight for defining a word of the query (as for the file), and these.
PIECE_WORDS = 1.0  # the share of the query that is in the piece
PIECE_NAME = 1.0  # the share of the query that is in its name and in the enclosing names
PIECE_SUMMARY = 0.25  # the share of the query that is in the first paragraph of its documentation
LINES_DISCOUNT = 0.7  # imports and constants repeat the words of the right code
CLASS_DISCOUNT = 0.8  # so does the head of a class; not used if the query is a name
JOINED_WORDS = 0.5  # "route group" finds `RouteGroup`, but this may be chance
BEST_PIECE = 0.3  # the share of a file's score that depends on how good its best piece is
FURTHER_PIECES = 0.7  # a factor on the score of a file's second-best piece, squared for the third, and so on
# The weight of an encoder's similarity. It says little about a symbol and much about a sentence.
SIMILARITY = {"symbol": 0.5, "words": 1.0, "sentence": 1.5}
MAX_WORDS = 64  # more words make a query slower but no better

_SYMBOL = re.compile(r"[\w.:#$>\-]+(\(\))?")
# Inner capitals or underscores, which only names have.
_NAME_ALONE = re.compile(r"[a-z0-9][A-Z]|_|[A-Z]{2}.*[a-z]")
_SMALL_WORDS = {"how", "what", "where", "which", "when", "why", "the", "a", "is", "are", "of", "to", "with", "that"}


class Query(NamedTuple):
    """A parsed query.

    Args:
        kind: "symbol" for one identifier, "sentence" for text with stop words or at least five words, otherwise
            "words".
        words: the significant words as typed.
        terms: the weight of each term.
    """

    kind: str
    words: tuple[str, ...]
    terms: dict[str, float]


def parse_query(text: str) -> Query:
    """Parses a query. The query may be empty."""
    typed = WORD.findall(text)[:MAX_WORDS]
    telling = [word for word in typed if word.lower() not in STOP_WORDS] or typed
    weights = {term: 1.0 for word in telling for term in terms(word)}
    for size in (2, 3):
        for start in range(len(typed) - size + 1):
            weights.setdefault(stem("".join(whole(word) for word in typed[start : start + size])), JOINED_WORDS)
    if len(typed) < 2 or _SYMBOL.fullmatch(text.strip()):
        kind = "symbol"
    elif len(typed) < 5 and _SMALL_WORDS.isdisjoint(map(str.lower, typed)):
        kind = "words"
    else:
        kind = "sentence"
    return Query(kind, tuple(dict.fromkeys(telling)), weights)


class Scores(NamedTuple):
    """The scores of all files and pieces for a query.

    Args:
        files: float[files], 0 for a file that does not match.
        pieces: float[pieces].
        matched: True if the index contains a word of the query, or if a commit voted.
        containing: the files that contain each term, as arrays in ascending order: in their text, in their own name,
            and in the names of their folders.
    """

    files: np.ndarray
    pieces: np.ndarray
    matched: bool
    containing: dict[str, tuple[np.ndarray, ...]]


def score(
    query: Query,
    segments: Segments,
    similarity: np.ndarray | None = None,
    votes: np.ndarray | None = None,
) -> Scores:
    """Scores all files and pieces for a query by its words and, if given, an encoder's similarity and commits' votes.

    Args:
        similarity: float32[pieces], the encoder's similarity to the query, or NaN for a piece without an embedding.
        votes: float32[pieces], the weighted votes of commits.
    """
    gather = _Gathered(segments, query.kind)
    for term, weight in query.terms.items():
        gather.add(term, weight)
    member = np.zeros(0, np.int64)
    if query.kind == "symbol" and len(query.words) > 1:  # `Parser.parse`: the last word, defined in the others
        *around, name = query.words
        named = [segments.postings(NAME + stem(part))[0] for word in around for part in identifier_words(word)]
        member = reduce(np.intersect1d, named, segments.postings(DEFINED + whole(name))[0])
        gather.add_defined(member, DEFINED_MEMBER)
    for word in query.words if not len(member) else ():
        defining, _ = segments.postings(DEFINED + whole(word))
        if query.kind == "symbol" or _NAME_ALONE.search(word):
            gather.add_defined(defining, DEFINED_SYMBOL)
        else:
            gather.add_defined(defining, DEFINED_NAME)
    if similarity is None:
        scores = gather.scores(None)
    else:
        scores = gather.scores(SIMILARITY[query.kind] * _share(similarity))
    if votes is None:
        return scores
    return with_votes(scores, segments, votes)


def with_votes(scores: Scores, segments: Segments, votes: np.ndarray) -> Scores:
    """Adds commits' votes to the scores of pieces. A file gets the highest vote for any of its pieces."""
    files = scores.files + np.maximum.reduceat(votes, segments.firsts[:-1])
    return Scores(files, scores.pieces + votes, scores.matched or bool(votes.any()), scores.containing)


def _share(similarity: np.ndarray) -> np.ndarray:
    """Rescales similarities to 1 for the most similar piece, and 0 for the median and everything below it.

    Encoders disagree on what a similarity of 0.5 means, but with any of them a piece may stand out from the others.
    The result is multiplied by the share of pieces that have an embedding.
    """
    known = similarity[~np.isnan(similarity)]
    if not len(known):
        return np.zeros(len(similarity), np.float32)
    # `np.median` imports numpy.ma, which would take a tenth of the time of a search from the shell.
    middle = [(len(known) - 1) // 2, len(known) // 2]
    usual = float(np.partition(known, middle)[middle].mean())
    top = float(known.max())
    shares = np.nan_to_num(np.clip((similarity - usual) / max(top - usual, 1e-9), 0, 1)).astype(np.float32)
    # While only a few pieces have embeddings, they must not outrank better pieces that have none.
    return shares * (len(known) / len(similarity))


class _Gathered:
    """The features of files and pieces, summed over a query's terms."""

    def __init__(self, segments: Segments, kind: str):
        self.segments = segments
        self.kind_factors = np.ones(3, np.float32)
        self.kind_factors[LINES] -= LINES_DISCOUNT
        if kind != "symbol":
            self.kind_factors[CLASS] -= CLASS_DISCOUNT
        self.owners = segments.owners
        files = len(segments.languages)
        pieces = len(segments.lengths)
        self.norm, self.file_norm = _norms(segments)
        self.file_text, self.own_name, self.own_parts = np.zeros((3, files), np.float32)
        self.folders, self.defined_words, self.defined = np.zeros((3, files), np.float32)
        self.text, self.piece_words, self.piece_names = np.zeros((3, pieces), np.float32)
        self.piece_summary, self.piece_defined = np.zeros((2, pieces), np.float32)
        self.total = 0.0
        self.containing: dict[str, tuple[np.ndarray, ...]] = {}

    def add(self, term: str, weight: float) -> None:
        """Adds one term's contribution."""
        postings = self.segments.postings
        pieces, counts = postings(term)
        named, own, folders, summary = (postings(sign + term)[0] for sign in (NAME, OWN_NAME, PATH, SUMMARY))
        if not len(pieces) and not len(named) and not len(own):
            return
        files, starts = self._files(pieces)
        self.containing[term] = (files, self.owners[own], self.owners[folders])
        rarity = inverse_frequency(len(files), len(self.file_text))
        if len(pieces):
            self.text[pieces] += (
                weight * inverse_frequency(len(pieces), len(self.text)) * saturated(counts, self.norm[pieces])
            )
            in_file = np.add.reduceat(counts, starts, dtype=np.float32)
            self.file_text[files] += weight * rarity * saturated(in_file, self.file_norm[files])
        self.own_name[self.owners[own]] += rarity
        self.own_parts[self.owners[own]] += 1
        self.folders[self.owners[folders]] += rarity
        self.defined_words[self._files(named)[0]] += rarity
        self.piece_names[named] += rarity
        if weight == 1.0:
            self.total += rarity
            self.piece_words[pieces] += rarity
            self.piece_summary[summary] += rarity

    def add_defined(self, pieces: np.ndarray, share: float) -> None:
        """Credits pieces that define a name in the query, and their files, with at least `share`."""
        self.defined[self.owners[pieces]] = np.maximum(self.defined[self.owners[pieces]], share)
        self.piece_defined[pieces] = np.maximum(self.piece_defined[pieces], share)

    def scores(self, similar: np.ndarray | None) -> Scores:
        """Returns the weighted sum of all features, including `similar`, each piece's weighted similarity."""
        segments = self.segments
        total = self.total or 1.0
        best = np.maximum.reduceat(self.text, segments.firsts[:-1])
        parts = np.maximum(segments.traits[:, TRAITS.index("name_parts")], 1)
        files = (
            best / _largest(best)
            + FILE_TEXT * self.file_text / _largest(self.file_text)
            + OWN_NAME_WORDS * np.minimum(self.own_name / total, 1)
            + OWN_NAME_COVERED * np.minimum(self.own_parts / parts, 1)
            + FOLDER_WORDS * np.minimum(self.folders / total, 1)
            + DEFINED_WORDS * np.minimum(self.defined_words / total, 1)
            + self.defined
        )
        pieces = (
            self.text / _largest(self.text)
            + PIECE_WORDS * self.piece_words / total
            + PIECE_NAME * np.minimum(self.piece_names / total, 1)
            + PIECE_SUMMARY * self.piece_summary / total
            + self.piece_defined
        ) * self.kind_factors[segments.kinds]
        if similar is not None:
            files += np.maximum.reduceat(similar, segments.firsts[:-1])
            pieces += similar
        files *= discounts(segments, files > 0) * segments.live
        return Scores(files, pieces, self.total > 0, self.containing)

    def _files(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct files of pieces, in ascending order.

        The second array has the position of each file's first piece in `pieces`.
        """
        owners = self.owners[pieces]  # `np.unique` would sort them and take ten times as long
        if not len(owners):
            return owners, np.zeros(0, np.int64)
        starts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
        return owners[starts], starts


def _largest(values: np.ndarray) -> float:
    """Returns the largest value, or a small positive number if that is 0, so that it is safe to divide by."""
    return max(float(values.max()), 1e-9)


def discounts(segments: Segments, candidates: np.ndarray) -> np.ndarray:
    """Returns a factor for each file. It is lower for tests, text files, and generated, vendored or deep files."""
    depth = segments.traits[:, TRAITS.index("depth")].astype(np.float32)
    if candidates.any():
        depth = np.maximum(depth - depth[candidates].min(), 0)
    kind = np.ones(len(depth), np.float32)
    for trait, discount in DISCOUNTS.items():
        kind *= 1 - discount * segments.traits[:, TRAITS.index(trait)]
    return kind / (1 + DEPTH_DISCOUNT * depth)


def order_pieces(
    scores: Scores, segments: Segments, allowed: np.ndarray | None, limit: int
) -> list[tuple[int, float]]:
    """Returns (piece, score) for the best pieces, best first.

    A file's other pieces get a lower score than its best one. They come before other files only if they match nearly
    as well.

    Args:
        allowed: bool[pieces], the pieces that may be returned. By default, all.
        limit: the maximum number of pieces.
    """
    files = scores.files
    pieces = scores.pieces
    if allowed is not None:
        keep = np.zeros(len(files), bool)
        keep[segments.owners[allowed]] = True
        files = np.where(keep, files, 0)
        pieces = np.where(allowed, pieces, -1)
    found = files > 0
    if not found.any():
        return []
    best = np.maximum.reduceat(pieces, segments.firsts[:-1])
    files = files * (1 - BEST_PIECE + BEST_PIECE * best / _largest(best[found]))
    taken = np.flatnonzero(found)
    if len(taken) > limit:  # sorting all files would take twenty times as long
        taken = taken[files[taken] >= np.partition(files[taken], -limit)[-limit]]
    ranked = []
    for file in sorted(taken.tolist(), key=lambda file: (-files[file], file))[:limit]:
        first = int(segments.firsts[file])
        last = int(segments.firsts[file + 1])
        own = pieces[first:last]
        order = np.argsort(-own, kind="stable")[:limit]
        top = max(float(own[order[0]]), 1e-9)
        for place, piece in enumerate(order.tolist()):
            share = 1.0
            if place:
                share = float(own[piece]) / top
            if share <= 0:
                break
            ranked.append((first + piece, float(files[file]) * share * FURTHER_PIECES**place))
    ranked.sort(key=lambda pair: (-pair[1], pair[0]))
    return ranked[:limit]


@lru_cache(maxsize=2)
def _norms(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Computes BM25's length normalisation of pieces and files. Cached, because it takes a third of a query's time."""
    pieces = segments.lengths.astype(np.float32)
    files = np.add.reduceat(pieces, segments.firsts[:-1])
    return length_norm(pieces), length_norm(files)


def length_norm(lengths: np.ndarray) -> np.ndarray:
    """Computes BM25's length normalisation."""
    mean = max(float(lengths.sum()) / max(len(lengths), 1), 1e-9)
    return K1 * (1 - B + B * lengths / mean)


def saturated(counts: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Computes BM25's saturated term counts."""
    return counts * (K1 + 1) / (counts + norm)


def inverse_frequency(count: int, total: int) -> float:
    """Computes BM25's inverse document frequency, in a form that is never negative."""
    return float(np.log1p((total - count + 0.5) / (count + 0.5)))
