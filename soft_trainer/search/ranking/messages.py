"""Recognises the chunk that raises an error message: one of its string literals contains most of the message.

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
    """Returns the words of an error message as typed, without a first word such as `ValueError:` or `panic:`."""
    return re.sub(r"^\S+: ", "", query.strip()).split()


def words_raised(words: Sequence[str], chunk: SearchResult, text_of: Callable[[str], str]) -> int:
    """Returns how many words of a message one string literal of a chunk contains, or 0 if they are too few.

    Args:
        text_of: returns the text of a file.
    """
    least = max(LEAST, len(words) / 2)
    if _shared(words, _plain(chunk.text)) < min(LEAST, len(words)):  # most chunks need not be parsed
        return 0
    best = 0
    source = text_of(chunk.path).encode()
    for literal in literals(source, chunk.language, chunk.start_line, chunk.end_line):
        plain = _plain(literal)
        size = _shared(words, plain)
        if size < least and not size == len(words) == len(plain.split()):
            size = _filled(words, plain)
        best = max(best, size)
    return best


def _filled(words: Sequence[str], literal: str) -> int:
    """Returns the number of words around the values of a literal if a message has them all, or 0 if they are too few.

    A message may be composed: `Invalid value for {name}: {message}`.
    """
    message = f" {' '.join(WORD.findall(' '.join(words)))} "
    position = total = 0
    for part in _HOLE.split(re.sub(r"^\w*[\"'`]+", "", literal)):
        run = WORD.findall(part)
        if not run:
            continue
        position = message.find(f" {' '.join(run)} ", position)
        if position < 0:
            return 0
        total += len(run)
    return total if total >= LEAST else 0


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
