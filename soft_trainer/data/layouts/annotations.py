"""Reads graded relevance judgments from `annotationStore.csv` (CodeSearchNet's challenge) or `relevance.jsonl`."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from soft_trainer.data.layouts.graded import Judgment, parsed
from soft_trainer.errors import UserError
from soft_trainer.files import open_text, read_json_lines
from soft_trainer.source.languages import CODESEARCHNET_LANGUAGES

MAX_RELEVANCE = 1000  # above, nDCG's gain of 2^relevance would overflow


def read_annotations(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads the CodeSearchNet challenge's judgments in `languages`. Lower-cases the queries, as published."""
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


def read_relevance(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads judgments from `relevance.jsonl`, where each line has `query`, `url` and `relevance`."""
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
        raise UserError(f"relevance is {relevance!r}, expected a number from 0 to {MAX_RELEVANCE}")
    return (language, " ".join(query.split())), url.strip(), grade
