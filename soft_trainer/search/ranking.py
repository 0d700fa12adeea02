"""Scores files and pieces by a query, from the postings of the index.

A file's score is a sum of shares between 0 and 1, each times a round weight. They were chosen on a coarse grid (none,
half, as they are, double) over 769 judged queries of 39 repositories, leaving some out in turn.
`benchmarks/search_study.md` has the figures, among them those of eleven repositories that no choice has seen.
"""

from __future__ import annotations

import re
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from soft_trainer.mining.rules import identifier_words
from soft_trainer.search.pieces import CLASS, LINES
from soft_trainer.search.store import TRAITS, Segments
from soft_trainer.search.terms import DEFINED, NAME, OWN_NAME, PATH, SUMMARY
from soft_trainer.search.words import STOP_WORDS, WORD, stem, terms, whole

# BM25's usual ones
K1 = 1.2
B = 0.75
FILE_TEXT = 1.0  # BM25 of the whole file, for words that are spread over several pieces
OWN_NAME_WORDS = 0.5  # share of the query that stands in the file's own name
OWN_NAME_COVERED = 1.0  # share of the file's own name that stands in the query
FOLDER_WORDS = 0.3  # share of the query that stands in the names of its folders
DEFINED_WORDS = 0.5  # share of the query that stands in the names that the file defines
DEFINED_NAME = 0.25  # a word of the query is defined there as it is, which may be chance: `result = ...`
DEFINED_SYMBOL = 1.0  # the same for what can only be a name: `parseDate`, `parse_date`, or all of the query
DEFINED_MEMBER = 2.0  # for the query `Parser.parse`: `parse` is defined there, in `Parser`
# Wrappers, compatibility layers and vendored copies lie deeper than the original.
DEPTH_DISCOUNT = 0.1
DISCOUNTS = {
    "test": 0.5,
    "text": 0.3,  # who searches code wants the code before the page about it
    "vendored": 0.5,  # in `external` or `deps`, which may be a copy of other people's code
    "generated": 0.5,  # by a program, from what people wrote elsewhere
}
# Within a file: BM25, whether the piece defines a word of the query (as for its file), and these.
PIECE_WORDS = 1.0  # share of the query that stands in the piece
PIECE_NAME = 1.0  # share of the query that stands in its name and in those around it
PIECE_SUMMARY = 0.25  # share of the query that stands in the first paragraph of its documentation
LINES_DISCOUNT = 0.7  # imports and constants repeat the words of the code that answers
CLASS_DISCOUNT = 0.8  # so does the head of a class, unless the query is a name
JOINED_WORDS = 0.5  # "route group" finds `RouteGroup`, but that may be chance
BEST_PIECE = 0.3  # part of a file's score that its best piece has to earn among the pieces of all files
FURTHER_PIECES = 0.7  # each further piece of a file counts that much of the one before
# An encoder's similarity, by kind of query: of a symbol it knows little, of a sentence much.
SIMILARITY = {"symbol": 0.5, "words": 1.0, "sentence": 1.5}
MAX_WORDS = 64  # more words make a query slower and no better

_SYMBOL = re.compile(r"[\w.:#$>\-]+(\(\))?")
# inner capitals or underscores: no word of a sentence, but a name
_NAME_ALONE = re.compile(r"[a-z0-9][A-Z]|_|[A-Z]{2}.*[a-z]")
_SMALL_WORDS = {"how", "what", "where", "which", "when", "why", "the", "a", "is", "are", "of", "to", "with", "that"}


class Query(NamedTuple):
    """A parsed query: its significant words as typed, and the weight of each term.

    The kind is "symbol" for one identifier, "sentence" for text with small words or five and more, else "words".
    """

    kind: str
    words: tuple[str, ...]
    terms: dict[str, float]


def parse_query(text: str) -> Query:
    """Parses a query, which may be empty."""
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
    """Scores by file and by piece, 0 for files without a match; `matched` if a word or a commit was found."""

    files: np.ndarray
    pieces: np.ndarray
    matched: bool


def score(
    query: Query,
    segments: Segments,
    similarity: np.ndarray | None = None,
    votes: np.ndarray | None = None,
    similarity_weight: float = 1.0,
) -> Scores:
    """Scores all files and pieces by the query's words and, where available, an encoder and earlier commits.

    Args:
        similarity: float32[pieces], NaN where a piece has no embedding.
        votes: of commits, times their weight, float32[pieces].
        similarity_weight: of the encoder, besides that of `SIMILARITY`.
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
        scores = gather.scores(similarity_weight * SIMILARITY[query.kind] * _share(similarity))
    if votes is None:
        return scores
    return with_votes(scores, segments, votes)


def with_votes(scores: Scores, segments: Segments, votes: np.ndarray) -> Scores:
    """Adds the votes of commits to the scores of pieces, and the largest of a file to that file's."""
    files = scores.files + np.maximum.reduceat(votes, segments.firsts[:-1])
    return Scores(files, scores.pieces + votes, scores.matched or bool(votes.any()))


def _share(similarity: np.ndarray) -> np.ndarray:
    """Scales similarities to shares: 1 for the most similar piece, 0 for the median and below.

    A similarity of 0.5 means something else to each encoder; how far a piece stands out from the others does not.
    """
    known = similarity[~np.isnan(similarity)]
    if not len(known):
        return np.zeros(len(similarity), np.float32)
    # `np.median` would import numpy.ma, which takes a tenth of a search from the shell.
    middle = [(len(known) - 1) // 2, len(known) // 2]
    usual = float(np.partition(known, middle)[middle].mean())
    top = float(known.max())
    shares = np.nan_to_num(np.clip((similarity - usual) / max(top - usual, 1e-9), 0, 1)).astype(np.float32)
    # While few pieces have embeddings, these must not come before better ones that have none yet.
    return shares * (len(known) / len(similarity))


class _Gathered:
    """Sums over the terms of a query."""

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

    def add(self, term: str, weight: float) -> None:
        """Adds one term's contribution to the scores."""
        postings = self.segments.postings
        pieces, counts = postings(term)
        named, own, folders, summary = (postings(sign + term)[0] for sign in (NAME, OWN_NAME, PATH, SUMMARY))
        if not len(pieces) and not len(named) and not len(own):
            return
        files, starts = self._files(pieces)
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
        """Adds the pieces that define a name in the query."""
        self.defined[self.owners[pieces]] = np.maximum(self.defined[self.owners[pieces]], share)
        self.piece_defined[pieces] = np.maximum(self.piece_defined[pieces], share)

    def scores(self, similar: np.ndarray | None) -> Scores:
        """Sums all shares, `similar` (weighted, by piece) among them."""
        segments = self.segments
        total = self.total or 1.0
        best = np.maximum.reduceat(self.text, segments.firsts[:-1])
        parts = np.maximum(segments.traits[:, TRAITS.index("name_parts")], 1)
        files = (
            best / max(float(best.max()), 1e-9)
            + FILE_TEXT * self.file_text / max(float(self.file_text.max()), 1e-9)
            + OWN_NAME_WORDS * np.minimum(self.own_name / total, 1)
            + OWN_NAME_COVERED * np.minimum(self.own_parts / parts, 1)
            + FOLDER_WORDS * np.minimum(self.folders / total, 1)
            + DEFINED_WORDS * np.minimum(self.defined_words / total, 1)
            + self.defined
        )
        pieces = (
            self.text / max(float(self.text.max()), 1e-9)
            + PIECE_WORDS * self.piece_words / total
            + PIECE_NAME * np.minimum(self.piece_names / total, 1)
            + PIECE_SUMMARY * self.piece_summary / total
            + self.piece_defined
        ) * self.kind_factors[segments.kinds]
        if similar is not None:
            files += np.maximum.reduceat(similar, segments.firsts[:-1])
            pieces += similar
        files *= discounts(segments, files > 0) * segments.live
        return Scores(files, pieces, self.total > 0)

    def _files(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct files of ascending pieces, and the place of each file's first piece in `pieces`."""
        owners = self.owners[pieces]  # `np.unique` would sort them, which takes ten times as long
        if not len(owners):
            return owners, np.zeros(0, np.int64)
        starts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
        return owners[starts], starts


def discounts(segments: Segments, candidates: np.ndarray) -> np.ndarray:
    """Returns a factor for each file. Tests, texts and generated, deep or probably vendored files count less."""
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
    """Returns (piece, score) of the best `allowed` pieces (bool[pieces], None for all), best first.

    A file's further pieces count less, so that they come before other files only where they match nearly as well.
    """
    files, pieces, _ = scores
    if allowed is not None:
        keep = np.zeros(len(files), bool)
        keep[segments.owners[allowed]] = True
        files = np.where(keep, files, 0)
        pieces = np.where(allowed, pieces, -1)
    found = files > 0
    if not found.any():
        return []
    best = np.maximum.reduceat(pieces, segments.firsts[:-1])
    files = files * (1 - BEST_PIECE + BEST_PIECE * best / max(float(best[found].max()), 1e-9))
    taken = np.flatnonzero(found)
    if len(taken) > limit:  # to sort all takes twenty times as long
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
    """Computes BM25's length normalisation of pieces and files, a third of a query's time, so it is cached."""
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
    """Computes BM25's inverse document frequency, never negative."""
    return float(np.log1p((total - count + 0.5) / (count + 0.5)))
