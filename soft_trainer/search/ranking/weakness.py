"""Detects results that may match by chance.

If the index does not contain what a query asks for, one of the query's words usually occurs somewhere anyway. A result
is weak if its file contains only one term of the query, or none. `docs/search.md` reports how often this is wrong.
"""

from __future__ import annotations

from soft_trainer.search.index.words import telling_terms
from soft_trainer.search.ranking.ranking import Query, Scores

ENOUGH = 2  # the number of terms that a strong result must contain, unless the query has fewer


def is_weak(query: Query, scores: Scores, file: int, path: str) -> bool:
    """Returns True if a file and its path contain too few of the query's terms.

    Args:
        scores: the scores for the query.
        file: the number of the file.
    """
    in_path = telling_terms(path)
    found = count = 0
    for term, weight in query.terms.items():
        contained = term in in_path or file in scores.containing.get(term, ())
        if weight == 1.0:
            count += 1
            found += contained
        else:  # a file with `RouteGroup` contains "route group"
            found += ENOUGH * contained
    return bool(query.words) and found < min(ENOUGH, count)
