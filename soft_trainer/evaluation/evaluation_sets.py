"""Additional evaluation sets of a run: published human queries, or rows of another project.

`--eval_data_dir` names any rows that `load_rows` reads, all of which are measured, or folders with one or more of

    cosqa-retrieval-dev*.json, cosqa-retrieval-test*.json   CoSQA: a JSON list whose `doc` is the query and whose
                                                            `retrieval_idx` is the code's number in code_idx_map.txt
    test_agent_query.json, test_agent_codebase.json,        CoSQA+, a query has several right codes: lists of
    test_agent_pairs_true.json                              {"query-idx", "query"}, {"code-idx", "code"} and
                                                            {"query-idx", "code-idx", "label"}
    annotationStore.csv                                     CodeSearchNet's challenge: Language, Query, GitHubUrl,
                                                            Relevance from 0 to 3; rows of `--language` are read
    relevance.jsonl                                         any other human queries: one {"query": text, "url": id,
                                                            "relevance": number of 0 or more} a line
    test.jsonl                                              rows in CodeSearchNet's columns, as in `--data_dir`

each also gzipped. The corpus of CoSQA is `code_idx_map` (.txt or .json), that of CoSQA+ its own file, that of other
sets the folder's codebase.jsonl. Judged queries without such a file are ranked against the run's own corpus. A code
that nobody judged has relevance 0. Several judgments of the same query and code are averaged.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict

from soft_trainer.data.any_rows import load_rows
from soft_trainer.data.codesearchnet import SPLITS, check_rows, drop_unusable_rows, load_folder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.evaluation.cosqa import cosqa_plus_set, cosqa_sets, is_cosqa, is_cosqa_plus
from soft_trainer.evaluation.published_files import matching_files, query_row, read_text
from soft_trainer.files import read_json_lines
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import print_on_main


@dataclass(frozen=True)
class EvaluationSet:
    """Queries and the corpus that holds their codes.

    Args:
        name: the name of its results.
        queries: rows with `url` and a query. With graded relevance there is a row for every query and relevant code,
            with `query_number` (from 0) and `relevance` (above 0). The rows of a query are adjacent.
        codebase: the corpus, rows with `url` and a code.
    """

    name: str
    queries: Dataset
    codebase: Dataset

    @property
    def graded(self) -> bool:
        """True if codes have grades. A query may then have several codes."""
        return "relevance" in self.queries.column_names

    @property
    def first_pairs(self) -> np.ndarray:
        """The row of each query's most relevant code, int64[Q]. Graded sets only."""
        return np.unique(self.queries["query_number"], return_index=True)[1]


def load_evaluation_sets(
    arguments: DataArguments,
    profile: EncoderProfile,
    codebase: Dataset | None = None,
    option: str = "eval_data_dir",
    names: Iterable[str] = (),
) -> list[EvaluationSet]:
    """Loads the sets of `--eval_data_dir`, or of another option that takes such folders.

    A set has the name of its folder. Several sets in one folder are called FOLDER-dev, FOLDER-test, ...

    Args:
        codebase: the run's own corpus, for judged queries whose folder has none.
        names: names that are already taken by other sets.

    Raises:
        UserError: a folder without any set, a file that cannot be read (names file and row), rows that cannot be
            used (see `check_rows`), or two sets with the same name.
    """
    sets: list[EvaluationSet] = []
    taken = {*names, *SPLITS, *(f"{split}-{language}" for split in SPLITS for language in arguments.languages)}
    for folder in (Path(name.strip()) for name in (getattr(arguments, option) or "").split(",") if name.strip()):
        parts = dict(_sets_of(folder, arguments.languages, codebase)) if folder.is_dir() else {}
        if not parts:
            parts = {"rows": _all_rows(folder, arguments, option, profile)}
        for part, (queries, corpus) in parts.items():
            name = folder.resolve().name + (f"-{part}" if len(parts) > 1 else "")
            if name in taken:
                raise UserError(f"{option}={folder}: there are other results called {name}; rename the folder")
            try:
                check_rows(DatasetDict(test=queries, codebase=corpus), profile)
            except UserError as error:
                raise UserError(f"{folder}, {part}: {error}") from None
            taken.add(name)
            sets.append(EvaluationSet(name, queries, corpus))
            count = queries[-1]["query_number"] + 1 if sets[-1].graded else len(queries)
            print_on_main(f"{name}: {count:,} queries ({part}) over {len(corpus):,} codes")
    return sets


def _sets_of(
    folder: Path, languages: Sequence[str], codebase: Dataset | None
) -> Iterator[tuple[str, tuple[Dataset, Dataset]]]:
    """Yields the sets of a folder: the name, queries and corpus of each."""
    if is_cosqa(folder):
        yield from cosqa_sets(folder)
    if is_cosqa_plus(folder):
        yield "several", cosqa_plus_set(folder)
    for part, pattern, read in (
        ("annotations", r"annotationStore\.csv(\.gz)?", _annotations),
        ("relevance", r"relevance\.jsonl(\.gz)?", _judgments),
    ):
        for path in matching_files(folder, pattern)[:1]:
            has_corpus = matching_files(folder, r"codebase\.jsonl(\.gz)?")
            corpus = load_folder(folder, ("codebase",))["codebase"] if has_corpus else codebase
            if corpus is None:
                raise UserError(f"{folder}: {path.name} has no corpus: neither the folder nor the run has a codebase")
            yield part, (_judged_queries(read(path, languages), corpus, path), corpus)
    if matching_files(folder, r"test\.jsonl(\.gz)?"):
        splits = load_folder(folder, ("test", "codebase"))
        yield "test", (splits["test"], splits["codebase"])


def _all_rows(source: Path, arguments: DataArguments, option: str, profile: EncoderProfile) -> tuple[Dataset, Dataset]:
    """Loads all rows of a file, a folder or a data set, as queries over their own codes.

    Raises:
        UserError: there is neither a known set nor rows with a query and its code.
    """
    try:
        data = load_rows(source, arguments.query_column, arguments.code_column, split=False)
        if arguments.drop_unusable:
            data = drop_unusable_rows(data, profile)
    except UserError as error:
        raise UserError(f"{option}={error}" + (f"; {_no_sets(source)}" if source.is_dir() else "")) from None
    return data["test"], data["codebase"]


def _no_sets(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return (
        "no evaluation set; looked for CoSQA's cosqa-retrieval-dev*.json or -test*.json with "
        "code_idx_map.txt, CoSQA+'s test_agent_query.json, annotationStore.csv, relevance.jsonl, or test.jsonl with "
        f"codebase.jsonl, each also as .gz; it holds {', '.join(names[:8]) or 'nothing'}"
        f"{' ...' if len(names) > 8 else ''}"
    )


# ---- Judged queries ----

Judgment = tuple[str, str, str, float]  # language, query, url, relevance


def _annotations(path: Path, languages: Sequence[str]) -> Iterator[Judgment]:
    """Yields the rows of these languages from CodeSearchNet's challenge, with queries in lower case, as published."""
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""))
    missing = [name for name in ("Language", "Query", "GitHubUrl", "Relevance") if name not in (rows.fieldnames or ())]
    if missing:
        raise UserError(f"{path}: no column {', '.join(missing)}; the first line should name the columns")
    for row in rows:
        if (language := (row["Language"] or "").strip().lower()) in languages:
            place = f"{path}, line {rows.line_num}"
            yield language, *_judgment((row["Query"] or "").lower(), row["GitHubUrl"], row["Relevance"], place)


def _judgments(path: Path, languages: Sequence[str]) -> Iterator[Judgment]:
    """Yields the lines of relevance.jsonl."""
    for place, row in read_json_lines(path):
        if missing := [name for name in ("query", "url", "relevance") if name not in row]:
            raise UserError(f'{place}: a JSON object with "query", "url" and "relevance" is expected; no {missing[0]}')
        yield languages[0], *_judgment(row["query"], row["url"], row["relevance"], place)


def _judgment(query, url, relevance, place: str) -> tuple[str, str, float]:
    try:
        grade = float(relevance)
    except (TypeError, ValueError):
        grade = math.nan
    if not (grade >= 0 and math.isfinite(grade)):
        raise UserError(f"{place}: relevance is {relevance!r}, a number of 0 or more is expected")
    for name, value in (("query", query), ("url", url)):
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{place}: {name} is {value!r}, a text is expected")
    return " ".join(query.split()), url.strip(), grade


def _judged_queries(judgments: Iterable[Judgment], corpus: Dataset, path: Path) -> Dataset:
    """Makes a row for every query and relevant code in the corpus, the most relevant code of a query first."""
    grades: dict[tuple[str, str], dict[str, list[float]]] = {}
    for language, query, url, grade in judgments:
        grades.setdefault((language, query), {}).setdefault(url, []).append(grade)
    known, rows, absent, number = set(corpus["url"]), [], 0, 0
    for (language, query), codes in grades.items():
        means = {url: sum(values) / len(values) for url, values in codes.items()}
        absent += len(means.keys() - known)
        relevant = [(url, mean) for url, mean in means.items() if mean > 0 and url in known]
        for url, mean in sorted(relevant, key=lambda pair: -pair[1]):
            rows.append(query_row(query, url, language) | {"query_number": number, "relevance": mean})
        number += bool(relevant)
    if not rows:
        raise UserError(
            f"{path}: none of {len(grades):,} queries has a relevant code in the corpus of {len(corpus):,}; the urls "
            "must be those of the codebase, and only rows of --language are read from annotationStore.csv"
        )
    if absent or number < len(grades):
        print_on_main(
            f"{path.name}: {absent:,} judged codes are not in the corpus and do not count; {len(grades) - number:,} "
            f"of {len(grades):,} queries have no relevant code there and are left out"
        )
    return Dataset.from_list(rows)
