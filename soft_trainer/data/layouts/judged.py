"""Reads queries that are judged against a corpus of rows: `annotationStore.csv` or `relevance.jsonl`.

`annotationStore.csv` is CodeSearchNet's challenge: Language, Query, GitHubUrl, Relevance from 0 to 3. In
`relevance.jsonl`, each line is `{"query": text, "url": id, "relevance": number from 0 to 1000}`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from datasets import Dataset

from soft_trainer.data.column_names import CODES
from soft_trainer.data.columns import check_texts
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

CHALLENGE = "annotationStore.csv"
LINES = "relevance.jsonl"
MAX_RELEVANCE = 1000  # above, nDCG's gain of 2^relevance would overflow


def finds_annotations(files: Files) -> bool:
    """Returns True if a folder has the judgments of CodeSearchNet's challenge."""
    return CHALLENGE in files.paths


def read_annotations(files: Files, context: Context) -> dict[str, Split]:
    """Reads the queries of CodeSearchNet's challenge, in the languages of the run or of the corpus."""
    return {"annotations": _judged(files, "annotations", CHALLENGE, _challenge, "exponential", context)}


def finds_relevance(files: Files) -> bool:
    """Returns True if a folder has judgments in `relevance.jsonl`."""
    return LINES in files.paths


def read_relevance(files: Files, context: Context) -> dict[str, Split]:
    """Reads the queries of `relevance.jsonl`."""
    return {"relevance": _judged(files, "relevance", LINES, _lines, "linear", context)}


def _judged(files: Files, split_name: str, name: str, read: Callable, gain: str, context: Context) -> Split:
    """Makes a split of judged queries. Their corpus is the folder's codebase, otherwise that of the run.

    Raises:
        UserError: there is no corpus, or it has no urls or texts, or a judgment cannot be read.
    """
    folder = files.source
    corpus = context.codebase
    if corpus is None:
        paths = row_files(files).get("codebase")
        corpus = _without_empty_columns(table_of_files(paths)) if paths else context.run_corpus
    if corpus is None:
        raise UserError(f"{folder}: no corpus for {name}; neither the folder nor the run has a codebase")
    if "url" not in corpus.column_names:
        raise UserError(f"{folder}: {name} refers to functions by url, but the codebase has no urls")
    check_texts(corpus, CODES, f"{folder}, codebase")
    languages = context.languages or languages_in({"codebase": corpus})
    split = graded_split(read(files.paths[name], languages), corpus, files.paths[name], gain)
    if context.check:
        try:
            check_split(split, split_name)
        except UserError as error:
            raise UserError(f"{folder}, {split_name}: {error}") from None
    return split


def _without_empty_columns(rows: Dataset) -> Dataset:
    """Drops the columns without any value. An encoder reads the first known column, which must not be empty."""
    return rows.remove_columns([name for name in rows.column_names if rows.data.column(name).null_count == len(rows)])


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
