"""Reads lists of graded pairs: the annotations of the CodeSearchNet challenge, and relevance.jsonl."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset

from soft_trainer.data.judgments import Split
from soft_trainer.errors import UserError
from soft_trainer.files import UNREADABLE, open_text, read_json, read_json_lines
from soft_trainer.source.languages import CODESEARCHNET_LANGUAGES
from soft_trainer.terminal import print_on_main

MAX_RELEVANCE = 1000  # beyond it, nDCG's gain of 2^relevance would overflow
Judgment = tuple[tuple, str, float]  # query (language, text and, if texts repeat, an index), url, relevance


def read_annotations(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads the CodeSearchNet challenge's judgments in some languages. Queries are lower-cased, as published."""

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
    except (*UNREADABLE, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV in UTF-8: {error}") from error
    return list(filter(None, parsed(((f"{path}, row {number}", row) for number, row in rows), read)))


def read_relevance(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads the lines of relevance.jsonl."""
    lines = read_json_lines(path)
    language = None
    if languages:
        language = languages[0]
    return parsed(lines, lambda row: _judgment(language, row["query"], row["url"], row["relevance"]))


def _judgment(language: str | None, query: str, url: str, relevance) -> Judgment:
    grade = float(relevance)
    if not query.strip() or not url.strip():
        raise UserError(f"query {query!r} or url {url!r} is blank")
    if not 0 <= grade <= MAX_RELEVANCE:
        raise UserError(f"relevance is {relevance!r}, a number from 0 to {MAX_RELEVANCE} is expected")
    return (language, " ".join(query.split())), url.strip(), grade


def graded_split(
    judgments: Iterable[Judgment], corpus: Dataset, path: Path, gain: str = "linear", queries: Iterable[tuple] = ()
) -> Split:
    """Makes a split from those queries that have a relevant code in the corpus, in the order of `queries`."""
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
            f"{path}: none of {len(grades):,} queries has a relevant code in the corpus of {len(corpus):,}; judgments "
            "must name codes as the corpus does, and only rows in --language are read from annotationStore.csv"
        )
    if absent or len(rows) < len(grades):
        without = len(grades) - len(rows)
        print_on_main(
            f"{path.name}: {absent:,} judged codes are not in the corpus and are ignored; {without:,} of "
            f"{len(grades):,} queries have no relevant code there and are left out"
        )
    return Split.from_grades(Dataset.from_list(rows), corpus, np.array(pairs), means, gain)


# ---- Files and rows ----


def entries_of(path: Path, kind: type):
    """Reads a JSON file. Raises UserError unless it contains a non-empty `kind`, which is `list` or `dict`."""
    content = read_json(path, kind)
    if not content:
        raise UserError(f"{path}: no rows")
    return content


def parsed_list(path: Path, read: Callable) -> list:
    entries = enumerate(entries_of(path, list), 1)
    return parsed(((f"{path}, entry {number}", entry) for number, entry in entries), read)


def parsed(entries: Iterable[tuple[object, object]], read: Callable) -> list:
    """Parses all entries. Raises UserError with the location of an entry that cannot be parsed."""
    rows = []
    for place, entry in entries:
        try:
            rows.append(read(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                reason = error
            else:
                reason = f"not as published: {error!r}"
            raise UserError(f"{place}: {reason}") from None
    return rows


def query_row(query: str, language: str | None) -> dict:
    return {"docstring": query, "docstring_tokens": query.split(), "language": language}
