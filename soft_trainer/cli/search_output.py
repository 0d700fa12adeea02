"""Formats results for a terminal or a pipe, so that no text of the tree can control the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable

from soft_trainer.search.results import SearchResult, query_terms
from soft_trainer.search.words import WORD, stem, terms

SHOWN_COLUMNS = 160
# control characters, and those that change the writing direction or break lines
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_BOLD, _GREEN, _DIM, _RED, _END = "\x1b[1m", "\x1b[32m", "\x1b[2m", "\x1b[1;31m", "\x1b[0m"


def safe(text: str) -> str:
    """`text` as one line without control characters; tabs are four spaces."""
    return _UNSAFE.sub("\ufffd", text.replace("\t", "    "))


def format_results(results: Iterable[SearchResult], query: str, colour: bool) -> str:
    """Formats path, line, name and score of each result, with the lines that hold most of the query."""
    wanted = query_terms(query)
    blocks = []
    for result in results:
        place, name, score = f"{safe(result.path)}:{result.start_line}", safe(result.name), f"{result.score:.2f}"
        if colour:
            place, name, score = f"{_BOLD}{place}{_END}", f"{_GREEN}{name}{_END}", f"{_DIM}{score}{_END}"
        lines = [f"{place}  {name}  {score}" if result.name else f"{place}  {score}"]
        for number, line in result.telling_lines(wanted):
            line = safe(line)[:SHOWN_COLUMNS]
            lines.append(f"{number:>6}  {_highlighted(line, wanted) if colour else line}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _highlighted(line: str, wanted: set[str]) -> str:
    """Colours the words of a line that the query asked for."""

    def mark(match: re.Match[str]) -> str:
        word = match[0]
        return f"{_RED}{word}{_END}" if wanted.intersection(terms(word)) or stem(word.lower()) in wanted else word

    return WORD.sub(mark, line)
