"""Creates example queries for the start page from an index: a function's name, and sentences from documentation."""

from __future__ import annotations

import random
import re

from soft_trainer.search.index.chunks import TEXT_LANGUAGES, first_paragraph
from soft_trainer.search.index.listing import maybe_vendored
from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.search.searching import Search
from soft_trainer.source.names import identifier_words, is_test_path

EXAMPLES = 3
_CHUNKS = 200  # the maximum number of chunks to read
_SENTENCE = re.compile(r"[A-Z]\w*(?:,? [\w'-]+){2,8}(?=\.|$)")  # without code, numbers in brackets, or addresses
_MARKS = re.compile(r"^[\s*/#]+", re.MULTILINE)  # of comments


def example_queries(index: Search) -> list[str]:
    """Returns up to three queries: a function's name, and the first sentences of functions' documentation.

    The same index always gives the same queries.
    """
    names = []
    sentences = []
    for member in index.members:
        with member.snapshot() as snapshot:
            count = len(snapshot.segments.lengths)
            results = map(snapshot.result, random.Random(0).sample(range(count), min(count, _CHUNKS)))
            for name, sentence in filter(None, map(_example, results)):
                if names and sentence:
                    sentences.append(sentence)
                else:
                    names.append(name)
    return list(dict.fromkeys([*names[:1], *sentences[: EXAMPLES - 1], *names]))[:EXAMPLES]


def _example(result: SearchResult) -> tuple[str, str] | None:
    """Returns a function's name and the sentence that starts its documentation, or ""; or None for other chunks."""
    own = re.split(r"[.:#]+", result.name)[-1]
    if len(identifier_words(own)) < 2 or own.startswith("_") or result.language in TEXT_LANGUAGES:
        return None
    if maybe_vendored(result.path) or is_test_path(result.path, result.language):
        return None
    text = first_paragraph(result.text.encode()).decode(errors="replace")
    sentence = _SENTENCE.match(" ".join(_MARKS.sub("", text).split()))
    return own, sentence[0] if sentence else ""
