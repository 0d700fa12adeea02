"""Reads queries that are judged against a corpus of rows: `annotationStore.csv` or `relevance.jsonl`.

`annotationStore.csv` is CodeSearchNet's challenge: Language, Query, GitHubUrl, Relevance from 0 to 3. In
`relevance.jsonl`, each line is `{"query": text, "url": id, "relevance": number from 0 to 1000}`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from soft_trainer.data.column_names import CODES
from soft_trainer.data.columns import check_texts, without_empty
from soft_trainer.data.folders import Files
from soft_trainer.data.languages import languages_in
from soft_trainer.data.layouts.graded import Judgment, graded_split, parsed
from soft_trainer.data.layouts.tables import row_files, table_of_files
from soft_trainer.data.make_splits import Context
from soft_trainer.data.row_checks import check_split
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.files import open_text, read_json_lines
from soft_trainer.source.languages import CODESEARCHNET_LANGUAGES

MAX_RELEVANCE = 1000  # above, nDCG's gain of 2^relevance would overflow


def finds(name: str, files: Files) -> bool:
    """Returns True if a folder has judgments of the layout `name`."""
    return KINDS[name][0] in files.paths


def read(name: str, files: Files, context: Context) -> dict[str, Split]:
    """Reads the judged queries of the layout `name`. Their corpus is the folder's codebase, otherwise that of the run.

    Raises:
        UserError: there is no corpus, or it has no urls or texts, or a judgment cannot be read.
    """
    file, parse, gain = KINDS[name]
    folder = files.source
    corpus = context.codebase
    if corpus is None:
        paths = row_files(files).get("codebase")
        corpus = without_empty(table_of_files(paths)) if paths else context.run_corpus
    if corpus is None:
        raise UserError(f"{folder}: no corpus for {file}; neither the folder nor the run has a codebase")
    if "url" not in corpus.column_names:
        raise UserError(f"{folder}: {file} refers to functions by url, but the codebase has no urls")
    check_texts(corpus, CODES, f"{folder}, codebase")
    languages = context.languages or languages_in({"codebase": corpus})
    path = files.paths[file]
    split = graded_split(parse(path, languages), corpus, path, gain)
    if context.check:
        try:
            check_split(split, name)
        except UserError as error:
            raise UserError(f"{folder}, {name}: {error}") from None
    return {name: split}


def _challenge(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads the challenge's judgments in `languages`. Lower-cases the queries, as published."""
    known = languages or CODESEARCHNET_LANGUAGES

    def read(row: dict) -> Judgment | None:
        language = row["Language"].strip().lower()
        query = row["Query"].lower()
        if language in known:
            return _judgment(language, query, row["GitHubUrl"], row["Relevance"])
        return None

    try:
        with open_text(path, newline="") as file:
            rows = enumerate(list(csv.DictReader(file)), 1)
    except csv.Error as error:
        raise UserError(f"{path}: cannot be read as CSV ({error})") from error
    return list(filter(None, parsed(((f"{path}, row {number}", row) for number, row in rows), read)))


def _lines(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads `relevance.jsonl`. The queries have the first of `languages`."""
    language = next(iter(languages), None)
    return parsed(read_json_lines(path), lambda row: _judgment(language, row["query"], row["url"], row["relevance"]))


def _judgment(language: str | None, query: str, url: str, relevance) -> Judgment:
    grade = float(relevance)
    if not query.strip() or not url.strip():
        raise UserError(f"query {query!r} or url {url!r} is blank")
    if not 0 <= grade <= MAX_RELEVANCE:
        raise UserError(f"relevance is {relevance!r}, expected a number from 0 to {MAX_RELEVANCE}")
    return (language, " ".join(query.split())), url.strip(), grade


# layout -> its file, the function that reads judgments in some languages, how nDCG uses the grades
KINDS = {
    "annotations": ("annotationStore.csv", _challenge, "exponential"),
    "relevance": ("relevance.jsonl", _lines, "linear"),
}
