"""Compares word search, commit search, encoder search and external programs on a repository's newest commits."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from soft_trainer.encoders import text_encoder
from soft_trainer.errors import UserError
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.measuring.judged import DEPTH, JudgedQuery, Measures, history_queries, score_search

WORDS = "words"
MEMORY = "words + memory"
SECONDS = 10.0  # the time limit of an external program for one query
MAX_OUTPUT = 1 << 20  # the maximum number of bytes to read from its output
_QUERY = "{query}"
_RESULT = re.compile(r"(.*?)(?::(\d+)(?::.*)?)?")


class Lines(NamedTuple):
    """The lines that a result of an external program covers."""

    path: str
    start_line: int
    end_line: int


class Verdict(NamedTuple):
    """The result of comparing several searches on the same queries.

    Args:
        queries: the queries.
        cut: the commit whose tree was searched.
        measured: each query's metrics, keyed by system and by level ("files" or "functions").
        notices: messages for the user.
        models: the encoders, in the order of the argument `models`.
    """

    queries: list[JudgedQuery]
    cut: str
    measured: dict[str, dict[str, list[Measures]]]
    notices: list[str]
    models: Sequence[str] = ()


def compare_searches(
    repository: str | Path,
    language: str | None = None,
    models: Sequence[str] = (),
    truncate_dim: int | None = None,
    external: str | None = None,
    index_dir: str | Path | None = None,
) -> Verdict:
    """Compares how well searches find the functions that the newest commits changed. Commit subjects are the queries.

    Every search uses the tree as it was before these commits.

    Args:
        language: the language of the functions. By default, the most common language in the repository.
        models: the encoders, starting with the encoder before training. Each encoder is combined with words.
        external: a command that contains `{query}` and prints paths, best first.
        index_dir: the folder for the index. By default, a temporary one.

    Raises:
        UserError: no queries can be made (see `history_queries`), a model cannot be loaded, or the command cannot be
            started.
    """
    program = ExternalSearch(external) if external else None
    for model in models:
        text_encoder.open_encoder(model, truncate_dim)  # raises an error now rather than after hours
    with tempfile.TemporaryDirectory(prefix="soft_trainer-") as scratch:
        tree = f"{scratch}/tree"
        queries, mined = history_queries(repository, language, tree)
        measured = {}
        with CodeIndex.build(tree, index_dir or f"{scratch}/index", progress=True) as index:
            index.remember(progress=True, repository=os.fspath(repository), tip=mined.cut)
            for name, search in _systems(index, models, truncate_dim):
                measured[name] = score_search(queries, mined, search)
            notices = list(index.notices)
        if program:
            measured[program.name] = score_search(queries, mined, partial(program.search, tree))
            if program.failures:
                failed = f"{program.failures} of {len(queries)} queries failed or took over {SECONDS:g} s"
                notices.append(f"{program.name}: {failed}, and score 0")
    return Verdict(queries, mined.cut, measured, notices, models)


def _systems(index: CodeIndex, models: Sequence[str], truncate_dim: int | None) -> Iterator[tuple[str, Callable]]:
    """Yields (name, search function) for each system. A function is valid only until the next system is requested."""
    search = partial(index.search, limit=DEPTH)
    yield WORDS, partial(search, lexical=True, commits=False)
    yield MEMORY, partial(search, lexical=True)
    for model in models:
        index.encode(model, progress=True, truncate_dim=truncate_dim)
        yield model, partial(search, commits=False)
        yield with_memory(model), search


def with_memory(model: str) -> str:
    """Returns the name of the system that combines an encoder with commits' votes, such as "base + memory"."""
    return f"{model} + memory"


class ExternalSearch:
    """Searches with another program, which must print one result per line, best first, as a path or `path:line`.

    The query is passed as a single argument and never through a shell, because commit subjects are not trusted.

    Args:
        command: the command line, which contains `{query}`.

    Attributes:
        failures: the number of queries for which the program failed or took more than ten seconds.

    Raises:
        UserError: the command does not contain `{query}`, or the program does not exist.
    """

    def __init__(self, command: str):
        try:
            self.words = shlex.split(command)
        except ValueError as error:
            raise UserError(f"external={command!r}: {error}") from error
        if not any(_QUERY in word for word in self.words[1:]):
            raise UserError(
                f"external={command!r}: the command must contain {_QUERY}, as in "
                f"'rg --files-with-matches -e {_QUERY} .'"
            )
        program = shutil.which(self.words[0])
        if program is None:
            raise UserError(f"external={command!r}: program {self.words[0]!r} not found")
        self.words[0] = os.path.abspath(program)
        self.name = Path(program).name
        self.failures = 0

    def search(self, tree: str, query: str) -> list[Lines]:
        """Runs the program in a tree."""
        words = [word.replace(_QUERY, query.replace("\0", " ")) for word in self.words]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                words, cwd=tree, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, process_group=0
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = -1
            finally:  # ends the processes that it started too
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            answer = output.read(MAX_OUTPUT).decode(errors="replace")
        if code not in (0, 1) or (code == 1 and answer):  # a search that finds nothing often returns 1
            self.failures += 1
            return []
        results = []
        for line in islice(filter(None, map(str.strip, answer.splitlines())), DEPTH):
            path, number = _RESULT.fullmatch(line).groups()
            at = int(number or 0)  # a result without a line counts as finding the file, but no function
            results.append(Lines(os.path.relpath(os.path.join(tree, path), tree), at, at))
        return results
