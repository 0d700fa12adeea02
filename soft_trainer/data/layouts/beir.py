"""Reads BEIR folders: `corpus.jsonl`, `queries.jsonl` and `qrels/{train,dev,test}.tsv`, each plain or gzipped."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import Dataset

from soft_trainer.data.column_names import OWN_ID
from soft_trainer.data.folders import SPLIT_NAMES, SPLITS, Files
from soft_trainer.data.make_splits import Context
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.system.files import open_text, read_json_lines
from soft_trainer.system.terminal import print_on_main

TEXT_FILES = ("corpus.jsonl", "queries.jsonl")


def finds(files: Files) -> bool:
    """Returns True if a folder has BEIR's layout: a corpus, queries and at least one file in `qrels`."""
    return {*TEXT_FILES} <= files.paths.keys() and bool(files.of_splits(_split_of))


def read(files: Files, context: Context) -> dict[str, Split]:
    """Reads train, valid and test from a BEIR folder. A split without judgments is skipped.

    A function's title, if any, is put before its text. A split contains the queries that have at least one relevant
    function. Valid and test use the whole corpus, but a document with a query's own id is not ranked for this query.
    The corpus of train has only the functions in train's judgments, so that relevant functions from other splits never
    become negatives.

    Raises:
        UserError: a file cannot be read. The message gives the file and the line.
    """
    corpus_file, query_file = map(files.paths.get, TEXT_FILES)
    corpus_ids, corpus = _rows(corpus_file, "code")
    query_ids, queries = _rows(query_file, "docstring")
    corpus = corpus.add_column("url", corpus_ids)
    queries = queries.add_column(OWN_ID, query_ids)
    splits = {}
    for split, (path, *_) in sorted(files.of_splits(_split_of).items(), key=lambda item: SPLITS.index(item[0])):
        grades = _grades(path, query_ids, corpus_ids)
        splits[split] = split_of_grades(queries, corpus, grades, path, judged_codes=split == "train")
    return splits


def _split_of(name: str) -> str | None:
    """Returns the split of a file of judgments, such as "valid" for `qrels/dev.tsv`, or None for other files."""
    folder, _, base = name.removesuffix(".tsv").rpartition("/")
    return SPLIT_NAMES.get(base) if folder and name.endswith(".tsv") else None


def _rows(path: Path, column: str) -> tuple[list[str], Dataset]:
    """Reads `corpus.jsonl` or `queries.jsonl`.

    Returns:
        The ids, and rows with the text in `column`, its tokens and, if any row has a language, the language.
    """
    rows = {}
    for location, row in read_json_lines(path):
        name = row.get("_id")
        text = row.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise UserError(f"{location}: expected BEIR's columns _id and text, both strings")
        if name in rows:
            raise UserError(f"{location}: repeats the _id {name!r}")
        whole = f"{row.get('title') or ''} {text}".strip()
        if not whole:
            raise UserError(f"{location}: the text is blank")
        rows[name] = {column: whole, f"{column}_tokens": whole.split(), "language": row.get("language")}
    if not rows:
        raise UserError(f"{path}: no rows")
    table = Dataset.from_list(list(rows.values()))
    if not any(row["language"] for row in rows.values()):
        table = table.remove_columns("language")
    return list(rows), table


def _grades(path: Path, query_ids: list[str], code_ids: list[str]) -> pd.DataFrame:
    """Reads a judgment file as a table with the columns `query` and `code`, both row indices, and `grade`.

    If several lines judge the same pair, the last line counts. Queries without a text and relevant documents that the
    corpus lacks are skipped, because they cannot be asked or found, and counted in a line.
    """
    query_rows = {name: row for row, name in enumerate(query_ids)}
    code_rows = {name: row for row, name in enumerate(code_ids)}
    grades = {}
    absent: dict[str, None] = {}
    asked = set()
    answered = set()
    with open_text(path, newline="") as file:
        for number, values in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
            location = f"{path}, line {number}"
            if not values or (number == 1 and values[-1] == "score"):
                continue
            if len(values) != 3:
                raise UserError(f"{location}: expected query-id, corpus-id and score, separated by tabs")
            query, code, text = values
            try:
                score = float(text)
            except ValueError:
                score = math.nan
            if not math.isfinite(score):
                raise UserError(f"{location}: the score {text!r} is not a number")
            if query not in query_rows:
                absent[f"query {query!r}"] = None
                continue
            if score > 0:
                asked.add(query)
            if code in code_rows:
                grades[query_rows[query], code_rows[code]] = score
                if score > 0:
                    answered.add(query)
            elif score > 0:
                absent[f"document {code!r}"] = None
    if lost := len(asked) - len(answered):
        use = "trained on" if path.name.startswith("train") else "measured"
        reason = "none of their relevant documents is in the corpus"
        print_on_main(f"{path}: {lost:,} of {len(asked):,} queries are not {use}: {reason}")
    if absent:
        print_on_main(f"{path}: ignored {len(absent):,} judged ids that have no text, such as {next(iter(absent))}")
    pairs = pd.DataFrame(grades.keys(), columns=["query", "code"])
    return pairs.assign(grade=list(grades.values()))


def split_of_grades(queries: Dataset, corpus: Dataset, grades: pd.DataFrame, path: Path, judged_codes: bool) -> Split:
    """Makes a split from graded pairs of row indices. Skips queries without a relevant function (a grade above 0).

    Args:
        grades: a table with the columns `query` and `code`, both row indices, and `grade`.
        path: the file that the grades come from, for messages.
        judged_codes: whether the corpus keeps only functions that occur in `grades`.

    Raises:
        UserError: no query has a relevant function.
    """
    answered = np.unique(grades["query"][grades["grade"] > 0])
    if not len(answered):
        raise UserError(f"{path}: no query has a relevant function (a score above 0)")
    asked = grades["query"].nunique()
    if len(answered) < asked:
        print_on_main(f"{path}: {asked - len(answered):,} of {asked:,} queries have no relevant function")
    codes = np.arange(len(corpus))
    if judged_codes:
        codes = np.unique(grades["code"])
        corpus = corpus.select(codes)
    kept = grades[grades["query"].isin(answered)]
    locations = [np.searchsorted(answered, kept["query"]), np.searchsorted(codes, kept["code"])]
    return Split.from_grades(queries.select(answered), corpus, np.stack(locations, axis=1), kept["grade"])
