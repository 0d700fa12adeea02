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
                                                            "relevance": number from 0 to 1000} a line
    corpus.jsonl, queries.jsonl, qrels/dev.tsv, test.tsv    BEIR's layout
    test.jsonl                                              rows in CodeSearchNet's columns, as in `--data_dir`

each also gzipped. CoSQA+ has also been published as `query.json`, `gpt4o_augment_codebase.json` and
`gpt4o_augment_query_code_pairs_for_search.json`. Its files of pairs without `_true` and `_for_search` hold the pairs
that are wrong, too (label 0). The corpus of CoSQA is `code_idx_map` (.txt or .json), that of CoSQA+ its own file, that
of other sets the folder's codebase.jsonl. Without such a file, test.jsonl is ranked against the codes of valid and
test, and judged queries against the run's own corpus.
A code that nobody judged has relevance 0. Several judgments of the same query and code are averaged. The gain in nDCG
is the relevance, as trec_eval and mteb have it, but 2^relevance - 1 for CodeSearchNet's annotations, as its challenge
has it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset

from soft_trainer.data.any_rows import is_codesearchnet, load_rows
from soft_trainer.data.beir import is_beir, load_beir
from soft_trainer.data.codesearchnet import (
    SPLITS,
    check_targets,
    check_texts,
    drop_unusable_rows,
    languages_in,
    load_folder,
)
from soft_trainer.data.judgments import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.files import UNREADABLE, open_text, read_json, read_json_lines
from soft_trainer.options.fields import LANGUAGES, DataArguments
from soft_trainer.terminal import print_on_main

# Queries, codes and pairs of CoSQA+. Of a set's two files of pairs the first is smaller.
_PLUS = (
    ("test_agent_query.json", "test_agent_codebase.json", "test_agent_pairs_true.json"),
    ("test_agent_query.json", "test_agent_codebase.json", "test_agent_pairs.json"),
    ("query.json", "gpt4o_augment_codebase.json", "gpt4o_augment_query_code_pairs_for_search.json"),
    ("query.json", "gpt4o_augment_codebase.json", "gpt4o_augment_query_code_pairs.json"),
)
_LANGUAGE = "python"
MAX_RELEVANCE = 1000  # nDCG's gain of 2^relevance is still a number
Judgment = tuple[tuple, str, float]  # the query: its language, its text and, if texts repeat, a number; url; relevance


@dataclass(frozen=True)
class EvaluationSet:
    """Queries, the corpus that holds their codes, and who answers whom, with the name of the results."""

    name: str
    split: Split


def load_evaluation_sets(
    arguments: DataArguments,
    profile: EncoderProfile,
    codebase: Dataset | None = None,
) -> list[EvaluationSet]:
    """Loads the sets of `--eval_data_dir`.

    A set has the name of its folder. Several sets in one folder are called FOLDER-dev, FOLDER-test, ...

    Args:
        codebase: the run's own corpus, for judged queries whose folder has none.

    Raises:
        UserError: a folder without any set, a file that cannot be read (names file and row), rows that cannot be
            used (see `check_rows`), or two sets with the same name.
    """
    sets: list[EvaluationSet] = []
    taken = {*SPLITS, *(f"{split}-{language}" for split in SPLITS for language in arguments.languages)}
    for folder in (Path(name.strip()) for name in (arguments.eval_data_dir or "").split(",") if name.strip()):
        parts = dict(_published_sets(folder, arguments, codebase)) if folder.is_dir() else {}
        parts = parts or {"rows": _all_rows(folder, arguments, profile)}
        for part, split in parts.items():
            name = folder.resolve().name + (f"-{part}" if len(parts) > 1 else "")
            if name in taken:
                raise UserError(f"eval_data_dir={folder}: there are other results called {name}; rename the folder")
            try:
                check_texts(split.queries, "test", profile)
                check_texts(split.corpus, "codebase", profile)
            except UserError as error:
                raise UserError(f"{folder}, {part}: {error}") from None
            taken.add(name)
            sets.append(EvaluationSet(name, split))
            print_on_main(f"{name}: {len(split.queries):,} queries ({part}) over {len(split.corpus):,} codes")
    return sets


def _all_rows(source: Path, arguments: DataArguments, profile: EncoderProfile) -> Split:
    """Loads all rows of a file, a folder or a data set, as queries over their own codes."""
    try:
        data = load_rows(
            source, arguments.query_column, arguments.code_column, split=False, check=not arguments.drop_unusable
        )
        if arguments.drop_unusable:
            data = drop_unusable_rows(data, profile)
    except UserError as error:
        names = sorted(path.name for path in source.iterdir()) if source.is_dir() else []
        looked_for = (
            "; no evaluation set; looked for CoSQA's cosqa-retrieval-dev*.json or -test*.json with code_idx_map.txt, "
            "CoSQA+'s test_agent_query.json, annotationStore.csv, relevance.jsonl, or test.jsonl, "
            f"each also as .gz; it holds {', '.join(names[:8]) or 'nothing'}{' ...' if len(names) > 8 else ''}"
        )
        raise UserError(f"eval_data_dir={error}{looked_for if source.is_dir() else ''}") from None
    return _by_url(source, data["test"], data["codebase"])


def _by_url(source: Path, queries: Dataset, corpus: Dataset) -> Split:
    """Returns a split in which the code with a query's url answers it; UserError if that is not exactly one code."""
    try:
        check_targets(queries, corpus, "test")
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return Split.from_urls(queries, corpus)


def _published_sets(folder: Path, arguments: DataArguments, codebase: Dataset | None) -> Iterator[tuple[str, Split]]:
    """Yields the sets of a folder, with their names."""
    # Sorted so that a plain file wins over its gzipped copy.
    files = {path.name.removesuffix(".gz"): path for path in sorted(folder.iterdir(), reverse=True)}
    if is_beir(folder):
        yield from _beir_sets(folder)
    yield from _cosqa_sets(folder, files)
    if any(name in files for names in _PLUS for name in names):
        yield "several", _cosqa_plus_set(folder, files)
    for part, name, read, gain in (
        ("annotations", "annotationStore.csv", _annotations, "exponential"),
        ("relevance", "relevance.jsonl", _judgments, "linear"),
    ):
        if name in files:
            corpus = load_folder(folder, ("codebase",))["codebase"] if "codebase.jsonl" in files else codebase
            if corpus is None:
                raise UserError(f"{folder}: {name} has no corpus: neither the folder nor the run has a codebase")
            if "url" not in corpus.column_names:
                raise UserError(f"{folder}: {name} names codes by url; its codebase has no url")
            languages = arguments.languages or languages_in({"codebase": corpus})
            yield part, _graded(read(files[name], languages), corpus, files[name], gain)
    # Other columns are read as `--data_dir` reads them.
    if "test.jsonl" in files and is_codesearchnet(folder, arguments.query_column):
        own = "codebase.jsonl" in files
        splits = load_folder(folder, ("test", "codebase")) if own else load_rows(folder, needed=("test",))
        missing = f"{folder}: test.jsonl has no corpus: there is no codebase.jsonl, nor code in all of valid and test"
        if "codebase" not in splits:
            raise UserError(missing)
        yield "test", _by_url(folder, splits["test"], splits["codebase"])


# ---- The sets ----


def _beir_sets(folder: Path) -> Iterator[tuple[str, Split]]:
    """Yields "dev" and "test" of a BEIR folder, if they exist."""
    splits = load_beir(folder)
    if list(splits) == ["train"]:
        raise UserError(f"{folder}: qrels has judgments for training alone; dev.tsv or test.tsv is measured")
    for split, name in (("valid", "dev"), ("test", "test")):
        if split in splits:
            yield name, splits[split]


def _cosqa_sets(folder: Path, files: Mapping[str, Path]) -> Iterator[tuple[str, Split]]:
    """Yields "dev" and "test" of CoSQA, if they exist."""
    found = [match for name in sorted(files) if (match := re.fullmatch(r"cosqa-retrieval-(dev|test)\b.*\.json", name))]
    codes = files.get("code_idx_map.json") or files.get("code_idx_map.txt")
    if not found and not codes:
        return
    missing = "cosqa-retrieval-dev*.json or -test*.json" if codes else "code_idx_map.txt (or .json)"
    if not (found and codes):
        raise UserError(f"{folder}: CoSQA needs {missing} as well, plain or as .gz")
    corpus = Dataset.from_list([_code_row(code, number) for code, number in _entries(codes, dict).items()])
    for match in found:
        both = [other[0] for other in found if other[1] == match[1]]
        if len(both) > 1:
            raise UserError(f"{folder}: {' and '.join(both)} are both the {match[1]} queries of CoSQA: keep one")
        rows = _parsed_list(files[match[0]], lambda row: _query_row(row["doc"], _LANGUAGE, row["retrieval_idx"]))
        split = _by_url(folder, Dataset.from_list(rows), corpus)
        # Judged by people, so it has nDCG as elsewhere.
        yield match[1], replace(split, judgments=replace(split.judgments, gain="linear"))


def _cosqa_plus_set(folder: Path, files: Mapping[str, Path]) -> Split:
    """Returns the queries of CoSQA+ and its corpus."""
    names = max(_PLUS, key=lambda names: sum(name in files for name in names))
    if missing := [name for name in names if name not in files]:
        raise UserError(f"{folder}: CoSQA+ needs {' and '.join(missing)} as well, plain or as .gz")
    queries, codes, pairs = (files[name] for name in names)
    texts = {number: (_LANGUAGE, text, number) for number, text in _numbered(queries, "query").items()}
    corpus = Dataset.from_list([_code_row(code, number) for number, code in _numbered(codes, "code").items()])
    labels = _parsed_list(pairs, lambda row: (int(row["query-idx"]), str(int(row["code-idx"])), int(row["label"])))
    # Pairs of training and dev queries are in the same file.
    right = [(texts[query], code, 1.0) for query, code, label in labels if label and query in texts]
    return _graded(right, corpus, pairs, queries=texts.values())


def _numbered(path: Path, name: str) -> dict[int, str]:
    """Maps numbers to texts, from a list of {"NAME-idx": number, NAME: text}."""

    def read(row: dict) -> tuple[int, str]:
        if not isinstance(row[name], str):
            raise UserError(f"{name} is {row[name]!r}, a text is expected")
        return int(row[f"{name}-idx"]), row[name]

    pairs = _parsed_list(path, read)
    texts = dict(pairs)
    if len(texts) < len(pairs):
        raise UserError(f"{path}: two entries have the same {name}-idx")
    return texts


def _annotations(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads the rows of these languages from CodeSearchNet's challenge, with queries in lower case, as published."""

    known = languages or LANGUAGES

    def read(row: dict) -> Judgment | None:
        language = row["Language"].strip().lower()
        query = row["Query"].lower()
        return _judgment(language, query, row["GitHubUrl"], row["Relevance"]) if language in known else None

    try:
        with open_text(path, newline="") as file:
            rows = enumerate(list(csv.DictReader(file)), 1)
    except (*UNREADABLE, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV in UTF-8: {error}") from error
    return list(filter(None, _parsed(((f"{path}, row {number}", row) for number, row in rows), read)))


def _judgments(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads the lines of relevance.jsonl."""
    lines = read_json_lines(path)
    language = languages[0] if languages else None
    return _parsed(lines, lambda row: _judgment(language, row["query"], row["url"], row["relevance"]))


def _judgment(language: str | None, query: str, url: str, relevance) -> Judgment:
    grade = float(relevance)
    if not query.strip() or not url.strip():
        raise UserError(f"query {query!r} or url {url!r} is blank")
    if not 0 <= grade <= MAX_RELEVANCE:
        raise UserError(f"relevance is {relevance!r}, a number from 0 to {MAX_RELEVANCE} is expected")
    return (language, " ".join(query.split())), url.strip(), grade


def _graded(
    judgments: Iterable[Judgment], corpus: Dataset, path: Path, gain: str = "linear", queries: Iterable[tuple] = ()
) -> Split:
    """Makes a split of the queries that have a relevant code in the corpus; `queries` keep their order."""
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
            rows.append(_query_row(text, language))
    if not rows:
        raise UserError(
            f"{path}: none of {len(grades):,} queries has a relevant code in the corpus of {len(corpus):,}; judgments "
            "must name codes as the corpus does, and only rows of --language are read from annotationStore.csv"
        )
    if absent or len(rows) < len(grades):
        without = len(grades) - len(rows)
        print_on_main(
            f"{path.name}: {absent:,} judged codes are not in the corpus and do not count; {without:,} of "
            f"{len(grades):,} queries have no relevant code there and are left out"
        )
    return Split.from_grades(Dataset.from_list(rows), corpus, np.array(pairs), means, gain)


# ---- Files and rows ----


def _entries(path: Path, kind: type):
    """Reads a JSON file that must hold a `kind`, `list` or `dict`, with entries."""
    content = read_json(path, kind)
    if not content:
        raise UserError(f"{path}: no rows")
    return content


def _parsed_list(path: Path, read: Callable) -> list:
    entries = enumerate(_entries(path, list), 1)
    return _parsed(((f"{path}, entry {number}", entry) for number, entry in entries), read)


def _parsed(entries: Iterable[tuple[object, object]], read: Callable) -> list:
    """Reads every entry; each comes with its place, which the error names if it cannot be read."""
    rows = []
    for place, entry in entries:
        try:
            rows.append(read(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = error if isinstance(error, UserError) else f"not as published: {error!r}"
            raise UserError(f"{place}: {reason}") from None
    return rows


# Rows have CodeSearchNet's columns. Tokens are split at white space.


def _code_row(code: str, url: object) -> dict:
    return {"code": code, "code_tokens": code.split(), "original_string": code, "language": _LANGUAGE, "url": str(url)}


def _query_row(query: str, language: str, url: object = None) -> dict:
    row = {"docstring": query, "docstring_tokens": query.split(), "language": language}
    if url is not None:
        row["url"] = str(url)
    return row
