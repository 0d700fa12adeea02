"""Searches with a text of several lines, such as an issue.

The first line, the opening (the first line and the next paragraph) and the whole text are three queries. The files
that the text mentions are a fourth ranking. The rankings are fused by reciprocal rank. `benchmarks/RESULTS.md` has the
results for the issues of SWE-bench.

No program is recognised. The chunks at the locations (a path and a line number) nearest to a text's errors come first.
A text with locations that does not begin with sentences is turned, so that it begins with its first error.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice
from os.path import commonprefix
from typing import NamedTuple

import numpy as np

from soft_trainer.search.index.store import Segments
from soft_trainer.search.index.words import STOP_WORDS, WORD, parts
from soft_trainer.search.ranking.ranking import DISCOUNTS, Query, Scores, ordering, parse_query

NEAR = 10  # a file of rank r scores 1 / (NEAR + r); a larger number brings the first ranks closer together
PROSE = 0.2  # the least share of stop words in a sentence; programs print fewer
SAME_NAME = 3  # a path that matches more files is ignored
# What terminals colour with, and what begins the lines of an exception in a group.
_MARKS = re.compile(
    r"\x1b\[[\d;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|^[ \t]*(?:\| |\+-\+-)+", re.MULTILINE
)
# A line that begins with an error's name, the first words of a message, or what stands above a failing test's frames.
_ERROR = re.compile(
    r"^[^\w\n]*(?:E {2,}|[\w.:$\\/]+(?:Error|Exception)\b|(?:\w+ ){0,2}(?:[Ee]rror|[Ee]xception|panic) ?[:.\[](?=.*\w)"
    r"|Exception in thread|thread .* panicked)(?!.*Traceback \(most)"
    r"|^[^\w\n]*(?:FAIL|ERROR): ",
    re.MULTILINE,
)
_HEADING = re.compile(r"^.*Traceback \(most recent call last\):?\n", re.MULTILINE)  # in every traceback
# A path and a line number: `a.py:3`, `a.py(3,9)`, `a.java:[3,9]`, `a.py#L3`, `"a.py", line 3`, `a.ts 3:9`; and the
# function, if it comes next.
_PATH_LETTERS = r"[\w./\\@+\[\]-]"
_LOCATION = re.compile(
    rf"(?<!{_PATH_LETTERS})\[?({_PATH_LETTERS}*\w)"
    r"""(?:["'`]?[:(|]\[?| \((?=\d+[,)])|["'`]?[ ,:@]{0,3}(?:on )?line[ =]|[ :#]L|(?: |\n +)(?=\d+:\d))"""
    r"(\d{1,9})(?!\.?\w)(?:[^\w\n]{1,3}in\b(.*))?"
)
_METHOD = re.compile(r"[\w.$/]+(?=\($)")  # Java names the package, class and method instead of folders
LINE = 200  # the characters before a location that may name its function
ERRORS = 20  # the first errors of a text, each of which has a nearest location
_ADDRESS = re.compile(r"https?://[^/\s]*/|\?[\w=&.%-]*(?=:\d)")  # what a browser adds to a path
_PLACE = re.compile(r"((?:[A-Za-z]:)?[^\s:#]*\w):?")  # `src/dates.py`
_KEY = re.compile(r"\w+(?:-\w+)*")  # an identifier, or a key such as `requires-python`
_LETTERS_OF_PATHS = re.compile(r"[\w./\\-]+")
_PATH = re.compile(r"[\w./\\-]*\w\.\w+")  # only tried at the start of such letters: elsewhere it takes quadratic time


def parse_text(text: str) -> list[Query]:
    """Parses a query. A text of several lines becomes three: the first line, the opening and the whole text."""
    first, _, rest = text.strip().partition("\n")
    if not rest:
        return [parse_query(text)]
    return [parse_query(part) for part in (first, _opening(text), text)]


def _opening(text: str) -> str:
    """Returns the first line of a text and the next paragraph."""
    first, _, rest = text.strip().partition("\n")
    paragraph = re.split(r"\n\s*\n", rest.strip(), maxsplit=1)[0]
    return f"{first}\n{paragraph}"


def plain(text: str) -> str:
    """Returns a text without the colours of a terminal and the marks of exception groups."""
    return _MARKS.sub("", text.replace("\r\n", "\n"))


def failure_first(text: str) -> str:
    """Moves the lines before the first error of a pasted failure to the end.

    Drops the first of these lines, which is often the command, and the headings of tracebacks. Other texts
    stay as they are. An issue that quotes a failure begins with a title, which says more than the error.
    """
    location = _LOCATION.search(text)
    if location is None or is_prose(text):
        return text
    start = _line_start(text, (_ERROR.search(text) or location).start() + 1)
    before = text[:start].partition("\n")[2]  # without the command
    return _HEADING.sub("", f"{text[start:]}\n\n{before}").strip()


def _line_start(text: str, position: int) -> int:
    """Returns where the line with a position starts."""
    return text.rfind("\n", 0, max(position, 0)) + 1


def is_prose(text: str) -> bool:
    """Returns True if a text begins with sentences, such as an issue, or quotes something in fences."""
    words = WORD.findall(_opening(text).lower())
    return "```" in text or sum(word in STOP_WORDS for word in words) > PROSE * len(words)


def fuse(
    scores: Sequence[Scores],
    queries: Sequence[Query],
    named: list[int],
    segments: Segments,
    allowed: np.ndarray | None,
) -> Scores:
    """Fuses the rankings for a text's queries with the ranking of the files that the text mentions.

    Args:
        named: the numbers of the files that the text mentions, best first.
        allowed: bool[chunks], the chunks that may be returned. By default, all.
    """
    total = np.zeros(len(segments.firsts) - 1)
    shares = np.zeros(len(segments.owners), np.float32)
    for one in scores:
        files, chunks = ordering(one, segments, allowed)
        found = np.flatnonzero(files > 0)
        order = found[np.argsort(-files[found], kind="stable")]
        total[order] += 1 / (NEAR + 1 + np.arange(len(order)))
        shares += _shares_of_best(chunks, segments)
    order = [file for file in named if total[file] > 0]
    total[order] += 1 / (NEAR + 1 + np.arange(len(order)))
    # The discounts in each ranking hardly count after the fusion, which looks only at ranks.
    total *= 1 + (queries[0].test_factor - 1) * segments.traits["test"]
    total *= 1 - DISCOUNTS["text"] * segments.traits["text"]
    return Scores(total, _shares_of_best(shares, segments), any(one.matched for one in scores), scores[-1].containing)


def _shares_of_best(chunks: np.ndarray, segments: Segments) -> np.ndarray:
    """Divides each chunk's score by the best score in the chunk's file."""
    best = np.maximum.reduceat(chunks, segments.firsts[:-1])
    return chunks / np.maximum(best, 1e-9)[segments.owners]


def named_files(text: str, segments: Segments) -> list[int]:
    """Returns the numbers of the files that a text mentions, starting with the last.

    The last line of a traceback is nearest to the error. A path may contain folders that are not in the index, such as
    `/usr/lib/python3/site-packages/requests/models.py`.
    """
    mentioned = filter(None, map(_PATH.match, _LETTERS_OF_PATHS.findall(text)))
    paths = [re.split(r"[/\\]", path[0]) for path in mentioned]
    files = chain.from_iterable(files_at(path, segments) for path in reversed(paths))
    return list(dict.fromkeys(files))


def files_at(path: Sequence[str], segments: Segments, least: int = 1) -> list[int]:
    """Returns the numbers of the files that share the longest end of a path, or [] if they are too many.

    Args:
        path: folders and a file name.
        least: the number of names that must be the same, unless the path or the file's path has fewer.
    """
    shared = {}
    for number, names in _files_by_name(segments).get(path[-1], ()):
        size = len(commonprefix([path[::-1], names]))
        if size == len(path) == len(names):
            return [number]
        if size >= min(least, len(path), len(names)):
            shared[number] = size
    most = max(shared.values(), default=0)
    files = [number for number, size in shared.items() if size == most]
    return files if len(files) <= SAME_NAME else []


@lru_cache(maxsize=2)
def _files_by_name(segments: Segments) -> dict[str, list[tuple[int, list[str]]]]:
    """Returns (number, name and folders from the innermost on) of the files with each name."""
    files = defaultdict(list)
    for number, path in enumerate(segments.paths):
        names = path.split("/")[::-1]
        files[names[0]].append((number, names))
    return files


class Frame(NamedTuple):
    """A line of a stack trace.

    Args:
        path: the folders and the name of a file.
        line: the line number in the file.
        words: the words of the line besides the path, such as the function's name.
        package: the package that the line names, which Java and Kotlin print instead of folders.
    """

    path: list[str]
    line: int
    words: set[str]
    package: str = ""


def locations(text: str, segments: Segments) -> list[tuple[Frame, int]]:
    """Returns the locations in a text that are in the index, and the numbers of the files that each may be in.

    The first are the nearest to each error, then come all others, the nearest to the first error first. The innermost
    frame of a stack trace is nearest to the message, which Python prints below the frames, and others above. A query
    may also be nothing but a path.
    """
    if path := _place(text):
        return [(Frame(path[-1:], 0, set()), file) for file in files_at(path, segments, len(path))]
    outer, _, cause = text.rpartition("\nCaused by: ")  # in Java
    text = _ADDRESS.sub("", f"{cause}\n{outer}")
    found = {}
    for match in _LOCATION.finditer(text):
        frame = _frame(match)
        least = 1 if frame.package else 2  # folders need not have the names of a package
        if files := files_at(frame.path, segments, least):
            found[match.start()] = [(frame, file) for file in files]
    errors = [error.start() for error in islice(_ERROR.finditer(text), ERRORS)]
    errors = errors or [len(text) if 'File "' in text else 0]
    nearest = [min(found, key=lambda position: abs(position - error)) for error in errors if found]
    others = sorted(found, key=lambda position: abs(position - errors[0]))
    return list(chain.from_iterable(found[position] for position in dict.fromkeys([*nearest, *others])))


def _frame(match: re.Match) -> Frame:
    """Returns a location with the names around it. Go and Rust print the function on the line above."""
    start = max(_line_start(match.string, match.start()), match.start() - LINE)
    before = match.string[start : match.start()]
    if before[:1].isspace() and before.strip() in ("", "at"):
        before = match.string[_line_start(match.string, start - 1) : start]
    path = re.split(r"[/\\]", match[1])
    package = []
    if len(path) == 1 and (method := _METHOD.search(before)):
        package = WORD.findall(re.sub(r"\$\w*", "", method[0]))[:-2]
    words = set(WORD.findall(f"{before} {match[3] or ''}"))
    return Frame([*package, *path], int(match[2]), words, ".".join(package))


def _place(text: str) -> list[str] | None:
    """Returns the folders and the name of the file that a query consists of, or None."""
    match = _PLACE.fullmatch(text.strip())
    if match is None or not re.search(r"[./\\]", match[1]):
        return None
    return re.split(r"[/\\]", match[1])


def key(text: str) -> str | None:
    """Returns the identifier or key of several parts that a query consists of, or None."""
    own = text.strip().lstrip("-")  # of an option
    return own if _KEY.fullmatch(own) and ("-" in own or len(parts(own)) > 1) else None
