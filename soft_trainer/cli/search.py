"""Search an indexed folder by name, by words or by a sentence.

soft-trainer search "parse a date"
soft-trainer search parse_date --path 'src/**' --json
soft-trainer search "tests for parse_date" --tests only
soft-trainer search -- "$(pytest tests/test_dates.py)"
soft-trainer search --similar src/dates.py:12
soft-trainer search --serve
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from soft_trainer.errors import UserError
from soft_trainer.search.index.words import WORD, stem, telling_terms, terms
from soft_trainer.search.ranking.results import (
    TESTS,
    SearchResult,
    check_limit,
    check_query,
    parse_location,
    weak_notices,
)
from soft_trainer.source.source_files import source_folder
from soft_trainer.system.terminal import print_on_main

if TYPE_CHECKING:
    from soft_trainer.search.code_index import CodeIndex

SHOWN_COLUMNS = 160
PIPE_SECONDS = 5.0  # for encoding after the results went to a pipe
# Control characters, and characters that change the writing direction or break lines.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_BOLD = "\x1b[1m"
_GREEN = "\x1b[32m"
_DIM = "\x1b[2m"
_RED = "\x1b[1;31m"
_END = "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer search` to a parser."""
    add = parser.add_argument
    add("query", nargs="*", help="a name, words, a sentence, or the output of a failing command")
    add(
        "--folder",
        default=".",
        metavar="DIR",
        help="folder to search (default: .), indexed first if necessary; stdlib stands for Python's standard library "
        "without its tests",
    )
    add("--index_dir", help="location of the index (default: in the user's cache directory)")
    add(
        "--model",
        help="encoder for searching by meaning, or none; the index is first encoded with it, and remembers it "
        "(default: the index's encoder, and base for a new index)",
    )
    add("--path", metavar="PATTERN", help="only files that match: 'src/**', '*.py'")
    add("--language", help="only files in this language: python, rust, markdown")
    add("--name", help="only functions and classes with this name, such as get, Session.get or Session.*")
    add("--tests", choices=TESTS, help="search only tests, or everything but tests (default: tests rank low)")
    add("-n", "--limit", type=int, default=10, help="maximum number of results (default: 10)")
    add("--json", action="store_true", help="print one JSON object per line")
    add("--lexical", action="store_true", help="search only by words, even if the index has embeddings")
    add("--no_update", action="store_true", help="do not look for changed files first")
    add("--port", type=int, default=0, help="port of the page (default: any free port)")
    add(
        "--editor",
        metavar="LINK",
        help="link to open a result from the page, with {path} and {line} (default: vscode://file/{path}:{line})",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--similar", metavar="PATH:LINE", help="find code similar to the code at this line, such as a result")
    add("--serve", action="store_true", help="serve a search page on this machine's loopback address")
    add("--mcp", action="store_true", help="serve tools to an agent over standard input and output")


def run(arguments: argparse.Namespace) -> int:
    """Searches and prints the results. Returns 1 if nothing is found."""
    query = " ".join(arguments.query)
    location = parse_location(arguments.similar) if arguments.similar else None
    if location or arguments.mcp or arguments.serve:
        check_limit(arguments.limit)
    else:
        check_query(query, arguments.limit)
    if arguments.mcp or arguments.serve:
        return _serve(_opened(arguments, words_only=True), arguments, query)
    index = _opened(arguments)
    if not arguments.no_update:
        index.refresh(encode=not arguments.lexical)
        index.remedy = "the others are encoded after this search"
    filters = {name: getattr(arguments, name) for name in ("path", "language", "name", "tests")}
    if location:
        results = index.similar(*location, arguments.limit, lexical=arguments.lexical)
    else:
        results = index.search(query, arguments.limit, lexical=arguments.lexical, **filters)
    for notice in [*index.notices, *weak_notices(results)]:
        print_on_main(safe(notice))
    if results and not arguments.json:
        print_on_main(safe(f"ranked by {', '.join(index.ranked_by)}; compare scores only within this search"))
    try:
        _print(results, arguments, query, filters)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has stopped reading; Python would flush again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not (arguments.no_update or arguments.lexical):
        # Who reads a pipe, such as an agent, waits for the end of this process.
        seconds = math.inf if sys.stdout.isatty() else PIPE_SECONDS
        try:
            with suppress(UserError):  # the search has reported the error
                index.encode(progress=True, wait=False, seconds=seconds)
        except KeyboardInterrupt:
            print_on_main("stopped; the next search continues")
    if results:
        return 0
    return 1


def _opened(arguments: argparse.Namespace, words_only: bool = False) -> CodeIndex:
    """Opens the index of the folder to search. Indexes a folder that has no index yet.

    Args:
        words_only: True if a server will compute embeddings later, in the background.
    """
    # Imported here so that --help stays fast.
    from soft_trainer.search.code_index import NO_ENCODER, CodeIndex, open_for

    changes_now = arguments.model and (not words_only or arguments.model in NO_ENCODER)
    if arguments.index_dir:
        index = CodeIndex.open(arguments.index_dir)
    else:
        folder = source_folder(arguments.folder)
        index = open_for(folder)
        if index is None and arguments.no_update:
            raise UserError(f"{folder}: no index yet; drop --no_update to make one")
        if index is None:
            print_on_main(f"{safe(folder)}: no index yet, making one")
            return CodeIndex.build(folder, model=arguments.model, progress=True, words_only=words_only)
    if changes_now:
        index.update(model=arguments.model, progress=True)
    return index


def _print(results: list[SearchResult], arguments: argparse.Namespace, query: str, filters: dict) -> None:
    """Prints results as text or as JSON. If there are none, prints a line to standard error."""
    if not results:
        given = "".join(f" --{name} {value}" for name, value in filters.items() if value)
        print_on_main(safe(f"nothing found{given and f' with{given}'}"))
    elif arguments.json:
        sys.stdout.writelines(json.dumps(result.as_dict()) + "\n" for result in results)
    else:
        # Colours are for a terminal, unless the user wants none (https://no-color.org).
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
        sys.stdout.write(format_results(results, query, colour=not plain))


def _serve(index: CodeIndex, arguments: argparse.Namespace, query: str) -> int:
    """Serves the search page, or the tools for an agent. Returns 130 when the user stops the server."""
    # Imported here, so that a plain search does not wait for the server.
    from soft_trainer.search.code_index import NO_ENCODER
    from soft_trainer.search.serving.served_index import ServedIndex
    from soft_trainer.search.serving.server import EDITOR, serve_page
    from soft_trainer.search.serving.tools import serve_tools

    try:
        model = None if arguments.model in NO_ENCODER else arguments.model
        served = ServedIndex(index, update=not arguments.no_update, lexical=arguments.lexical, model=model)
        if arguments.mcp:
            serve_tools(served)
        else:
            serve_page(served, query, arguments.port, arguments.editor or EDITOR)
        return 0
    except KeyboardInterrupt:
        print_on_main("stopped; the index is kept")
        return 130


def safe(text: str) -> str:
    """Returns the text as one line without control characters. Tabs become four spaces."""
    return _UNSAFE.sub("\ufffd", text.replace("\t", "    "))


def format_results(results: Iterable[SearchResult], query: str, colour: bool) -> str:
    """Formats each result: path, line, name, score, a mark if it is weak, and the lines with the most query terms."""
    wanted = set(telling_terms(query))
    blocks = []
    for result in results:
        location = f"{safe(result.path)}:{result.start_line}"
        name = safe(result.name)
        score = f"{result.score:.2f}"
        if result.weak:
            score += "  weak"
        if colour:
            location = f"{_BOLD}{location}{_END}"
            name = f"{_GREEN}{name}{_END}"
            score = f"{_DIM}{score}{_END}"
        lines = [f"{location}  {name}  {score}" if result.name else f"{location}  {score}"]
        for number, line in result.telling_lines(wanted):
            line = safe(line)[:SHOWN_COLUMNS]
            lines.append(f"{number:>6}  {_highlighted(line, wanted) if colour else line}")
        if result.also_in:
            lines.append(safe(f"        also in {', '.join(result.also_in)}")[:SHOWN_COLUMNS])
        blocks.append("\n".join(lines))
    if blocks:
        return "\n\n".join(blocks) + "\n"
    return ""


def _highlighted(line: str, wanted: set[str]) -> str:
    """Colours the query's words in a line."""
    hits = {word for word in WORD.findall(line) if wanted.intersection(terms(word)) or stem(word.lower()) in wanted}
    return WORD.sub(lambda found: f"{_RED}{found[0]}{_END}" if found[0] in hits else found[0], line)
