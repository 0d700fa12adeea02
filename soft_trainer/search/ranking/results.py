"""Defines search results, and validates queries."""

from __future__ import annotations

import numbers
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from soft_trainer.errors import UserError
from soft_trainer.search.index.words import WORD, telling_terms

SHOWN_LINES = 4
TESTS = ("only", "no")  # the values of the filter `tests`


@dataclass(frozen=True)
class SearchResult:
    """A search result: a function, a class, or some lines of a file.

    Attributes:
        path: the path relative to the indexed folder, with `/`.
        start_line, end_line: the first and last line. Line numbers start at 1.
        language: the language of the file.
        name: the qualified name of the function or class, or "" for other lines.
        score: higher is better. Scores of different queries cannot be compared.
        text: the text of the lines.
        weak: True if the result may match by chance: its file contains a single word of the query, or none.
        also_in: the locations of copies of the function or class that rank lower, such as `src/dates.py:12`.
    """

    path: str
    start_line: int
    end_line: int
    language: str
    name: str
    score: float
    text: str
    weak: bool = False
    also_in: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        """Returns the fields as a dict, for `--json`."""
        return asdict(self) | {"score": round(self.score, 4)}

    def signature(self) -> tuple[int, str]:
        """Returns (line number, text) for the line that defines the name, or for the first line that has a word."""
        own = re.split(r"[.:#]+", self.name)[-1]
        named = re.compile(rf"(?<!\w){re.escape(own)}(?!\w)")
        lines = self._lines() or [(self.start_line, "")]
        for number, line in lines:
            if own and named.search(line):
                return number, line
        return lines[0]

    def telling_lines(self, wanted: set[str]) -> list[tuple[int, str]]:
        """Returns (line number, text) for the signature and for the lines with the most query terms, in file order."""
        first = self.signature()
        others = set(self._lines()) - {first}
        best = sorted(others, key=lambda line: (-len(wanted.intersection(telling_terms(line[1][:1000]))), line))
        return sorted([first, *best[: SHOWN_LINES - 1]])

    def _lines(self) -> list[tuple[int, str]]:
        """Returns (line number, text) for each line of the result that has at least one word."""
        return [line for line in enumerate(self.text.split("\n"), self.start_line) if WORD.search(line[1])]


def weak_notices(results: Sequence[SearchResult]) -> list[str]:
    """Returns a notice if all results are weak, or [] otherwise."""
    if results and all(result.weak for result in results):
        return ["only weak results, which may match by chance: none contains two words of the query"]
    return []


def check_query(query: str, limit: int) -> None:
    """Raises UserError if a query is empty or a limit is not a whole number of at least 1."""
    if not query.strip():
        raise UserError(
            'the query is empty; enter what to look for, such as "parse a date" (path, language and name only filter)'
        )
    check_limit(limit)


def check_limit(limit: int) -> None:
    """Raises UserError if a limit is not a whole number of at least 1."""
    if not isinstance(limit, numbers.Integral) or limit < 1:
        raise UserError(f"limit={limit}: expected a whole number of at least 1")


def parse_location(location: str) -> tuple[str, int]:
    """Splits a location such as `src/dates.py:12` into path and line. Raises UserError if the line is missing."""
    path, _, line = location.rpartition(":")
    if not path or not line.isdecimal() or len(line) > 9:
        raise UserError(f"{location}: expected PATH:LINE, such as src/dates.py:12")
    return path, int(line)
