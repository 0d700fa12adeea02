"""Reads queries that are judged against a corpus of rows, from `relevance.jsonl`.

Each line is `{"query": text, "url": id, "relevance": number from 0 up}`. `examples/published_sets.py` converts CoSQA,
CoSQA+ and CodeSearchNet's challenge to this layout.
"""

from __future__ import annotations

import math

import pandas as pd
from datasets import Dataset

from soft_trainer.data.column_names import CODES
from soft_trainer.data.columns import check_texts, without_empty
from soft_trainer.data.folders import JUDGMENTS, Files
from soft_trainer.data.languages import languages_in
from soft_trainer.data.layouts.beir import split_of_grades
from soft_trainer.data.layouts.tables import row_files, table_of_files
from soft_trainer.data.make_splits import Context
from soft_trainer.data.row_checks import check_split
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.system.files import read_json_lines
from soft_trainer.system.terminal import print_on_main

NAME = "relevance"


def finds(files: Files) -> bool:
    """Returns True if a folder has judgments."""
    return JUDGMENTS in files.paths


def read(files: Files, context: Context) -> dict[str, Split]:
    """Reads the judged queries. Their corpus is the folder's codebase, otherwise the run's.

    If a pair has several grades, their mean counts. Judgments about functions outside the corpus are ignored, and
    queries without a relevant function in the corpus are skipped.

    Raises:
        UserError: there is no corpus, or it has no urls or texts, or a judgment cannot be read.
    """
    folder = files.source
    path = files.paths[JUDGMENTS]
    corpus = context.codebase
    if corpus is None:
        paths = row_files(files).get("codebase")
        corpus = without_empty(table_of_files(paths)) if paths else context.run_corpus
    if corpus is None:
        raise UserError(f"{folder}: no corpus for {JUDGMENTS}; neither the folder nor the run has a codebase")
    if "url" not in corpus.column_names:
        raise UserError(f"{folder}: {JUDGMENTS} refers to functions by url, but the codebase has no urls")
    check_texts(corpus, CODES, f"{folder}, codebase")
    judgments = pd.DataFrame([_judgment(*line) for line in read_json_lines(path)], columns=["text", "url", "grade"])
    row_of = {url: row for row, url in enumerate(corpus["url"])}
    judgments["code"] = judgments["url"].map(row_of)
    judgments["query"], texts = pd.factorize(judgments["text"])
    known = judgments.dropna(subset="code").astype({"code": int})
    if absent := len(judgments) - len(known):
        print_on_main(f"{path.name}: ignored {absent:,} judged functions that are not in the corpus")
    language = next(iter(context.languages or languages_in({"codebase": corpus})), None)
    rows = [{"docstring": text, "docstring_tokens": text.split(), "language": language} for text in texts]
    grades = known.groupby(["query", "code"], sort=False)["grade"].mean().reset_index()
    split = split_of_grades(Dataset.from_list(rows), corpus, grades, path, judged_codes=False)
    if context.check:
        try:
            check_split(split, NAME)
        except UserError as error:
            raise UserError(f"{folder}, {NAME}: {error}") from None
    return {NAME: split}


def _judgment(location: str, row: dict) -> tuple[str, str, float]:
    """Returns the query, the url and the grade on a line. Raises UserError if one of them is missing or wrong."""
    query, url, grade = (row.get(name) for name in ("query", "url", "relevance"))
    if not (isinstance(query, str) and query.strip() and isinstance(url, str) and url.strip()):
        raise UserError(f"{location}: expected a query and a url that are not blank, not {query!r} and {url!r}")
    if not (isinstance(grade, int | float) and 0 <= grade < math.inf):
        raise UserError(f"{location}: relevance is {grade!r}, expected a number of 0 or more")
    return " ".join(query.split()), url.strip(), float(grade)
