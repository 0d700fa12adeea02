"""Searches with a text of several lines, such as an issue.

The first line, the opening (the first line and the next paragraph) and the whole text are three queries. The files
that the text mentions are a fourth ranking. The rankings are fused by reciprocal rank. `benchmarks/RESULTS.md` has the
results for the issues of SWE-bench.

The pasted output of a failing command is first turned, so that it begins with its first error. A stack trace begins
with its innermost frames in the index.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix
from typing import NamedTuple

import numpy as np

from soft_trainer.search.index.store import Segments
from soft_trainer.search.index.words import WORD, parts
from soft_trainer.search.ranking.ranking import DISCOUNTS, Query, Scores, ordering, parse_query

NEAR = 10  # a file of rank r scores 1 / (NEAR + r); a larger number brings the first ranks closer together
SAME_NAME = 3  # a path that matches more files is ignored
# A pasted failure begins with a command (`$ ...`, or words of commands, options and arguments that are no prose), or
# with output of pytest, unittest, go test, cargo, vitest, jest, Maven, Gradle, RSpec or PHPUnit.
_WORDS = (
    "python3?|pytest|phpunit|dotnet|tox|uv|poetry|go|cargo|npm|npx|pnpm|yarn|node|jest|vitest|tsc|mvnw?|gradlew?|bundle|rspec|rake|make"
    "|run|exec|test|build|check|vet"
)
_COMMAND = re.compile(rf"\$ .*|([\w./]*/)?({_WORDS})( ({_WORDS})| -\S+( \w+)?| \S*[./:=]\S*)*")
_OUTPUT = re.compile(
    r"[=_]{3,} |[.FEs]+$|(RUN|FAIL|PASS|=== RUN|\[INFO\]|\[ERROR\]|> Task)\s"
    r"|running \d+ test|PHPUnit \d|Compiling \S+ v\d|# \S+ \[|Failures:"
)
_HEADING = "Traceback (most recent call last):\n"  # in every traceback
# The lines with which the same programs, and compilers, begin an error.
_ERROR = re.compile(
    r"^[ \t]*(E {2,}|File \"|(--- )?(FAIL|ERROR): |panic: |thread '.*panicked at |● |Failure/Error: |\d+\) [\w\\]+::\w"
    r"|(\S+: )?error(\[\w+\])?: |(\[ERROR\] )?\S+\.\w+[:(]\[?\d+[:,]\d+|[\w.:]*(Error|Exception)\b)",
    re.MULTILINE,
)
# A line of a stack trace with a path and a line number, with the function on the line above (Go, Rust) and the source
# code below (Python).
_PATH_LETTERS = r"[\w./\\@+\[\]-]"
_AT_LINE = rf'(?<!{_PATH_LETTERS})({_PATH_LETTERS}+)(?:", line |:line |[:(]\[?)(\d{{1,9}})(.*)'
_FRAME = re.compile(
    r'^((?: *\d+: .*\n)?[ \t]*(?:File "|at |from |#\d+ |(?=\S+:\d+:in )).*?|.*\n\t(?=\S+\.go:))'
    rf"{_AT_LINE}(?:\n {{4,}}(?!at |File |\d+: ).*){{0,2}}",
    re.MULTILINE,
)
# The same in any line of a failing command's output: `a.py:3: in total`, `a.js:3:9`, `a.ts(3,9)`.
_LOCATION = re.compile(rf"^((?:.*\n[ \t]+(?:at )?(?=\S+\.(?:go|rs):))?.*?){_AT_LINE}", re.MULTILINE)
_ADDRESS = re.compile(r"https?://[^/\s]*/|\?[\w=&.%-]*(?=:\d)")  # what a browser adds to a path
_PYTHON_FRAMES = re.compile(r'(?:.*\n-+\n)?(?:[ \t]*File ".*\n(?:[ \t]+.*\n)*)+')  # below the heading of unittest
_PLACE = re.compile(r"((?:[A-Za-z]:)?[^\s:]*\w)(?::(\d{1,9})(?:[-:]\d+)?)?:?")  # `src/dates.py`, `src/dates.py:12`
_KEY = re.compile(r"\w+(?:-\w+)*")  # an identifier, or a key such as `requires-python`
_LINE = re.compile(r"^.*\S", re.MULTILINE)
_LETTERS_OF_PATHS = re.compile(r"[\w./\\-]+")
_PATH = re.compile(r"[\w./\\-]*\w\.\w+")  # only tried at the start of such letters: elsewhere it takes quadratic time


def parse_text(text: str) -> list[Query]:
    """Parses a query. A text of several lines becomes three: the first line, the opening and the whole text."""
    first, _, rest = text.strip().partition("\n")
    if not rest:
        return [parse_query(text)]
    paragraph = re.split(r"\n\s*\n", rest.strip(), maxsplit=1)[0]
    return [parse_query(part) for part in (first, f"{first}\n{paragraph}", text)]


def failure_first(text: str) -> str:
    """Moves the lines before the first error of a pasted failure to the end, and drops the command.

    Other texts stay as they are. An issue that quotes a failure begins with a title, which says more than the error.
    """
    output, start = _failure(text)
    return f"{output[start:]}\n\n{output[:start]}" if output else text


def _failure(text: str) -> tuple[str, int]:
    """Returns the output of a failing command, and where its first error begins. Returns ("", 0) for other texts."""
    pasted = text.strip().replace("\r\n", "\n")
    first, _, output = pasted.partition("\n")
    if not _COMMAND.fullmatch(first.strip()):
        output = pasted
        if not (_OUTPUT.match(first) or pasted.startswith(_HEADING)):
            return "", 0
    output = output.replace(_HEADING, "")
    error = _ERROR.search(output)
    return (output, error.start()) if error else ("", 0)


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
    found = []
    for files in files_at(paths[::-1], segments):
        if len(files) <= SAME_NAME:
            found += files
    return list(dict.fromkeys(found))


def files_at(paths: Iterable[Sequence[str]], segments: Segments, least: int = 1) -> Iterator[list[int]]:
    """Yields the numbers of the files that share the longest end of each path.

    Args:
        paths: folders and a file name each.
        least: the number of names that must be the same, unless the path or the file's path has fewer.
    """
    ends = [path.split("/")[::-1] for path in segments.paths]
    same_name = defaultdict(list)
    for number, names in enumerate(ends):
        same_name[names[0]].append(number)
    for path in paths:
        shared = {number: len(commonprefix([path[::-1], ends[number]])) for number in same_name.get(path[-1], [])}
        most = max(shared.values(), default=0)
        yield [number for number in shared if most == shared[number] >= min(least, len(path), len(ends[number]))]


class Frame(NamedTuple):
    """A line of a stack trace.

    Args:
        path: the folders and the name of a file.
        line: the line number in the file.
        words: the words of the line besides the path, such as the function's name.
    """

    path: list[str]
    line: int
    words: set[str]


def frames(text: str) -> list[Frame]:
    """Returns the frames of a stack trace, innermost first, or [] if fewer than half of a text's lines are frames.

    An issue that quotes a traceback has fences around it, or its heading, which `failure_first` removes from others.
    """
    if (
        _HEADING.strip() in text
        or "```" in text
        or 2 * len(_LINE.findall(_FRAME.sub("", text))) > len(_LINE.findall(text))
    ):
        return []
    outer, _, cause = text.rpartition("\nCaused by: ")  # in Java
    found = []
    for match in _FRAME.finditer(_ADDRESS.sub("", f"{cause}\n{outer}")):
        before, location, line, after = match.groups()
        path = re.split(r"[/\\]", location)
        if len(path) == 1:  # Java names the package, class and method instead of folders
            path = [*WORD.findall(re.sub(r"\$\w*", "", before))[:-2], location]
        found.append(Frame(path, int(line), set(WORD.findall(before + after))))
    if 'File "' in text:
        found.reverse()
    return found


def locations(text: str) -> list[Frame]:
    """Returns the locations in the output of a failing command, beginning with the nearest to its first error.

    Python's programs print frames above the message. All others print them below, and what is above the message
    belongs to warnings.
    """
    output, start = _failure(text)
    first = 0 if output.startswith("E  ", start) else start
    if traceback := _PYTHON_FRAMES.match(output, start):
        start = traceback.end()
    output = _ADDRESS.sub(lambda address: " " * len(address[0]), output)
    found = sorted(_LOCATION.finditer(output, first), key=lambda match: abs(match.start(2) - start))
    return [
        Frame(re.split(r"[/\\]", path), int(line), set(WORD.findall(before + after)))
        for before, path, line, after in map(re.Match.groups, found)
    ]


def place(text: str) -> Frame | None:
    """Returns the place that a query consists of, such as `src/dates.py:12`, or None. The line is 0 without a line."""
    match = _PLACE.fullmatch(text.strip())
    if match is None or not re.search(r"[./\\]", match[1]):
        return None
    return Frame(re.split(r"[/\\]", match[1]), int(match[2] or 0), set())


def key(text: str) -> str | None:
    """Returns the identifier or key of several parts that a query consists of, or None."""
    own = text.strip()
    return own if _KEY.fullmatch(own) and ("-" in own or len(parts(own)) > 1) else None
