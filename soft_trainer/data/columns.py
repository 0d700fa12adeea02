"""Decides which column of a source is what, checks it, gives it CodeSearchNet's name, and reads its texts."""

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
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, List, Value
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from soft_trainer.data.column_names import (
    CODE_COLUMNS,
    CODES,
    COLUMNS_OF,
    LABELS,
    NEGATIVE,
    NEGATIVE_NAMES,
    PAIRS,
    POSITIVES,
    QUERY_COLUMNS,
    SCORES,
    SCORES_OF,
    TEXT_ID,
    TOKENS_END,
)
from soft_trainer.data.folders import SIDES_OF
from soft_trainer.errors import UserError
from soft_trainer.system.terminal import nearest, print_on_main, shortened

RECOGNISED = tuple(dict.fromkeys((*QUERY_COLUMNS, *CODES, *chain.from_iterable(PAIRS), *NEGATIVE_NAMES)))
# Words in the names of columns that people expect to be read. FlagEmbedding reads an instruction from `prompt`.
LOOKS_LIKE = {"pos", "positive", "positives", "neg", "negs", "negative", "negatives", "prompt", "instruction"}
UNREAD = ("score", "relevance")  # columns whose meaning is unclear
SHOWN = 5  # rows to list in a message
READ_AT_ONCE = 1000  # rows of text in memory at once


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
        scores: the column of all scores; or the columns for positives and for negatives.
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


# ---- Checks of a table ----


def check_table(rows: Dataset, name: str, columns: Columns, source: str, has_corpus: bool) -> None:
    """Checks that a split has rows, and that the columns that it needs have the right types and labels.

    Args:
        name: the name of the split.
        has_corpus: whether valid and test are ranked against a table of functions.

    Raises:
        UserError: there are no rows, a column is missing, or a value is not text. The message gives the first row.
    """
    if not len(rows):
        raise UserError(f"{source}: no rows")
    for side in SIDES_OF.get(name, ("query",)) if has_corpus else COLUMNS_OF:
        if known_columns(rows, (*getattr(columns, side), *COLUMNS_OF[side])):
            continue
        known = ", ".join(rows.column_names)
        if side == "code" and name not in ("train", "codebase"):
            raise UserError(
                f"{source}: these queries have no corpus to rank. The rows have {known}. Set code_column, "
                "or add a corpus (codebase.jsonl in the folder, or codebase= in Python)"
            )
        raise UserError(f"{source}: no column for the {side}: the rows have {known}; set {side}_column")
    _check_labels(rows, columns, source)
    check_texts(rows, (*columns.query, *columns.code), source)


def check_texts(rows: Dataset, columns: Sequence[str], source: str) -> None:
    """Checks that columns contain texts, or lists of texts if their names say that they may.

    Raises:
        UserError: a column contains something else. The message gives the first such row.
    """
    for name in known_columns(rows, columns):
        feature = rows.features[name]
        may_list = name.endswith(TOKENS_END) or name in POSITIVES
        if isinstance(feature, List):
            if not may_list:
                raise UserError(f"{source}: {not_tokens(name)}")
            parts = pc.list_flatten(rows.select_columns(name).with_format("arrow")[:][name])
            whole = parts.null_count == 0
            feature = feature.feature
        else:
            whole = True
        if whole and feature in (Value("string"), Value("large_string"), Value("null")):
            continue
        values = rows[name][:]
        kind = str
        if may_list and isinstance(next((value for value in values if value is not None), None), list):
            kind = list
        for row, value in enumerate(values, 1):
            parts = value if kind is list else [value]
            if value is not None and not (isinstance(value, kind) and all(isinstance(part, str) for part in parts)):
                shown = shortened(repr(value))
                raise UserError(f"{source}, row {row}: column {name!r} contains {shown}; expected text")


def _check_labels(rows: Dataset, columns: Columns, source: str) -> None:
    """Raises UserError if a column `label` marks a row's code as not relevant to its query (a label below 1)."""
    for column in known_columns(rows, LABELS):
        if isinstance(rows.features[column], List):
            raise UserError(
                f"{source}: column {column!r} contains lists; write each positive with its negatives in columns such "
                "as negative_1 (output_format='n-tuple' in sentence-transformers)"
            )
        labels = pd.Series(rows[column][:], dtype=object).astype(str).str.lower().replace({"true": 1, "false": 0})
        wrong = np.flatnonzero(pd.to_numeric(labels, errors="coerce").to_numpy() < 1)
        if len(wrong):
            raise UserError(
                f"{source}, {row_numbers(wrong)}: column {column!r} is {rows[column][int(wrong[0])]}, but every row's "
                f"function counts as relevant to its query; keep only the rows with {column} 1"
            )
    code = known_columns(rows, columns.code)[:1]
    several = bool(code) and isinstance(rows.features[code[0]], List) and not code[0].endswith(TOKENS_END)
    unclear = several and columns.scores == (SCORES,) and not columns.negatives
    queries = known_columns(rows, columns.query)[:1]
    if queries and "score" in rows.column_names and not (known_columns(rows, LABELS) or columns.negatives):
        unclear |= pd.Series(text_ids(row_texts(rows, queries[0]))).duplicated().any()
    if unclear:
        raise UserError(
            f"{source}: scores do not say which functions answer the query; write the negatives in columns such as "
            "negative_1 (output_format='n-tuple' in sentence-transformers)"
        )
    if unread := [name for name in known_columns(rows, UNREAD) if name not in columns.scores]:
        print_on_main(
            f"{source}: ignoring column {unread[0]!r}, because every row's function counts as relevant to its query"
        )


def row_numbers(rows: np.ndarray) -> str:
    """Formats row indices for a message, counting from 1: `rows 1, 4, 5`."""
    shown = ", ".join(str(row + 1) for row in rows[:SHOWN])
    more = ""
    if len(rows) > SHOWN:
        more = f" and {len(rows) - SHOWN:,} more"
    return f"{'row' if len(rows) == 1 else 'rows'} {shown}{more}"


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
    dropped = _empty_columns(rows)
    before = {}
    for chosen, targets in ((columns.query, QUERY_COLUMNS), (columns.code, CODES)):
        present = known_columns(rows, chosen)
        if dropped.issuperset(present):
            dropped.difference_update(present)  # `check_split` names it
        if present and len(chosen) == 1:
            # From `original_string`, an encoder with data flow would read another function.
            dropped |= {*targets, *(CODE_COLUMNS if targets == CODES else ())} - {*chosen}
            before[targets[isinstance(rows.features[chosen[0]], List)]] = chosen[0]
    dropped |= {column} if columns.keeps_url else {column, "url"}
    before = {new: old for new, old in before.items() if old != new}
    rows = rows.remove_columns(known_columns(rows, dropped)).rename_columns({old: new for new, old in before.items()})
    if column not in (None, "url"):
        before["url"] = column
    if ids is None and "url" not in rows.column_names and known_columns(rows, CODES):
        ids = [f"{TEXT_ID}{xxh3_128_hexdigest(json.dumps(text).encode())}" for text in _texts(rows)]
    return (rows if ids is None else rows.add_column("url", ids)), before


def _empty_columns(rows: Dataset) -> set[str]:
    return {name for name in rows.column_names if rows.data.column(name).null_count == len(rows.data)}


def without_empty(rows: Dataset) -> Dataset:
    """Drops the columns without any value. An encoder reads the first column that it knows, which must have values."""
    return rows.remove_columns([*_empty_columns(rows)])


def check_one_code(tables: Mapping[str, Dataset], id_column: str, sources: Mapping[str, str]) -> None:
    """Raises UserError if two rows have the same id but different functions. The message gives both rows."""
    first: dict[str, tuple[str, str]] = {}
    for split, rows in tables.items():
        if not known_columns(rows, CODES):
            continue
        for row, (name, text) in enumerate(zip(rows["url"], _texts(rows), strict=True)):
            known, other = first.setdefault(name, (text, f"{sources[split]}, row {row + 1}"))
            if known != text:
                raise UserError(
                    f"{sources[split]}, row {row + 1}: {id_column} {name!r} belongs to a different function in {other}"
                )


def _texts(rows: Dataset) -> Iterator[str]:
    """Returns each row's function. Joins tokens."""
    return row_texts(rows, known_columns(rows, CODES)[0])


# ---- Texts ----


def known_columns(dataset: Dataset, columns: Iterable[str]) -> list[str]:
    """Returns the columns in `columns` that the data set has, in the order of `columns`."""
    return [name for name in columns if name in dataset.column_names]


def not_tokens(column: str) -> str:
    """Returns the error message for a list in a column whose name does not say that it contains tokens."""
    return (
        f"column {column!r} contains lists of text, which only columns of tokens (NAME{TOKENS_END}) and of several "
        "relevant functions (positives) may contain; rename it, or join each list"
    )


def text_column(dataset: Dataset, columns: Sequence[str], side: str) -> str:
    """Returns the first column in `columns` that the data set has, to read the text of queries or functions from.

    Args:
        side: "query" or "code", for messages.

    Raises:
        UserError: the data set has none of the columns, or the column does not contain text.
    """
    column = next(iter(known_columns(dataset, columns)), None)
    if column is None:
        expected = f"expected {' or '.join(columns)}, or set {side}_column"
        raise UserError(f"no column for the {side}: the rows have {', '.join(dataset.column_names)}; {expected}")
    feature = dataset.features[column]
    kind = dataset.data.schema.field(column).type
    if not isinstance(feature, List) and kind not in (pa.string(), pa.large_string(), pa.null()):
        raise UserError(f"column {column!r} contains {kind}; expected text for the {side}")
    if isinstance(feature, List) and not column.endswith(TOKENS_END):
        raise UserError(not_tokens(column))
    return column


def check_language_column(rows: Dataset, name: str) -> None:
    """Raises UserError if there is no column `language`. `name` is what the message calls the rows."""
    if "language" not in rows.column_names:
        remedy = "add it to the rows, or set language"
        raise UserError(f"{name}: no column 'language', which an encoder with data flow needs to parse code: {remedy}")


def arrow_texts(values: pa.ChunkedArray) -> list[str]:
    """Converts an Arrow column of strings or token lists to strings. Tokens are joined by single spaces."""
    if pa.types.is_null(values.type):
        return [""] * len(values)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values.fill_null("").to_pylist()
    return pc.binary_join(values, " ").fill_null("").to_pylist()


def row_texts(dataset: Dataset, column: str) -> Iterator[str]:
    """Yields each row's text in a column of strings or token lists, reading the data set in small batches."""
    for table in dataset.select_columns(column).with_format("arrow").iter(READ_AT_ONCE):
        yield from arrow_texts(table[column])


def text_ids(texts: Iterable[str]) -> np.ndarray:
    """Returns a 64-bit hash of each text as its id, uint64[rows]. Equal texts have equal ids.

    The probability that any two of 250,000 different texts share an id is 2e-9.
    """
    return np.fromiter((xxh3_64_intdigest(text.encode()) for text in texts), np.uint64)
