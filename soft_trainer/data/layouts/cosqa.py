"""Reads the published files of CoSQA and CoSQA+ into splits with CodeSearchNet's columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from datasets import Dataset

from soft_trainer.data.folders import SPLIT_NAMES, Files
from soft_trainer.data.layouts.graded import entries_of, graded_split, parsed_list, query_row, split_of_grades
from soft_trainer.data.make_splits import Context
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError

# The files with the queries, functions and pairs of CoSQA+. If both files of pairs exist, the first one, which is
# smaller, is read.
_PLUS = (
    ("test_agent_query.json", "test_agent_codebase.json", "test_agent_pairs_true.json"),
    ("test_agent_query.json", "test_agent_codebase.json", "test_agent_pairs.json"),
    ("query.json", "gpt4o_augment_codebase.json", "gpt4o_augment_query_code_pairs_for_search.json"),
    ("query.json", "gpt4o_augment_codebase.json", "gpt4o_augment_query_code_pairs.json"),
)
_COSQA = re.compile(r"cosqa-retrieval-(train|dev|test)\b.*\.json")
_COSQA_CODES = ("code_idx_map.json", "code_idx_map.txt")
_LANGUAGE = "python"


def finds(files: Files) -> bool:
    """Returns True if a folder has any file of CoSQA."""
    return any(_cosqa_name(name) or name in _COSQA_CODES for name in files.paths)


def read(files: Files, context: Context) -> dict[str, Split]:
    """Reads CoSQA's splits. A function's id is its number in `code_idx_map`. The corpus of train has judged functions.

    Raises:
        UserError: a file is missing or cannot be read, or a query's function is unknown.
    """
    found = files.of_splits(_cosqa_name)
    codes = files.paths.get(_COSQA_CODES[0]) or files.paths.get(_COSQA_CODES[1])
    if found:
        missing = "code_idx_map.txt (or .json)"
    else:
        missing = "cosqa-retrieval-dev*.json or -test*.json"
    if codes is None or not found:
        raise UserError(f"{files.source}: CoSQA also needs {missing}, plain or as .gz")
    numbers = entries_of(codes, dict)
    row_of = {int(number): row for row, number in enumerate(numbers.values())}
    if len(row_of) < len(numbers):
        raise UserError(f"{codes}: two functions have the same number")
    corpus = _corpus(codes, {number: code for code, number in numbers.items()})

    def parse(entry: dict) -> tuple[dict, int] | None:
        row = query_row(entry["doc"], _LANGUAGE)
        if not int(entry.get("label", 1)):  # the function is not relevant
            return None
        number = int(entry["retrieval_idx"])
        if number not in row_of:
            raise UserError(f"retrieval_idx {number} is not in code_idx_map")
        return row, row_of[number]

    splits = {}
    for split, (path, *_) in found.items():
        entries = list(filter(None, parsed_list(path, parse)))
        if not entries:
            raise UserError(f"{path}: no query has a relevant function")
        rows, answers = zip(*entries, strict=True)
        grades = pd.DataFrame({"query": range(len(rows)), "code": answers, "grade": 1.0})
        splits[split] = split_of_grades(Dataset.from_list(list(rows)), corpus, grades, path, split == "train")
    return splits


def _cosqa_name(name: str) -> str | None:
    """Returns a CoSQA file's split, such as "valid" for `cosqa-retrieval-dev-500.json`, or None for other files."""
    match = _COSQA.fullmatch(name)
    return match and SPLIT_NAMES[match[1]]


def finds_plus(files: Files) -> bool:
    """Returns True if a folder has any file of CoSQA+."""
    return not files.paths.keys().isdisjoint(itertools.chain.from_iterable(_PLUS))


def read_plus(files: Files, context: Context) -> dict[str, Split]:
    """Reads the queries, the corpus and the relevant pairs of CoSQA+ as the split `test`.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    names = max(_PLUS, key=lambda names: len(files.paths.keys() & {*names}))
    if missing := [name for name in names if name not in files.paths]:
        raise UserError(f"{files.source}: CoSQA+ also needs {' and '.join(missing)}, plain or as .gz")
    queries, codes, pairs = map(files.paths.get, names)
    texts = {number: (_LANGUAGE, text, number) for number, text in _numbered(queries, "query").items()}
    corpus = _corpus(codes, _numbered(codes, "code"))
    labels = parsed_list(pairs, lambda row: (int(row["query-idx"]), str(int(row["code-idx"])), int(row["label"])))
    # The file also contains pairs of training and dev queries, which are skipped.
    right = [(texts[query], code, 1.0) for query, code, label in labels if label and query in texts]
    return {"test": graded_split(right, corpus, pairs, queries=texts.values())}


def _numbered(path: Path, name: str) -> dict[int, str]:
    """Reads a JSON list of `{"NAME-idx": number, "NAME": text}`, and returns the texts keyed by number."""

    def read(row: dict) -> tuple[int, str]:
        if not isinstance(row[name], str):
            raise UserError(f"{name} is {row[name]!r}, expected a string")
        return int(row[f"{name}-idx"]), row[name]

    pairs = parsed_list(path, read)
    texts = dict(pairs)
    if len(texts) < len(pairs):
        raise UserError(f"{path}: two entries have the same {name}-idx")
    return texts


def _corpus(path: Path, texts: Mapping[int, str]) -> Dataset:
    """Makes a corpus with CodeSearchNet's columns from a file's functions, keyed by number."""
    rows = []
    for number, code in texts.items():
        if not code.strip():
            raise UserError(f"{path}: code {number} is blank")
        own = {"code": code, "code_tokens": code.split(), "original_string": code}
        rows.append(own | {"language": _LANGUAGE, "url": str(number)})
    return Dataset.from_list(rows)
