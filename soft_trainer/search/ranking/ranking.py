"""Scores files and chunks for a query, using the index's postings.

A file's score is a weighted sum of features from 0 to 1. The weights were tuned by cross-validation over 769 judged
queries for 39 repositories, on a coarse grid of 0, half, one and two times each weight. `benchmarks/search_study.md`
has the results, including results on eleven repositories that were never used for tuning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from soft_trainer.search.index.chunks import CLASS, LINES
from soft_trainer.search.index.parsing import DEFINED, NAME, OWN_NAME, SUMMARY
from soft_trainer.search.index.store import Segments
from soft_trainer.search.index.words import STOP_WORDS, WORD, is_unspaced, stem, terms, whole

# The usual parameters of BM25.
K1 = 1.2
B = 0.75
FILE_TEXT = 1.0  # BM25 of the whole file, for words that are spread over several chunks
OWN_NAME_WORDS = 0.5  # the fraction of the query that is in the file's name
OWN_NAME_COVERED = 1.0  # the fraction of the file's name that is in the query
DEFINED_WORDS = 0.5  # the fraction of the query that is in the names that the file defines
DEFINED_NAME = 0.25  # the file defines a word of the query, which may be chance: `result = ...`
DEFINED_SYMBOL = 1.0  # the same if the word can only be a name: `parseDate`, `parse_date`, or the whole query
EXACT_MEMBER = 10.0  # the same for the query `Parser.parse` or `save!`: more than all other features together
# Wrappers, compatibility layers and vendored copies are in deeper folders than the original.
DEPTH_DISCOUNT = 0.1
DISCOUNTS = {
    "text": 0.3,  # a search for code should find the code before a page about it
    "vendored": 0.5,  # in `external` or `deps`, which may be a copy of other people's code
    "generated": 0.5,  # written by a program, from something that people wrote
}
TEST_FACTOR = 0.5  # for the score of a file with tests
TESTS_ASKED = 2.0  # the same if the query asks for tests
# A chunk's score within its file adds up BM25, a weight for defining a word of the query (as for the file), and these.
CHUNK_WORDS = 1.0  # the fraction of the query that is in the chunk
CHUNK_NAME = 1.0  # the fraction of the query that is in its name and in the enclosing names
CHUNK_SUMMARY = 0.25  # the fraction of the query that is in the first paragraph of its documentation
LINES_DISCOUNT = 0.7  # imports and constants repeat the words of the relevant function
CLASS_DISCOUNT = 0.8  # so does the head of a class; not used if the query is a name
JOINED_WORDS = 0.5  # "route group" finds `RouteGroup`, but this may be chance
BEST_CHUNK = 0.3  # the fraction of a file's score that depends on how good its best chunk is
FURTHER_CHUNKS = 0.7  # a factor on the score of a file's second-best chunk, squared for the third, and so on
# The weight of an encoder's similarity. It says little about a symbol and much about a sentence.
SIMILARITY = {"symbol": 0.5, "words": 1.0, "sentence": 1.5}
STATIC = 0.5  # the share of this weight that a static encoder gets; chosen in benchmarks/base_study.md
MAX_WORDS = 1000  # different words of a query

# Also `User#valid?` in Ruby, `Parser::~Parser` in C++ and `(*Parser).Parse` in Go.
_SYMBOL = re.compile(r"(\(\*\w+\))?(?:[\w.:#$>~]|-(?!\w))+[?!=]?(\(\))?")
# Inner capitals or underscores, which only names have.
_NAME_ALONE = re.compile(r"[a-z0-9][A-Z]|_|[A-Z]{2}.*[a-z]")
# "tests for ...", "the unit tests that cover ...", "which tests check ...", "where is ... tested?". Other queries that
# mention tests, such as "test client" or `go test ./...`, do not ask for them.
_BEFORE_TESTS = (
    "find|show|list|add|write|where|which|what|are|is|me|the|a|all|any|existing|new|unit|integration|regression"
)
_ASKS_FOR_TESTS = re.compile(
    rf"\s*(?!test )(({_BEFORE_TESTS}) )*tests? (for|of|that|covers?|covering|checks?|checking|exercise|fail)\b"
    r"|\s*(where|how|is|are) .* tested\W*$",
    re.IGNORECASE | re.MULTILINE,
)
_SMALL_WORDS = {"how", "what", "where", "which", "when", "why", "the", "a", "is", "are", "of", "to", "with", "that"}


class Query(NamedTuple):
    """A parsed query.

    Args:
        kind: "symbol" for one identifier, "sentence" for text with stop words or at least five words, otherwise
            "words".
        words: the significant words as typed.
        terms: the weight of each term.
        test_factor: a factor for the scores of files with tests.
    """

    kind: str
    words: tuple[str, ...]
    terms: dict[str, float]
    test_factor: float = TEST_FACTOR


def parse_query(text: str) -> Query:
    """Parses a query's text, which may be empty, into a kind, words and weighted terms."""
    typed = WORD.findall(text)
    known = set(islice(dict.fromkeys(typed), MAX_WORDS))
    typed = [word for word in typed if word in known]
    symbol = (len(typed) < 2 or bool(_SYMBOL.fullmatch(text.strip()))) and not is_unspaced(text)
    telling = typed  # `Query.all`: no part of a name is a stop word, and `Parser.Parser` is a constructor
    if not symbol:
        telling = dict.fromkeys([word for word in typed if word.lower() not in STOP_WORDS] or typed)
    weights = {term: 1.0 for word in telling for term in terms(word)}
    joined = []
    for size in (2, 3):
        for start in range(len(typed) - size + 1):
            joined.append(stem("".join(map(whole, typed[start : start + size]))))
    for term in islice(dict.fromkeys(joined), MAX_WORDS):
        weights.setdefault(term, JOINED_WORDS)
    if symbol:
        kind = "symbol"
    elif len(typed) < 5 and _SMALL_WORDS.isdisjoint(map(str.lower, typed)):
        kind = "words"
    else:
        kind = "sentence"
    factor = TEST_FACTOR
    if _ASKS_FOR_TESTS.match(text):
        factor = TESTS_ASKED
    return Query(kind, tuple(telling), weights, factor)


class Scores(NamedTuple):
    """Scores of all files and chunks for a query.

    Args:
        files: float[files], 0 for a file that does not match.
        chunks: float[chunks].
        matched: True if the index contains a word of the query.
        containing: for each term, the files whose text contains the term.
    """

    files: np.ndarray
    chunks: np.ndarray
    matched: bool
    containing: dict[str, np.ndarray]


def score(
    query: Query,
    segments: Segments,
    similarity: np.ndarray | None = None,
    trust: float = 1.0,
    exact: Sequence[int] = (),
) -> Scores:
    """Scores all files and chunks for a query by words and, optionally, by an encoder's similarity.

    Args:
        similarity: float32[chunks], the encoder's similarity to the query, or NaN for a chunk without an embedding.
        trust: a factor for the weight of the similarity.
        exact: the chunks whose qualified name the query is.
    """
    owners = segments.owners
    norm, file_norm = _norms(segments)
    # What the postings say about the query; the constants above say what each of these counts.
    file_text, own_name, own_parts, defined_words, defined = np.zeros((5, len(file_norm)), np.float32)
    text, chunk_words, chunk_names, chunk_summary, chunk_defined = np.zeros((5, len(norm)), np.float32)
    total = 0.0  # of the rarities of the query's whole words that the index contains
    containing = {}
    for term, weight in query.terms.items():
        chunks, counts = segments.postings(term)
        named, own, summary = (segments.postings(sign + term)[0] for sign in (NAME, OWN_NAME, SUMMARY))
        if not len(chunks) and not len(named) and not len(own):
            continue
        files, starts = _distinct(owners[chunks])
        containing[term] = files
        rarity = _inverse_frequency(len(files), len(file_text))
        if len(chunks):
            text[chunks] += weight * _inverse_frequency(len(chunks), len(text)) * _saturated(counts, norm[chunks])
            in_file = np.add.reduceat(counts, starts, dtype=np.float32)
            file_text[files] += weight * rarity * _saturated(in_file, file_norm[files])
        own_name[owners[own]] += rarity
        own_parts[owners[own]] += 1
        defined_words[_distinct(owners[named])[0]] += rarity
        chunk_names[named] += rarity
        if weight == 1.0:
            total += rarity
            chunk_words[chunks] += rarity
            chunk_summary[summary] += rarity
    for chunks, share in _defining(query, segments):
        defined[owners[chunks]] = np.maximum(defined[owners[chunks]], share)
        chunk_defined[chunks] = np.maximum(chunk_defined[chunks], share)
    asked = total or 1.0
    best = np.maximum.reduceat(text, segments.firsts[:-1])
    parts = np.maximum(segments.traits["name_parts"], 1)
    files = (
        best / _largest(best)
        + FILE_TEXT * file_text / _largest(file_text)
        + OWN_NAME_WORDS * np.minimum(own_name / asked, 1)
        + OWN_NAME_COVERED * np.minimum(own_parts / parts, 1)
        + DEFINED_WORDS * np.minimum(defined_words / asked, 1)
        + defined
    )
    kind_factors = np.ones(3, np.float32)
    kind_factors[LINES] -= LINES_DISCOUNT
    if query.kind != "symbol":
        kind_factors[CLASS] -= CLASS_DISCOUNT
    chunks = (
        text / _largest(text)
        + CHUNK_WORDS * chunk_words / asked
        + CHUNK_NAME * np.minimum(chunk_names / asked, 1)
        + CHUNK_SUMMARY * chunk_summary / asked
        + chunk_defined
    ) * kind_factors[segments.kinds]
    if similarity is not None:
        similar = trust * SIMILARITY[query.kind] * _share(similarity)
        files += np.maximum.reduceat(similar, segments.firsts[:-1])
        chunks += similar
    files *= _discounts(segments, files > 0, query.test_factor)
    exact = np.asarray(exact, np.int64)
    chunks[exact] += EXACT_MEMBER
    files[owners[exact]] += EXACT_MEMBER  # once for each file, and after all discounts
    return Scores(files, chunks, total > 0 or len(exact) > 0, containing)


def _distinct(owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct files among the `owners` of chunks in ascending order, and each file's first position."""
    if not len(owners):
        return owners, np.zeros(0, np.int64)
    starts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])  # `np.unique` would take ten times as long
    return owners[starts], starts


def _defining(query: Query, segments: Segments) -> Iterator[tuple[np.ndarray, float]]:
    """Yields (chunks, weight) for each word of a query that names define."""
    for word in query.words:
        share = DEFINED_NAME
        if query.kind == "symbol" or _NAME_ALONE.search(word):
            share = DEFINED_SYMBOL
        yield segments.postings(DEFINED + whole(word))[0], share


def _share(similarity: np.ndarray) -> np.ndarray:
    """Rescales similarities to 1 for the most similar chunk, and to 0 for the median and everything below the median.

    A similarity of 0.5 means different things for different encoders, but with any encoder a chunk can stand out from
    the others. The result is multiplied by the fraction of chunks that have an embedding.
    """
    known = similarity[~np.isnan(similarity)]
    if not len(known):
        return np.zeros(len(similarity), np.float32)
    # `np.median` imports numpy.ma, which would take a tenth of the time of a search from the shell.
    middle = [(len(known) - 1) // 2, len(known) // 2]
    usual = float(np.partition(known, middle)[middle].mean())
    top = float(known.max())
    shares = np.nan_to_num(np.clip((similarity - usual) / max(top - usual, 1e-9), 0, 1)).astype(np.float32)
    # While only a few chunks have embeddings, they must not outrank better chunks that have none.
    return shares * (len(known) / len(similarity))


def _largest(values: np.ndarray) -> float:
    """Returns the largest value or, to make division safe, a small positive number if the largest value is 0."""
    return max(float(values.max()), 1e-9)


def _discounts(segments: Segments, candidates: np.ndarray, test_factor: float) -> np.ndarray:
    """Returns a factor for each file's score. Prose, generated, vendored and deeply nested files get less.

    Args:
        test_factor: the factor for files with tests.
    """
    depth = segments.traits["depth"].astype(np.float32)
    if candidates.any():
        depth = np.maximum(depth - depth[candidates].min(), 0)
    kind = 1 + (test_factor - 1) * segments.traits["test"]
    for trait, discount in DISCOUNTS.items():
        kind *= 1 - discount * segments.traits[trait]
    return kind / (1 + DEPTH_DISCOUNT * depth)


def ordering(scores: Scores, segments: Segments, allowed: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scores by which files and chunks are ordered: float[files] and float[chunks].

    Files that may not be returned get 0. Chunks that may not be returned get -1.
    """
    files = scores.files
    chunks = scores.chunks
    if allowed is not None:
        keep = np.zeros(len(files), bool)
        keep[segments.owners[allowed]] = True
        files = np.where(keep, files, 0)
        chunks = np.where(allowed, chunks, -1)
    found = files > 0
    if not found.any():
        return files, chunks
    best = np.maximum.reduceat(chunks, segments.firsts[:-1])
    return files * (1 - BEST_CHUNK + BEST_CHUNK * best / _largest(best[found])), chunks


def order_chunks(
    scores: Scores, segments: Segments, allowed: np.ndarray | None, limit: int
) -> list[tuple[int, float]]:
    """Returns (chunk, score) for the best chunks, best first.

    A file's other chunks get a lower score than the file's best chunk. They rank above other files only if they match
    nearly as well as the best chunk.

    Args:
        allowed: bool[chunks], the chunks that may be returned. By default, all.
        limit: the maximum number of chunks.
    """
    files, chunks = ordering(scores, segments, allowed)
    taken = np.flatnonzero(files > 0)
    if len(taken) > limit:  # sorting all files would take twenty times as long
        taken = taken[files[taken] >= np.partition(files[taken], -limit)[-limit]]
    ranked = []
    for file in sorted(taken.tolist(), key=lambda file: (-files[file], file))[:limit]:
        first = int(segments.firsts[file])
        last = int(segments.firsts[file + 1])
        own = chunks[first:last]
        order = np.argsort(-own, kind="stable")[:limit]
        top = max(float(own[order[0]]), 1e-9)
        for rank, chunk in enumerate(order.tolist()):
            share = max(float(own[chunk]) / top, rank == 0)
            if share <= 0:
                break
            ranked.append((first + chunk, float(files[file]) * share * FURTHER_CHUNKS**rank))
    ranked.sort(key=lambda pair: (-pair[1], pair[0]))
    return ranked[:limit]


@lru_cache(maxsize=2)
def _norms(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Computes BM25's length normalisation of chunks and files. Cached, because it takes a third of a query's time."""
    chunks = segments.lengths.astype(np.float32)
    files = np.add.reduceat(chunks, segments.firsts[:-1])
    return _length_norm(chunks), _length_norm(files)


def _length_norm(lengths: np.ndarray) -> np.ndarray:
    """Computes BM25's length normalisation for texts of these lengths."""
    # Summed in float64, in which the order of the files makes no difference.
    mean = max(float(lengths.sum(dtype=np.float64)) / max(len(lengths), 1), 1e-9)
    return K1 * (1 - B + B * lengths / mean)


def _saturated(counts: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Computes BM25's _saturated term counts."""
    return counts * (K1 + 1) / (counts + norm)


def _inverse_frequency(count: int, total: int) -> float:
    """Computes BM25's inverse document frequency, in a form that is never negative."""
    return float(np.log1p((total - count + 0.5) / (count + 0.5)))
