"""Picks a search's results among the chunks of an index."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from itertools import chain, islice
from typing import Any

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.search.index.chunks import OF_ENDING
from soft_trainer.search.index.parsing import DEFINED
from soft_trainer.search.index.words import WORD, parts, source_words, stem, terms, whole
from soft_trainer.search.ranking import ranking
from soft_trainer.search.ranking.messages import message_words, words_raised
from soft_trainer.search.ranking.results import TESTS, SearchResult
from soft_trainer.search.ranking.texts import Frame, key, locations
from soft_trainer.search.ranking.weakness import is_weak
from soft_trainer.search.snapshot import Snapshot
from soft_trainer.source.names import identifier_words

CANDIDATES = 60  # the chunks among which an error message or a key is looked for
FRAMES = 2  # the frames of a stack trace, or the locations in a failing command's output, that come first
LOCATIONS = 100  # the locations in a text that are looked up
FAILING_TESTS = 3  # the failing tests whose text is searched for
MAX_MESSAGE = 60  # words; a longer line is not a message
# Filtering by one of these languages also allows the languages in its list.
_RELATED = {"typescript": ["tsx"], "c++": ["cpp"], "c#": ["csharp"]}
CLOSE = 10  # the indexed words among which a similar one is chosen
NEAREST = 0.7  # the least similarity of a misspelt word to the indexed word that is searched for instead
SIMILAR_TERMS = 16  # the number of terms that represent a chunk in a search for similar chunks


class View:
    """Filters and orders the chunks of a snapshot for one search."""

    def __init__(self, snapshot: Snapshot):
        self.snapshot = snapshot
        self.segments = snapshot.segments

    def allowed(
        self, path: str | None, language: str | None, name: str | None, tests: str | None
    ) -> np.ndarray | None:
        """Returns the chunks that pass the filters, bool[chunks], or None without filters.

        Raises:
            UserError: no file is in this language or matches the path, or `tests` is neither "only" nor "no".
        """
        if tests and tests not in TESTS:
            raise UserError(f"tests={tests!r}: expected {' or '.join(TESTS)}")
        if not (path or language or name or tests):  # agents give "" for none
            return None
        languages = None
        if language:
            known = self.snapshot.languages
            name_or_ending = language.lower()
            asked = OF_ENDING.get(f".{name_or_ending}", name_or_ending)
            languages = known & {asked, *_RELATED.get(asked, ())}
            if not languages:
                raise UserError(f"language={language!r}: no such files; the index has {', '.join(sorted(known))}")
        kept = self.snapshot.allowed(path, languages, name)
        if path and not kept.any() and not self.snapshot.allowed(path, None, None).any():
            raise UserError(f"path={path!r}: no indexed file matches this pattern; `src/**` and `*.py` are examples")
        if tests:
            kept &= self.segments.traits["test"][self.segments.owners] == (tests == "only")
        return kept

    def ranked_by(self, similarity: np.ndarray | None) -> list[str]:
        """Returns what a ranking used: words, and possibly the encoder."""
        found = ["words"]
        if similarity is not None and not np.isnan(similarity).all():
            found.append(f"encoder {self.snapshot.state['model']}")
        return found

    def best(
        self,
        query: ranking.Query,
        scores: ranking.Scores,
        similarity: np.ndarray | None,
        allowed: np.ndarray | None,
        limit: int,
        text: str,
        sources: Mapping[int, float],
    ) -> list[SearchResult]:
        """Returns the best chunks that pass the filters.

        Args:
            text: the query as typed. What raises an error message, and what a key names, is first.
            sources: a score for each chunk that is first for another reason; see `failed_at`.
        """
        ranked = dict(ranking.order_chunks(scores, self.segments, allowed, limit + CANDIDATES))
        chunks = list(ranked)[:CANDIDATES]
        ranked |= self._raising(text, chunks, query.test_factor) | self._containing(text, chunks) | sources
        results: dict[Any, SearchResult] = {}
        for chunk, score in sorted(ranked.items(), key=lambda pair: -pair[1]):
            if len(results) == limit:
                break
            result = self.snapshot.result(chunk, score)
            same = " ".join(result.text.split()) if result.name else chunk
            if first := results.get(same):  # this is a copy
                results[same] = replace(first, also_in=(*first.also_in, f"{result.path}:{result.start_line}"))
                continue
            file = int(self.segments.owners[chunk])
            weak = score < ranking.EXACT_MEMBER and is_weak(query, scores, file, result.path)
            weak = weak and not self.stands_out(similarity, slice(chunk, chunk + 1))
            results[same] = replace(result, weak=weak)
        return list(results.values())

    def failed_at(self, text: str, allowed: np.ndarray | None) -> tuple[dict[int, float], str]:
        """Finds the chunks at the locations that a text mentions, such as the frames of a stack trace.

        Returns:
            A score for each of the first chunks, higher than all other scores; and the text of the first tests, which
            are among these chunks only if the text has a single line.
        """
        found: dict[int, float] = {}
        tests = {}
        several = "\n" in text.strip()
        for frame, file in islice(locations(text, self.segments), LOCATIONS):
            chunk = self._chunk_of(frame, file)
            if chunk is None:
                continue
            if several and self._is_test(chunk):
                if len(tests) < FAILING_TESTS:
                    tests[chunk] = self._text(chunk)
            elif len(found) < FRAMES and (allowed is None or allowed[chunk]):
                found.setdefault(chunk, ranking.EXACT_MEMBER + FRAMES - len(found))
        return found, "\n".join(tests.values())

    def _raising(self, text: str, chunks: list[int], test_factor: float) -> dict[int, float]:
        """Returns a score for each of these chunks that raises an error message, higher than all other scores.

        A test that asserts the message counts only if the query asks for tests.
        """
        message = message_words(text)
        if "\n" in text.strip() or not 1 < len(message) <= MAX_MESSAGE:
            return {}
        raising = {}
        for chunk in sorted(chunks):
            if test_factor < 1 and self._is_test(chunk):
                continue
            if size := words_raised(message, self.snapshot.result(chunk), self.snapshot.text_of):
                raising[chunk] = ranking.EXACT_MEMBER + size
        return raising

    def _containing(self, text: str, chunks: list[int]) -> dict[int, float]:
        """Returns a score for each of these chunks that contains verbatim the key that a query consists of."""
        own = key(text)
        if own is None or any(
            own.replace("-", "_") in WORD.findall(name)[-1:] for name in self.segments.names(np.array(chunks))
        ):
            return {}
        found = {}
        word = re.compile(rf"(?<!\w)(?<!\w-){re.escape(own)}(?!-?\w)")
        given = re.compile(rf"^\s*[\"']?{re.escape(own)}[\"']?\s*[:=]|([\"'`])-*{re.escape(own)}\1", re.MULTILINE)
        defining = set(self.segments.postings(DEFINED + whole(own))[0].tolist())
        for rank, chunk in enumerate(chunks):
            content = self._text(chunk)
            if word.search(content):
                traits = self.segments.traits[self.segments.owners[chunk]]
                tier = (chunk in defining) + bool(given.search(content)) - int(traits["test"]) - int(traits["text"])
                found[chunk] = ranking.EXACT_MEMBER + tier + 1 / (2 + int(traits["depth"]) + rank / len(chunks))
        return found

    def _chunk_of(self, frame: Frame, file: int) -> int | None:
        """Returns the chunk at a frame's line, or the nearest chunk with the function's name if the line has moved.

        Many trees have a file such as `setup.py` or `index.js` outside folders. It is the frame's file only if it
        defines the function, and a file outside the folders of a package only if it names the package; otherwise,
        returns None.
        """
        path = self.segments.paths[file]
        chunks = np.arange(*self.segments.firsts[file : file + 2])
        names = dict(zip(chunks.tolist(), self.segments.names(chunks), strict=True))
        named = [chunk for chunk, name in names.items() if frame.words.intersection(WORD.findall(name)[-1:])]
        if not named and "/" not in path and len(frame.path) > 1:
            return None
        if frame.package and path.split("/")[-2:-1] != frame.path[-2:-1]:
            if frame.package not in self.snapshot.text_of(path):
                return None
        at_line = self.snapshot.chunk_at(path, frame.line)
        there = chunks[-1] if at_line is None else at_line

        def distance(chunk: int) -> tuple[int, bool, int]:  # `(*Context).Next` is not a type, and a stub runs no line
            agreeing = len(frame.words.intersection(WORD.findall(names[chunk])))
            return -agreeing, self._text(chunk).endswith(("...", ";")), abs(chunk - there)

        return min(named, key=distance, default=int(there))

    def _is_test(self, chunk: int) -> bool:
        """Returns True if a chunk is in a file with tests."""
        return bool(self.segments.traits["test"][self.segments.owners[chunk]])

    def _text(self, chunk: int) -> str:
        """Returns the text of a chunk without the spaces at its end."""
        return self.snapshot.result(chunk).text.rstrip()

    def query_like(self, chunk: int) -> ranking.Query:
        """Creates a query from a chunk's rare words that also occur in other chunks."""
        counts = Counter()
        for word in source_words(self._text(chunk).encode()):
            counts.update(terms(word))
        weights = {}
        for term, count in counts.items():
            others = len(self.segments.postings(term)[0]) - 1
            if others > 0:
                weights[term] = count / (count + 1) * np.log(len(self.segments.lengths) / others)
        chosen = sorted(weights, key=lambda term: (-weights[term], term))[:SIMILAR_TERMS]
        return ranking.Query("sentence", (), dict.fromkeys(chosen, 1.0))

    def nearest_words(self, query: ranking.Query) -> list[str]:
        """Returns a similar indexed word for each word of a query that the index does not contain.

        Of equally similar words, the one in most chunks is chosen.
        """
        found = {}
        for part in dict.fromkeys(part for word in query.words for part in parts(word)):
            chosen = []
            for term in get_close_matches(part, self.snapshot.terms_like(part), CLOSE, NEAREST):
                chunks = self.segments.postings(term)[0].tolist()
                if chunks:
                    chosen.append((round(SequenceMatcher(None, term, part).ratio(), 1), len(chunks), term, chunks[0]))
            if chosen:
                *_, term, chunk = max(chosen)
                words = chain.from_iterable(map(identifier_words, source_words(self._text(chunk).encode())))
                # The stem of a stem may differ.
                found[next((word for word in words if stem(word) == term), term)] = None
        return list(found)

    def stands_out(self, similarity: np.ndarray | None, chunks: slice = slice(None)) -> bool:
        """Returns True if one of these chunks is more similar to the query than any chunk is to random letters."""
        if similarity is None or np.isnan(similarity[chunks]).all():
            return False
        return bool(np.nanmax(similarity[chunks]) > self.snapshot.noise())
