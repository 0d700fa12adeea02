"""Detects results that may match by chance.

If the index does not contain what a query asks for, one of the query's words usually occurs somewhere anyway. A result
is weak if its file contains only one part of the query, or none. `docs/search.md` reports how often this is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from soft_trainer.search.index.words import parts, stem, whole
from soft_trainer.search.ranking.ranking import Query, Scores

ENOUGH = 2  # the number of parts that a strong result must contain, unless the query has fewer
FEW = 16  # the first words of a long text, which usually contain enough parts


def is_weak(query: Query, scores: Scores, file: int) -> bool:
    """Returns True if a file contains too few of the query's words.

    Args:
        scores: the scores for the query.
        file: the number of the file.
    """

    def contains(term: str) -> bool:
        return any(_is_in(file, files) for files in scores.containing.get(term, ()))

    if count_found(query.words[:FEW], contains)[0] >= ENOUGH:
        return False
    found, count = count_found(query.words, contains)
    return found < min(ENOUGH, count)


def count_found(words: Sequence[str], contains: Callable[[str], bool]) -> tuple[int, int]:
    """Returns how many parts of a query a text contains, and how many parts the query has.

    A part is a word, or a word within an identifier: `parse_date` has two parts. A text that contains an identifier
    also contains the identifier's parts. A text that contains `RouteGroup` contains "route group".

    Args:
        words: the query's words.
        contains: a function that returns True if the text contains a term.
    """
    found = {}
    for size in (1, 2, 3):
        for start in range(len(words) - size + 1):
            some = words[start : start + size]
            joined = contains(stem("".join(map(whole, some))))
            for word in some:
                for part in parts(word):
                    if part not in found:
                        found[part] = contains(part)
                    found[part] |= joined
    return sum(found.values()), len(found)


def _is_in(number: int, ascending: np.ndarray) -> bool:
    """Returns True if a sorted array contains a number."""
    position = np.searchsorted(ascending, number)
    return number in ascending[position : position + 1]
