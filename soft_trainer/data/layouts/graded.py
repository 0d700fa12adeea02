"""Makes splits from graded judgments, and parses the entries of judgment files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import Dataset

from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.files import read_json
from soft_trainer.terminal import print_on_main

Judgment = tuple[tuple, str, float]  # query (language, text and, if texts repeat, an index), url, relevance


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


def graded_split(
    judgments: Iterable[Judgment], corpus: Dataset, path: Path, gain: str = "linear", queries: Iterable[tuple] = ()
) -> Split:
    """Makes a split from (query, url, grade) judgments. Averages the grades if a pair has several.

    Judgments about functions outside the corpus are ignored. Queries without a relevant function in the corpus are
    skipped.

    Args:
        path: the file that the judgments come from, for messages.
        gain: how nDCG uses grades; see `Judgments`.
        queries: the queries to put first, in this order.

    Raises:
        UserError: no query has a relevant function in the corpus.
    """
    grades: dict[tuple, dict[str, list[float]]] = {query: {} for query in queries}
    for query, url, grade in judgments:
        grades.setdefault(query, {}).setdefault(url, []).append(grade)
    row_of = {url: row for row, url in enumerate(corpus["url"])}
    rows = []
    pairs = []
    means = []
    absent = 0
    for (language, text, *_), codes in grades.items():
        mean_of = {row_of[url]: sum(values) / len(values) for url, values in codes.items() if url in row_of}
        absent += len(codes) - len(mean_of)
        if any(mean > 0 for mean in mean_of.values()):
            pairs += [(len(rows), code) for code in mean_of]
            means += mean_of.values()
            rows.append(query_row(text, language))
    if not rows:
        raise UserError(
            f"{path}: none of {len(grades):,} queries has a relevant function in the corpus of {len(corpus):,}. "
            "Judgments must use the corpus's urls. In annotationStore.csv, they must be in the run's language"
        )
    if absent or len(rows) < len(grades):
        without = len(grades) - len(rows)
        print_on_main(
            f"{path.name}: ignored {absent:,} judged functions that are not in the corpus, and skipped {without:,} of "
            f"{len(grades):,} queries that have no relevant function there"
        )
    return Split.from_grades(Dataset.from_list(rows), corpus, np.array(pairs), means, gain)


def entries_of(path: Path, kind: type):
    """Reads a JSON file. Raises UserError unless the file contains a non-empty `kind`, which is `list` or `dict`."""
    content = read_json(path, kind)
    if not content:
        raise UserError(f"{path}: no rows")
    return content


def parsed_list(path: Path, read: Callable) -> list:
    """Applies `read` to each entry of a JSON list in a file. Raises UserError with the number of an invalid entry."""
    entries = enumerate(entries_of(path, list), 1)
    return parsed(((f"{path}, entry {number}", entry) for number, entry in entries), read)


def parsed(entries: Iterable[tuple[object, object]], read: Callable) -> list:
    """Applies `read` to each (location, entry). Raises UserError with the location of an invalid entry."""
    rows = []
    for location, entry in entries:
        try:
            rows.append(read(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                reason = error
            else:
                reason = f"not in the published format: {error!r}"
            raise UserError(f"{location}: {reason}") from None
    return rows


def query_row(query: str, language: str | None) -> dict:
    """Makes a query's row with CodeSearchNet's columns. Raises UserError if the text is blank."""
    if not query.strip():
        raise UserError("the query is blank")
    return {"docstring": query, "docstring_tokens": query.split(), "language": language}
