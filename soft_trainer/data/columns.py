"""Decides which column of a source is what, and gives these columns CodeSearchNet's names."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import pandas as pd
from datasets import Dataset, List, Value
from xxhash import xxh3_128_hexdigest

from soft_trainer.data.column_names import (
    CODE_COLUMNS,
    CODES,
    COLUMNS_OF,
    LABEL,
    NEGATIVE,
    NEGATIVE_NAMES,
    PAIRS,
    QUERY_COLUMNS,
    SCORE,
    SCORES,
    SCORES_OF,
    TEXT_ID,
)
from soft_trainer.data.tokens import column_texts, columns_in
from soft_trainer.errors import UserError
from soft_trainer.terminal import nearest, print_on_main

RECOGNISED = tuple(dict.fromkeys((*QUERY_COLUMNS, *CODES, *chain.from_iterable(PAIRS), *NEGATIVE_NAMES)))
# Words in the names of columns that people expect to be read. FlagEmbedding reads an instruction from `prompt`.
LOOKS_LIKE = {"pos", "positive", "positives", "neg", "negs", "negative", "negatives", "prompt", "instruction"}


class ColumnNames(NamedTuple):
    """The columns that a user has named in options such as `query_column`. Others are detected automatically.

    With `shared`, the names apply to several sources, each of which may lack some of these columns.
    """

    query: str | None = None
    code: str | None = None
    id: str | None = None
    negatives: str | None = None
    group: str | None = None
    shared: bool = False

    def options(self) -> dict[str, str]:
        """Returns the columns that are named, keyed by option, such as `{"query_column": "question"}`."""
        return {f"{kind}_column": name for kind, name in zip(self._fields, self[:5], strict=False) if name is not None}

    def among(self, columns: Iterable[str]) -> ColumnNames:
        """Returns the names that a source with these columns must have: all or, if they are shared, those it has."""
        if not self.shared:
            return self
        return ColumnNames(*(name if name in columns else None for name in self[:5]))


ANY_COLUMNS = ColumnNames()


@dataclass(frozen=True)
class Columns:
    """The columns that a source's queries, functions, ids, negatives and scores come from. A split may lack some.

    Args:
        query, code: the columns of queries and functions in order of preference: one column, or CodeSearchNet's.
        id: the column that the user has set, whose values become `url`.
        keeps_url: whether a column `url` has the id. Otherwise it is dropped, and a function's text is its id.
        negatives: the columns of negatives.
        scores: the column of all scores; or the columns for positives and for negatives; or `score` and `label`.
    """

    query: Sequence[str]
    code: Sequence[str]
    id: str | None
    keeps_url: bool
    negatives: Sequence[str]
    scores: Sequence[str]


# ---- Which column is what ----


def choose_columns(
    tables: Mapping[str, Sequence[str]], named: ColumnNames, source: str, quiet: bool = False
) -> Columns:
    """Decides which column is what, for all splits of a source, and prints what is read or looks like it.

    Args:
        tables: the names of each split's columns.
        named: the columns that the user has set.
        source: where the rows come from, for messages.
        quiet: True to print nothing.

    Raises:
        UserError: a column that the user has set does not exist, or two pairs of columns are possible.
    """
    names = list(dict.fromkeys(chain.from_iterable(tables.values())))
    for option, name in named.options().items():
        check_column(names, option, name, source)
    query, code = named.query, named.code
    if query is not None and query == code:
        raise UserError(f"{source}: query_column and code_column are both {query!r}; set two different columns")
    if not (query or code):
        query, code = _recognised_pair(tables, source)
    codes = (code,) if code else CODES
    usual = "url" in names and bool({*QUERY_COLUMNS} & {*names}) and bool({*CODE_COLUMNS} & {*names})
    negatives = [named.negatives] if named.negatives else [name for name in names if NEGATIVE.fullmatch(name)]
    scores = ()
    if SCORES in names:
        scores = (SCORES,)
    elif {*chain.from_iterable(SCORES_OF)} & {*names}:
        scores = tuple(next((name for name in side if name in names), side[0]) for side in SCORES_OF)
    elif {SCORE, LABEL} <= {*names} and not negatives:
        scores = (SCORE, LABEL)
    own_id = named.id if named.id not in codes else None
    apart = not all({*codes} & {*of_split} for of_split in tables.values())
    columns = Columns(
        query=(query,) if query else QUERY_COLUMNS,
        code=codes,
        id=own_id if named.id != "url" or not usual else None,
        keeps_url=named.id in (None, "url") and (usual or apart),
        negatives=negatives,
        scores=scores,
    )
    if not quiet:
        _name_columns(columns, named, names, source)
    return columns


def check_column(names: Sequence[str], option: str, name: str, source: str) -> None:
    """Raises UserError if rows with the columns `names` lack the column that the user has set in `option`."""
    if name not in names:
        raise UserError(
            f"{source}: {option}={name}: no such column; the rows have {', '.join(names)}{nearest(name, names)}"
        )


def _recognised_pair(tables: Mapping[str, Sequence[str]], source: str) -> tuple[str | None, str | None]:
    """Returns the query and the code column of a pair in `PAIRS`. Both are None for CodeSearchNet's columns.

    If no pair is complete, the result has a column of one side, so that the error is about the other side.

    Raises:
        UserError: a table has two complete pairs with different code columns.
    """
    found = []
    for of_split in tables.values():
        pairs = _complete_pairs(of_split)
        for query, code in pairs:
            if code != pairs[0][1]:
                both = f"{pairs[0][0]!r} with {pairs[0][1]!r} and {query!r} with {code!r}"
                raise UserError(
                    f"{source}: the rows have two pairs of columns, {both}; set query_column and code_column"
                )
        found += pairs
    names = {*chain.from_iterable(tables.values())}
    pairs = found or _complete_pairs(names)  # queries and functions may be in separate tables
    if pairs and pairs[0] in PAIRS:
        return pairs[0]
    if names & {*QUERY_COLUMNS, *CODES}:
        return None, None
    query = next((query for query, _ in PAIRS if query in names), None)
    code = next((code for _, code in PAIRS if code in names), None)
    return query, None if query else code


def _complete_pairs(names: Collection[str]) -> list[tuple[str, str]]:
    """Returns the pairs in `PAIRS` whose columns are both in `names`, and CodeSearchNet's pair at the end."""
    pairs = [pair for pair in PAIRS if {*pair} <= {*names}]
    queries = [name for name in QUERY_COLUMNS if name in names]
    codes = [name for name in CODES if name in names]
    if queries and codes and not any(code in codes for _, code in pairs):
        pairs.append((queries[0], codes[0]))
    return pairs


def _name_columns(columns: Columns, named: ColumnNames, names: Sequence[str], source: str) -> None:
    """Prints detected columns, and unused ones whose names look like recognised ones, such as `codes`."""
    query, code = columns.query[0], columns.code[0]
    if not (named.query or named.code) and len(columns.query) == len(columns.code) == 1:
        print_on_main(f"{source}: reading queries from column {query!r} and functions from {code!r}")
    for what, read in (("hard negatives", columns.negatives), ("scores", columns.scores)):
        if read := [name for name in read if name in names]:
            print_on_main(f"{source}: reading {what} in {', '.join(read)}")
    used = {*chain.from_iterable(COLUMNS_OF.values()), *columns.query, *columns.code, *columns.negatives, *named}
    used |= {*columns.scores}
    unused = []
    for name in names:
        plain = name.lower().rstrip("_0123456789")
        similar = LOOKS_LIKE.intersection(re.findall("[a-z]+", plain))
        similar = similar or difflib.get_close_matches(plain, RECOGNISED, cutoff=0.8)
        if similar and not (name in used or NEGATIVE.fullmatch(name)):
            unused.append(name)
    if unused:
        print_on_main(
            f"{source}: not using {', '.join(map(repr, unused))}; the recognised columns are {', '.join(RECOGNISED)}"
        )


# ---- CodeSearchNet's names ----


def with_usual_names(rows: Dataset, columns: Columns, source: str) -> tuple[Dataset, dict[str, str]]:
    """Gives the columns of queries, functions and ids CodeSearchNet's names, and drops other columns of these names.

    Returns:
        The rows, and the original names of renamed columns, such as `{"docstring": "question"}`.

    Raises:
        UserError: a row has no id.
    """
    ids = None
    column = columns.id
    if columns.keeps_url and rows.features.get("url", Value("string")) not in (Value("string"), Value("null")):
        column = "url"  # of numbers
    if column is not None:
        check_column(rows.column_names, "id_column", column, source)
        ids = pd.Series(rows[column][:], dtype=object)
        blank = np.flatnonzero(ids.isna() | (ids.astype(str).str.strip() == ""))
        if len(blank):
            raise UserError(f"{source}, row {blank[0] + 1}: the id, column {column!r}, is missing or empty")
        ids = ids.astype(str).tolist()
    dropped = {name for name in rows.column_names if rows.data.column(name).null_count == len(rows.data)}
    before = {}
    for chosen, targets in ((columns.query, QUERY_COLUMNS), (columns.code, CODES)):
        present = columns_in(rows, chosen)
        if dropped.issuperset(present):
            dropped.difference_update(present)  # `check_split` names it
        if present and len(chosen) == 1:
            # From `original_string`, an encoder with data flow would read another function.
            dropped |= {*targets, *(CODE_COLUMNS if targets == CODES else ())} - {*chosen}
            before[targets[isinstance(rows.features[chosen[0]], List)]] = chosen[0]
    dropped |= {column} if columns.keeps_url else {column, "url"}
    before = {new: old for new, old in before.items() if old != new}
    rows = rows.remove_columns(columns_in(rows, dropped)).rename_columns({old: new for new, old in before.items()})
    if column not in (None, "url"):
        before["url"] = column
    if ids is None and "url" not in rows.column_names and columns_in(rows, CODES):
        ids = [f"{TEXT_ID}{xxh3_128_hexdigest(json.dumps(text).encode())}" for text in _texts(rows)]
    return (rows if ids is None else rows.add_column("url", ids)), before


def check_one_code(tables: Mapping[str, Dataset], id_column: str, sources: Mapping[str, str]) -> None:
    """Raises UserError if two rows have the same id but different functions. The message gives both rows."""
    first: dict[str, tuple[str, str]] = {}
    for split, rows in tables.items():
        if not columns_in(rows, CODES):
            continue
        for row, (name, text) in enumerate(zip(rows["url"], _texts(rows), strict=True)):
            known, other = first.setdefault(name, (text, f"{sources[split]}, row {row + 1}"))
            if known != text:
                raise UserError(
                    f"{sources[split]}, row {row + 1}: {id_column} {name!r} belongs to a different function in {other}"
                )


def _texts(rows: Dataset) -> Iterator[str]:
    """Returns each row's function. Joins tokens."""
    return column_texts(rows, columns_in(rows, CODES)[0])
