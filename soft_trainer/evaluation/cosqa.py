"""Reads CoSQA and CoSQA+, human web queries for Python functions, from their published files.

CoSQA gives each query one right code, CoSQA+ several. CoSQA+ has been published under two sets of names, as
`test_agent_query.json`, `test_agent_codebase.json`, `test_agent_pairs_true.json` and, before, as `query.json`,
`gpt4o_augment_codebase.json`, `gpt4o_augment_query_code_pairs_for_search.json`. The names without `_true` and
`_for_search` hold the pairs that are wrong, too (label 0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from datasets import Dataset

from soft_trainer.errors import UserError
from soft_trainer.evaluation.published_files import code_row, matching_files, query_row, read_json
from soft_trainer.terminal import print_on_main

_QUERIES = r"cosqa-retrieval-(dev|test)\b.*\.json(\.gz)?"
_CODES = r"code_idx_map\.(txt|json)(\.gz)?"
# Queries, codes and pairs. The first pairs file that exists is read: the one with only the right pairs is smaller.
_PLUS_NAMES = (
    ("test_agent_query", "test_agent_codebase", ("test_agent_pairs_true", "test_agent_pairs")),
    (
        *("query", "gpt4o_augment_codebase"),
        ("gpt4o_augment_query_code_pairs_for_search", "gpt4o_augment_query_code_pairs"),
    ),
)
_LANGUAGE = "python"
T = TypeVar("T")


# ---- CoSQA ----


def is_cosqa(folder: Path) -> bool:
    """True if the folder has one of CoSQA's files."""
    return bool(matching_files(folder, _QUERIES) or matching_files(folder, _CODES))


def cosqa_sets(folder: Path) -> Iterator[tuple[str, tuple[Dataset, Dataset]]]:
    """Yields "dev" and "test", if they exist, each with its queries and the corpus.

    Raises:
        UserError: a file is missing or malformed.
    """
    queries, codes = matching_files(folder, _QUERIES), matching_files(folder, _CODES)
    if not (queries and codes):
        missing = "code_idx_map.txt (or .json)" if queries else "cosqa-retrieval-dev*.json or -test*.json"
        raise UserError(f"{folder}: CoSQA needs {missing} as well, plain or as .gz")
    numbers = read_json(codes[0], dict)
    corpus = Dataset.from_list([code_row(code, str(number), _LANGUAGE) for code, number in numbers.items()])
    parts = [re.fullmatch(_QUERIES, path.name)[1] for path in queries]
    for part, path in zip(parts, queries, strict=True):
        if parts.count(part) > 1:
            names = " and ".join(path.name for name, path in zip(parts, queries, strict=True) if name == part)
            raise UserError(f"{folder}: {names} are both the {part} queries of CoSQA: leave only one there")
        rows = _rows(path, lambda row: query_row(row["doc"], str(row["retrieval_idx"]), _LANGUAGE))
        yield part, (Dataset.from_list(rows), corpus)


def _rows(path: Path, read: Callable[[dict], T]) -> list[T]:
    """Reads every entry of a JSON list.

    Raises:
        UserError: names the entry that lacks a value, or the empty file.
    """
    entries = read_json(path, list)
    if not entries:
        raise UserError(f"{path}: no rows")
    rows = []
    for number, entry in enumerate(entries, 1):
        try:
            rows.append(read(entry))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path}, entry {number}: not as published: {error!r}") from None
    return rows


# ---- CoSQA+ ----


def is_cosqa_plus(folder: Path) -> bool:
    """True if the folder has one of CoSQA+'s files."""
    return any(paths for files in _plus_files(folder) for paths in files)


def _plus_files(folder: Path) -> list[list[list[Path]]]:
    """Finds the existing files with queries, codes and pairs, for each of the two sets of names."""
    return [
        [
            matching_files(folder, rf"{queries}\.json(\.gz)?"),
            matching_files(folder, rf"{codes}\.json(\.gz)?"),
            [path for name in pairs for path in matching_files(folder, rf"{name}\.json(\.gz)?")],
        ]
        for queries, codes, pairs in _PLUS_NAMES
    ]


def cosqa_plus_set(folder: Path) -> tuple[Dataset, Dataset]:
    """Returns the queries, with one row for each right code, and the corpus.

    Queries without a right code are left out; a message says how many.

    Raises:
        UserError: a file is missing or malformed.
    """
    # The set of names with the most files; the later names if both sets are complete.
    sets = list(zip(_plus_files(folder), _PLUS_NAMES, strict=True))
    files, (queries_name, codes_name, (pairs_name, _)) = max(sets, key=lambda item: sum(map(bool, item[0])))
    names = (queries_name, codes_name, pairs_name)
    if missing := [f"{name}.json" for name, paths in zip(names, files, strict=True) if not paths]:
        raise UserError(f"{folder}: CoSQA+ needs {' and '.join(missing)} as well, plain or as .gz")
    queries, codes = _texts(files[0][0], "query"), _texts(files[1][0], "code")
    right = _right_codes(files[2][0], queries, codes)
    if not right:
        raise UserError(f"{files[2][0]}: no pair with label 1 of a query and a code that are in the other two files")
    rows = [
        query_row(queries[query], str(code), _LANGUAGE) | {"query_number": number, "relevance": 1.0}
        for number, (query, right_codes) in enumerate(right.items())
        for code in right_codes
    ]
    if absent := len(queries) - len(right):
        print_on_main(f"{files[0][0].name}: {absent:,} of {len(queries):,} queries have no right code: left out")
    return Dataset.from_list(rows), Dataset.from_list([code_row(c, str(n), _LANGUAGE) for n, c in codes.items()])


def _texts(path: Path, name: str) -> dict[int, str]:
    """Maps numbers to texts, from a list of {"NAME-idx": number, NAME: text}."""
    texts = dict(pairs := _rows(path, lambda row: (int(row[f"{name}-idx"]), row[name])))
    if len(texts) < len(pairs):
        raise UserError(f"{path}: two entries have the same {name}-idx")
    return texts


def _right_codes(path: Path, queries: dict[int, str], codes: dict[int, str]) -> dict[int, list[int]]:
    """Returns the right codes of each query that has any, in the order of the queries. Pairs may be listed twice."""
    pairs = _rows(path, lambda row: (int(row["query-idx"]), int(row["code-idx"]), int(row["label"])))
    # Pairs of training and dev queries are in the same file.
    right = [(query, code) for query, code, label in pairs if label and query in queries]
    if absent := sum(code not in codes for _, code in right):
        print_on_main(f"{path.name}: right codes that are not in the corpus and do not count: {absent:,}")
    found = {query: {} for query in queries}
    for query, code in right:
        if code in codes:
            found[query][code] = None
    return {query: list(each) for query, each in found.items() if each}
