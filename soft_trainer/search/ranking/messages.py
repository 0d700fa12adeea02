"""Recognises the chunk that raises an error message: it has most of a string literal's words, in order.

Values in a message, such as paths and numbers, are not in the source code, so half of the message is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from soft_trainer.search.index.words import WORD
from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.source.definitions import literals

# A value in a literal: `{name}`, `${name}`, `#{name}`, `%s`, `%(name)s`.
_HOLE = re.compile(r"[$#]?\{[^{}]*\}|%(?:\(\w+\))?[-+#0-9.*]*[a-zA-Z]")
LEAST = 3  # fewer words of a message are in a literal by chance, unless they are the whole literal


def message_words(query: str) -> list[str]:
    """Returns the words of an error message without signs, and without a first word such as `ValueError:`."""
    words = re.sub(r"^\S+: ", "", query.strip()).split()
    return list(filter(None, map(_plain, words)))


def words_raised(words: Sequence[str], chunk: SearchResult, text_of: Callable[[str], str]) -> int:
    """Returns how many words of a message one string literal of a chunk contains, or 0 if they are too few.

    They are most of the literal, too: a description may share as many words with a long text.

    Args:
        text_of: returns the text of a file.
    """
    least = max(LEAST, len(words) / 2)
    if _shared(words, _plain(chunk.text)) < min(LEAST, len(words)):  # most chunks need not be parsed
        return 0
    best = 0
    source = text_of(chunk.path).encode()
    for literal in literals(source, chunk.language, chunk.start_line, chunk.end_line):
        literal = re.sub(r"^\w*[\"'`]+", "", literal)
        size = _shared(words, _plain(literal))
        fixed = len(_plain(_HOLE.sub(" ", literal)).split())
        if (size >= least and 2 * size > fixed) or size == len(words) == fixed:
            best = max(best, size)
    return best


def _plain(text: str) -> str:
    """Returns the words of source code, without escapes, with single spaces."""
    return " ".join(WORD.findall(re.sub(r"\\[nrt]", " ", text)))


def _shared(words: Sequence[str], text: str) -> int:
    """Returns how many words a text contains in the same order, counting only runs of two words or more."""
    text = f" {text} "
    total = position = start = 0
    while start < len(words):
        size = end = 0
        while start + size < len(words):
            run = " ".join(words[start : start + size + 1])
            found = text.find(f" {run} ", position)
            if found < 0:
                break
            size += 1
            end = found + len(run) + 1
        if size > 1:
            total += size
            position = end
        start += max(size, 1)
    return total
