"""Further evaluation sets of a run: human queries as published, or rows of another project.

A folder of `--eval_data_dir` holds one or more of

    cosqa-retrieval-dev*.json, cosqa-retrieval-test*.json   CoSQA: a JSON list whose `doc` is the query and whose
                                                            `retrieval_idx` is the code's number in code_idx_map.txt
    annotationStore.csv                                     CodeSearchNet's challenge: Language, Query, GitHubUrl,
                                                            Relevance from 0 to 3; rows of `--language` are read
    relevance.jsonl                                         any other human queries: one {"query": text, "url": id,
                                                            "relevance": number from 0 on} a line
    test.jsonl                                              rows in CodeSearchNet's columns, as in `--data_dir`

each also gzipped. The pool is `code_idx_map` (.txt or .json) for CoSQA, else the folder's codebase.jsonl; judged
queries take the codebase of the run itself where there is none. A code that nobody judged has relevance 0, several
judgments of one query and code are averaged.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict

from soft_trainer.arguments import DataArguments
from soft_trainer.data.codesearchnet import SPLITS, check_rows, load_folder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.terminal import print_on_main

COSQA_QUERIES = r"cosqa-retrieval-(dev|test)\b.*\.json(\.gz)?"
COSQA_CODES = r"code_idx_map\.(txt|json)(\.gz)?"


@dataclass(frozen=True)
class EvaluationSet:
    """Queries, and the pool in which they look for their codes.

    Args:
        name: what its results are called.
        queries: rows with `url` and a query. With graded relevance a row for every query and relevant code, those of
            a query together, with `query_number` (from 0) and `relevance` (above 0).
        codebase: rows with `url` and a code.
    """

    name: str
    queries: Dataset
    codebase: Dataset

    @property
    def graded(self) -> bool:
        """Whether codes have grades, and queries several codes."""
        return "relevance" in self.queries.column_names

    @property
    def first_pairs(self) -> np.ndarray:
        """With graded relevance the row of each query's most relevant code, int64[Q]."""
        return np.unique(self.queries["query_number"], return_index=True)[1]


def load_evaluation_sets(
    arguments: DataArguments, profile: EncoderProfile, codebase: Dataset | None = None
) -> list[EvaluationSet]:
    """The sets of `--eval_data_dir`, named after their folders; FOLDER-dev, FOLDER-test, ... where one holds several.

    Args:
        codebase: of the run, the pool of judged queries whose folder has none.

    Raises:
        UserError: a folder without any set, files that cannot be read (names file and row), rows that would not
            work (see `check_rows`), or two sets of one name.
    """
    sets: list[EvaluationSet] = []
    taken = {*SPLITS, *(f"{split}-{language}" for split in SPLITS for language in arguments.languages)}
    for folder in (Path(name.strip()) for name in (arguments.eval_data_dir or "").split(",") if name.strip()):
        found = dict(_sets_of(folder, arguments.languages, codebase))
        if not found:
            raise UserError(_nothing_in(folder))
        for part, (queries, pool) in found.items():
            name = folder.resolve().name + (f"-{part}" if len(found) > 1 else "")
            if name in taken:
                raise UserError(f"eval_data_dir={folder}: there are other results called {name}; rename the folder")
            try:
                check_rows(DatasetDict(test=queries, codebase=pool), profile)
            except UserError as error:
                raise UserError(f"{folder}, {part}: {error}") from None
            taken.add(name)
            sets.append(EvaluationSet(name, queries, pool))
            count = queries[-1]["query_number"] + 1 if sets[-1].graded else len(queries)
            print_on_main(f"{name}: {count:,} queries ({part}) over {len(pool):,} codes")
    return sets


def _sets_of(
    folder: Path, languages: Sequence[str], codebase: Dataset | None
) -> Iterator[tuple[str, tuple[Dataset, Dataset]]]:
    """The sets of a folder: a name for each, its queries and its corpus."""
    if not folder.is_dir():
        raise UserError(f"eval_data_dir={folder}: no such folder")
    if _files(folder, COSQA_QUERIES) or _files(folder, COSQA_CODES):
        yield from _cosqa(folder)
    for part, pattern, read in (
        ("annotations", r"annotationStore\.csv(\.gz)?", _annotations),
        ("relevance", r"relevance\.jsonl(\.gz)?", _judgments),
    ):
        for path in _files(folder, pattern)[:1]:
            own = load_folder(folder, ("codebase",))["codebase"] if _files(folder, r"codebase\.jsonl(\.gz)?") else None
            pool = codebase if own is None else own
            if pool is None:
                raise UserError(f"{folder}: {path.name} has no pool: neither the folder nor the run has a codebase")
            yield part, (_judged_queries(read(path, languages), pool, path), pool)
    if _files(folder, r"test\.jsonl(\.gz)?"):
        own = load_folder(folder, ("test", "codebase"))
        yield "test", (own["test"], own["codebase"])


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))


def _nothing_in(folder: Path) -> str:
    held = sorted(path.name for path in folder.iterdir())
    return (
        f"eval_data_dir={folder}: no evaluation set; looked for CoSQA's cosqa-retrieval-dev*.json or -test*.json with "
        "code_idx_map.txt, for annotationStore.csv, relevance.jsonl, or test.jsonl with codebase.jsonl, each also "
        f"as .gz; it holds {', '.join(held[:8]) or 'nothing'}{' ...' if len(held) > 8 else ''}"
    )


# ---- CoSQA ----


def _cosqa(folder: Path) -> Iterator[tuple[str, tuple[Dataset, Dataset]]]:
    """Its dev and test queries; tokens are the words between blanks, as the published scripts have it."""
    queries, codes = _files(folder, COSQA_QUERIES), _files(folder, COSQA_CODES)
    if not (queries and codes):
        missing = "code_idx_map.txt (or .json)" if queries else "cosqa-retrieval-dev*.json or -test*.json"
        raise UserError(f"{folder}: CoSQA needs {missing} as well, plain or as .gz")
    numbers = _read_json(codes[0], dict)
    wrong = next((number for number in numbers.values() if not isinstance(number, int)), None)
    if wrong is not None:
        raise UserError(f"{codes[0]}: code text -> number is expected, not {wrong!r}")
    pool = Dataset.from_list([_code_row(code, number) for code, number in numbers.items()])
    known = set(numbers.values())
    for path in queries:
        rows = enumerate(_read_json(path, list), 1)
        found = [_cosqa_query(row, known, f"{path}, entry {number}", codes[0].name) for number, row in rows]
        if not found:
            raise UserError(f"{path}: no queries")
        yield re.fullmatch(COSQA_QUERIES, path.name)[1], (Dataset.from_list(found), pool)


def _code_row(code: str, number: int) -> dict:
    return {
        "code": code,
        "code_tokens": code.split(),
        "original_string": code,
        "language": "python",
        "url": str(number),
    }


def _cosqa_query(row, known: set[int], place: str, codes: str) -> dict:
    if not isinstance(row, dict) or not isinstance(row.get("doc"), str):
        raise UserError(f"{place}: an object with the query as text in `doc` is expected")
    if row.get("retrieval_idx") not in known:
        raise UserError(f"{place}: retrieval_idx={row.get('retrieval_idx')} is no code of {codes}")
    return _query_row(row["doc"], str(row["retrieval_idx"]), "python")


def _query_row(query: str, url: str, language: str) -> dict:
    return {"docstring": query, "docstring_tokens": query.split(), "language": language, "url": url}


def _read_json(path: Path, kind: type):
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, kind):
        names = {list: "a list", dict: "an object"}
        raise UserError(f"{path}: {names[kind]} is expected, not {type(value).__name__}")
    return value


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as text in UTF-8: {error}") from None


# ---- Judged queries ----

Judgment = tuple[str, str, str, float]  # language, query, url, relevance


def _annotations(path: Path, languages: Sequence[str]) -> Iterator[Judgment]:
    """CodeSearchNet's challenge, the rows of these languages; queries in lower case, as published."""
    rows = csv.DictReader(io.StringIO(_text(path), newline=""))
    missing = [name for name in ("Language", "Query", "GitHubUrl", "Relevance") if name not in (rows.fieldnames or ())]
    if missing:
        raise UserError(f"{path}: no column {', '.join(missing)}; the first line should name the columns")
    for row in rows:
        if (language := (row["Language"] or "").strip().lower()) in languages:
            place = f"{path}, line {rows.line_num}"
            yield language, *_judgment((row["Query"] or "").lower(), row["GitHubUrl"], row["Relevance"], place)


def _judgments(path: Path, languages: Sequence[str]) -> Iterator[Judgment]:
    """The lines of relevance.jsonl."""
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
                yield languages[0], *_judgment(row["query"], row["url"], row["relevance"], f"{path}, line {number}")
            except (json.JSONDecodeError, TypeError, KeyError):
                message = 'a JSON object with "query", "url" and "relevance" is expected'
                raise UserError(f"{path}, line {number}: {message}") from None


def _judgment(query, url, relevance, place: str) -> tuple[str, str, float]:
    try:
        grade = float(relevance)
    except (TypeError, ValueError):
        grade = math.nan
    if not (grade >= 0 and math.isfinite(grade)):
        raise UserError(f"{place}: relevance is {relevance!r}, a number from 0 on is expected")
    for name, value in (("query", query), ("url", url)):
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{place}: {name} is {value!r}, a text is expected")
    return " ".join(query.split()), url.strip(), grade


def _judged_queries(judgments: Iterable[Judgment], pool: Dataset, path: Path) -> Dataset:
    """A row for every query and relevant code of the pool, the most relevant code of a query first."""
    grades: dict[tuple[str, str], dict[str, list[float]]] = {}
    for language, query, url, grade in judgments:
        grades.setdefault((language, query), {}).setdefault(url, []).append(grade)
    held, rows, absent, number = set(pool["url"]), [], 0, 0
    for (language, query), codes in grades.items():
        means = {url: sum(values) / len(values) for url, values in codes.items()}
        absent += len(means.keys() - held)
        relevant = [(url, mean) for url, mean in means.items() if mean > 0 and url in held]
        for url, mean in sorted(relevant, key=lambda pair: -pair[1]):
            rows.append(_query_row(query, url, language) | {"query_number": number, "relevance": mean})
        number += bool(relevant)
    if not rows:
        raise UserError(
            f"{path}: none of {len(grades):,} queries has a relevant code in the pool of {len(pool):,}; urls must be "
            "those of the codebase, and of annotationStore.csv only rows of --language are read"
        )
    if absent or number < len(grades):
        print_on_main(
            f"{path.name}: {absent:,} judged codes are not in the pool and do not count; {len(grades) - number:,} of "
            f"{len(grades):,} queries have no relevant code there and are left out"
        )
    return Dataset.from_list(rows)
