"""Reads published files with separate queries, codes and judgments: BEIR, CoSQA, CoSQA+ and graded lists.

Rows get CodeSearchNet's columns. Tokens are split at white space.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset

from soft_trainer.data.beir import SPLIT_OF, is_beir, load_beir
from soft_trainer.data.judgments import Split
from soft_trainer.errors import UserError
from soft_trainer.files import UNREADABLE, open_text, read_json, read_json_lines
from soft_trainer.source.languages import CODESEARCHNET_LANGUAGES
from soft_trainer.terminal import print_on_main

# The files with the queries, codes and pairs of CoSQA+. If both files of pairs exist, the first, smaller one is read.
_PLUS = (
    ("test_agent_query.json", "test_agent_codebase.json", "test_agent_pairs_true.json"),
    ("test_agent_query.json", "test_agent_codebase.json", "test_agent_pairs.json"),
    ("query.json", "gpt4o_augment_codebase.json", "gpt4o_augment_query_code_pairs_for_search.json"),
    ("query.json", "gpt4o_augment_codebase.json", "gpt4o_augment_query_code_pairs.json"),
)
_COSQA = re.compile(r"cosqa-retrieval-(train|dev|test)\b.*\.json")
_COSQA_CODES = ("code_idx_map.json", "code_idx_map.txt")
_LANGUAGE = "python"
MAX_RELEVANCE = 1000  # beyond it, nDCG's gain of 2^relevance would overflow
Judgment = tuple[tuple, str, float]  # query (language, text and, if texts repeat, an index), url, relevance


def files_of(folder: Path) -> dict[str, Path]:
    """Returns a folder's files, keyed by name without `.gz`. A plain file takes precedence over its gzipped copy."""
    return {path.name.removesuffix(".gz"): path for path in sorted(folder.iterdir(), reverse=True)}


def has_judged_splits(folder: Path) -> bool:
    """Returns True if `load_judged_splits` can read a folder."""
    if not folder.is_dir():
        return False
    files = files_of(folder)
    return is_beir(folder) or _has_cosqa(files) or _has_cosqa_plus(files)


def load_judged_splits(folder: Path) -> dict[str, Split]:
    """Reads train, valid and test from a folder of BEIR, CoSQA or CoSQA+. Missing splits are left out.

    The corpus for train has only judged codes. CoSQA+ has only test.

    Raises:
        UserError: a file is missing or cannot be read, or a judgment is about an unknown query or code. The message
            gives the file and the row.
    """
    if is_beir(folder):
        return load_beir(folder)
    files = files_of(folder)
    if not _has_cosqa_plus(files):
        return _cosqa(folder, files)
    splits = {}
    if _has_cosqa(files):
        splits = _cosqa(folder, files)
        if "test" in splits:
            raise UserError(f"{folder}: both CoSQA and CoSQA+ have queries for test: keep each in its own folder")
    return splits | {"test": _cosqa_plus(folder, files)}


# ---- CoSQA and CoSQA+ ----


def _has_cosqa(files: Mapping[str, Path]) -> bool:
    return any(_COSQA.fullmatch(name) or name in _COSQA_CODES for name in files)


def _has_cosqa_plus(files: Mapping[str, Path]) -> bool:
    return not files.keys().isdisjoint(itertools.chain(*_PLUS))


def _cosqa(folder: Path, files: Mapping[str, Path]) -> dict[str, Split]:
    """Returns CoSQA's splits. Codes are identified by their numbers in `code_idx_map`."""
    found = list(filter(None, map(_COSQA.fullmatch, sorted(files))))
    codes = files.get(_COSQA_CODES[0]) or files.get(_COSQA_CODES[1])
    if found:
        missing = "code_idx_map.txt (or .json)"
    else:
        missing = "cosqa-retrieval-dev*.json or -test*.json"
    if codes is None or not found:
        raise UserError(f"{folder}: CoSQA needs {missing} as well, plain or as .gz")
    numbers = _entries(codes, dict)
    row_of = {int(number): row for row, number in enumerate(numbers.values())}
    if len(row_of) < len(numbers):
        raise UserError(f"{codes}: two codes have the same number")
    corpus = Dataset.from_list([_code_row(code, number) for code, number in numbers.items()])
    splits = {}
    for match in found:
        name = SPLIT_OF[match[1]]
        if name in splits:
            raise UserError(f"{folder}: several files hold the {match[1]} queries of CoSQA, {match[0]} too: keep one")
        splits[name] = _cosqa_split(files[match[0]], corpus, row_of, judged_codes=name == "train")
    return splits


def _cosqa_split(path: Path, corpus: Dataset, row_of: Mapping[int, int], judged_codes: bool) -> Split:
    """Returns one file's entries as queries with one right code each. Pairs with label 0 are left out."""

    def read(entry: dict) -> tuple[dict, int] | None:
        row = _query_row(entry["doc"], _LANGUAGE)
        if not int(entry.get("label", 1)):
            return None
        number = int(entry["retrieval_idx"])
        if number not in row_of:
            raise UserError(f"retrieval_idx {number} is not in code_idx_map")
        return row, row_of[number]

    entries = list(filter(None, _parsed_list(path, read)))
    if not entries:
        raise UserError(f"{path}: no query has a right code")
    rows, codes = zip(*entries, strict=True)
    codes = np.array(codes)
    if judged_codes:
        kept, codes = np.unique(codes, return_inverse=True)
        corpus = corpus.select(kept)
    pairs = np.stack([np.arange(len(rows)), codes], axis=1)
    return Split.from_grades(Dataset.from_list(list(rows)), corpus, pairs, np.ones(len(rows)))


def _cosqa_plus(folder: Path, files: Mapping[str, Path]) -> Split:
    """Returns CoSQA+'s queries and corpus."""
    names = max(_PLUS, key=lambda names: len(files.keys() & {*names}))
    missing = [name for name in names if name not in files]
    if missing:
        raise UserError(f"{folder}: CoSQA+ needs {' and '.join(missing)} as well, plain or as .gz")
    queries, codes, pairs = map(files.get, names)
    texts = {number: (_LANGUAGE, text, number) for number, text in _numbered(queries, "query").items()}
    corpus = Dataset.from_list([_code_row(code, number) for number, code in _numbered(codes, "code").items()])
    labels = _parsed_list(pairs, lambda row: (int(row["query-idx"]), str(int(row["code-idx"])), int(row["label"])))
    # The same file has the pairs of training and dev queries.
    right = [(texts[query], code, 1.0) for query, code, label in labels if label and query in texts]
    return graded_split(right, corpus, pairs, queries=texts.values())


def _numbered(path: Path, name: str) -> dict[int, str]:
    """Reads a list of {"NAME-idx": number, NAME: text}, and returns the texts keyed by number."""

    def read(row: dict) -> tuple[int, str]:
        if not isinstance(row[name], str):
            raise UserError(f"{name} is {row[name]!r}, a text is expected")
        return int(row[f"{name}-idx"]), row[name]

    pairs = _parsed_list(path, read)
    texts = dict(pairs)
    if len(texts) < len(pairs):
        raise UserError(f"{path}: two entries have the same {name}-idx")
    return texts


# ---- Lists of grades ----


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
    return list(filter(None, _parsed(((f"{path}, row {number}", row) for number, row in rows), read)))


def read_relevance(path: Path, languages: Sequence[str]) -> list[Judgment]:
    """Reads the lines of relevance.jsonl."""
    lines = read_json_lines(path)
    language = None
    if languages:
        language = languages[0]
    return _parsed(lines, lambda row: _judgment(language, row["query"], row["url"], row["relevance"]))


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
            rows.append(_query_row(text, language))
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


def _entries(path: Path, kind: type):
    """Reads a JSON file. Raises UserError unless it contains a non-empty `kind`, which is `list` or `dict`."""
    content = read_json(path, kind)
    if not content:
        raise UserError(f"{path}: no rows")
    return content


def _parsed_list(path: Path, read: Callable) -> list:
    entries = enumerate(_entries(path, list), 1)
    return _parsed(((f"{path}, entry {number}", entry) for number, entry in entries), read)


def _parsed(entries: Iterable[tuple[object, object]], read: Callable) -> list:
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


def _code_row(code: str, url: object) -> dict:
    return {"code": code, "code_tokens": code.split(), "original_string": code, "language": _LANGUAGE, "url": str(url)}


def _query_row(query: str, language: str | None) -> dict:
    return {"docstring": query, "docstring_tokens": query.split(), "language": language}
