"""Recognises the chunk that raises an error message: one of its string literals contains most of the message.

Values in a message, such as paths and numbers, are not in the source code, so half of the message is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from soft_trainer.search.ranking.results import SearchResult
from soft_trainer.source.definitions import literals

LEAST = 3  # fewer words of a message are in a literal by chance, unless they are the whole literal


def message_words(query: str) -> list[str]:
    """Returns the words of an error message as typed, without a first word such as `ValueError:` or `panic:`."""
    return re.sub(r"^\S+: ", "", query.strip()).split()


def words_raised(words: Sequence[str], chunk: SearchResult, text_of: Callable[[str], str]) -> int:
    """Returns how many words of a message one string literal of a chunk contains, or 0 if they are too few.

    Args:
        text_of: returns the text of a file.
    """
    least = max(LEAST, len(words) / 2)
    if _shared(words, _plain(chunk.text)) < min(least, len(words)):  # most chunks need not be parsed
        return 0
    best = 0
    source = text_of(chunk.path).encode()
    for literal in map(_plain, literals(source, chunk.language, chunk.start_line, chunk.end_line)):
        size = _shared(words, literal)
        if size >= least or size == len(words) == len(literal.split()):
            best = max(best, size)
    return best


def _plain(text: str) -> str:
    """Returns source code without backslashes, and with single spaces."""
    return " ".join(re.sub(r"\\[nrt]", " ", text).replace("\\", "").split())


def _shared(words: Sequence[str], text: str) -> int:
    """Returns how many words a text contains in the same order, counting only runs of two words or more."""
    total = position = start = 0
    while start < len(words):
        size = end = 0
        while start + size < len(words):
            run = " ".join(words[start : start + size + 1])
            found = text.find(run, position)
            if found < 0:
                break
            size += 1
            end = found + len(run)
        if size > 1:
            total += size
            position = end
        start += max(size, 1)
    return total
