"""Reads CoSQA and CoSQA+, human web queries for Python functions, from their published files.

CoSQA gives each query one right code, CoSQA+ several. CoSQA+ has been published under two sets of names, as
`test_agent_query.json`, `test_agent_codebase.json`, `test_agent_pairs_true.json` and, before, as `query.json`,
`gpt4o_augment_codebase.json`, `gpt4o_augment_query_code_pairs_for_search.json`. The names without `_true` and
`_for_search` hold the pairs that are wrong, too (label 0).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from soft_trainer.errors import UserError
from soft_trainer.evaluation.published_files import code_row, matching_files, query_row, read_json
from soft_trainer.terminal import print_on_main

_QUERIES = r"cosqa-retrieval-(dev|test)\b.*\.json(\.gz)?"
_CODES = r"code_idx_map\.(txt|json)(\.gz)?"
# Queries, codes and pairs. Of the pairs the first that is there is read: the right ones alone are the smaller file.
_PLUS_NAMES = (
    ("test_agent_query", "test_agent_codebase", ("test_agent_pairs_true", "test_agent_pairs")),
    (
        *("query", "gpt4o_augment_codebase"),
        ("gpt4o_augment_query_code_pairs_for_search", "gpt4o_augment_query_code_pairs"),
    ),
)
_PAIR = ("query-idx", "code-idx", "label")
_LANGUAGE = "python"


# ---- CoSQA ----


def is_cosqa(folder: Path) -> bool:
    """True if the folder has one of CoSQA's files."""
    return bool(matching_files(folder, _QUERIES) or matching_files(folder, _CODES))


def cosqa_sets(folder: Path) -> Iterator[tuple[str, tuple[Dataset, Dataset]]]:
    """Yields "dev" and "test", those that exist, each with its queries and the corpus.

    Raises:
        UserError: a file that is missing or wrong.
    """
    queries, codes = matching_files(folder, _QUERIES), matching_files(folder, _CODES)
    if not (queries and codes):
        missing = "code_idx_map.txt (or .json)" if queries else "cosqa-retrieval-dev*.json or -test*.json"
        raise UserError(f"{folder}: CoSQA needs {missing} as well, plain or as .gz")
    numbers = read_json(codes[0], dict)
    wrong = next((number for number in numbers.values() if not isinstance(number, int)), None)
    if wrong is not None:
        raise UserError(f"{codes[0]}: every code needs a number, not {wrong!r}")
    corpus = Dataset.from_list([code_row(code, str(number), _LANGUAGE) for code, number in numbers.items()])
    known = set(numbers.values())
    parts = [re.fullmatch(_QUERIES, path.name)[1] for path in queries]
    for part, path in zip(parts, queries, strict=True):
        if parts.count(part) > 1:
            names = " and ".join(path.name for name, path in zip(parts, queries, strict=True) if name == part)
            raise UserError(f"{folder}: {names} are both the {part} queries of CoSQA: leave only one there")
        rows = enumerate(read_json(path, list), 1)
        query_rows = [_cosqa_query(row, known, f"{path}, entry {number}", codes[0].name) for number, row in rows]
        if not query_rows:
            raise UserError(f"{path}: no queries")
        yield part, (Dataset.from_list(query_rows), corpus)


def _cosqa_query(row, known: set[int], place: str, codes: str) -> dict:
    if not isinstance(row, dict) or not isinstance(row.get("doc"), str):
        raise UserError(f"{place}: an object with the query as text in `doc` is expected")
    if not row["doc"].strip():
        raise UserError(f"{place}: the query in `doc` is empty")
    number = row.get("retrieval_idx")
    if not isinstance(number, int) or isinstance(number, bool) or number not in known:
        raise UserError(f"{place}: {codes} has no code with retrieval_idx={number}")
    return query_row(row["doc"], str(row["retrieval_idx"]), _LANGUAGE)


# ---- CoSQA+ ----


def is_cosqa_plus(folder: Path) -> bool:
    """True if the folder has one of CoSQA+'s files."""
    return any(paths for files in _plus_files(folder) for paths in files)


def _plus_files(folder: Path) -> list[list[list[Path]]]:
    """The files with queries, codes and pairs that are there, for each of the two sets of names."""
    return [
        [
            matching_files(folder, rf"{queries}\.json(\.gz)?"),
            matching_files(folder, rf"{codes}\.json(\.gz)?"),
            [path for name in pairs for path in matching_files(folder, rf"{name}\.json(\.gz)?")],
        ]
        for queries, codes, pairs in _PLUS_NAMES
    ]


def cosqa_plus_set(folder: Path) -> tuple[Dataset, Dataset]:
    """Returns the queries, a row for every right code of each, and the corpus.

    A query without a right code is left out, and a message says how many there are.

    Raises:
        UserError: a file that is missing or wrong.
    """
    # The set of names of which most are there; the later names if both are whole.
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
    """The text of each number, from a list of {"NAME-idx": number, NAME: text}."""
    texts: dict[int, str] = {}
    for entry, row in enumerate(read_json(path, list), 1):
        number, text = (row.get(f"{name}-idx"), row.get(name)) if isinstance(row, dict) else (None, None)
        if not isinstance(number, int) or not isinstance(text, str):
            raise UserError(f'{path}, entry {entry}: an object with the number "{name}-idx" and "{name}" is expected')
        if number in texts:
            raise UserError(f"{path}, entry {entry}: {name}-idx={number} stands twice")
        texts[number] = text
    return texts


def _right_codes(path: Path, queries: dict[int, str], codes: dict[int, str]) -> dict[int, list[int]]:
    """The right codes of each query that has some, in the order of the queries. A pair may be listed twice."""
    right: dict[int, dict[int, None]] = {query: {} for query in queries}
    absent = 0
    for entry, row in enumerate(read_json(path, list), 1):
        query, code, label = ((row if isinstance(row, dict) else {}).get(name) for name in _PAIR)
        if not (isinstance(query, int) and isinstance(code, int) and label in (0, 1)):
            raise UserError(
                f'{path}, entry {entry}: an object with the numbers "query-idx" and "code-idx" and a "label" of 0 or '
                "1 is expected"
            )
        if label and query in right:  # pairs of training and dev queries stand in the same file
            absent += code not in codes
            if code in codes:
                right[query][code] = None
    if absent:
        print_on_main(f"{path.name}: right codes that are not in the corpus and do not count: {absent:,}")
    return {query: list(found) for query, found in right.items() if found}
