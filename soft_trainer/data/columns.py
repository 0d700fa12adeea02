"""Finds the query, code and id columns in rows with any column names, and renames them to CodeSearchNet's names."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow.compute as pc
from datasets import Dataset, List, Value
from xxhash import xxh3_128_hexdigest

from soft_trainer.data.array_cache import flat
from soft_trainer.data.column_names import (
    CODE_COLUMNS,
    CODES,
    COLUMNS_OF,
    NEGATIVE_NAMES,
    PAIRS,
    POSITIVES,
    QUERY_COLUMNS,
    TEXT_ID,
    TOKENS_END,
)
from soft_trainer.data.split import QUERY_ROW
from soft_trainer.data.tokens import columns_in, not_tokens
from soft_trainer.errors import UserError
from soft_trainer.terminal import nearest, print_on_main, shortened

RECOGNISED = tuple(dict.fromkeys((*QUERY_COLUMNS, *CODES, *chain.from_iterable(PAIRS), *NEGATIVE_NAMES)))
# Words in the names of columns that people expect to be read. FlagEmbedding reads an instruction from `prompt`.
LOOKS_LIKE = {"pos", "positive", "positives", "neg", "negs", "negative", "negatives", "prompt", "instruction"}


class ColumnNames(NamedTuple):
    """The columns that a user has named in options such as `query_column`. Others are detected automatically."""

    query: str | None = None
    code: str | None = None
    id: str | None = None
    negatives: str | None = None
    group: str | None = None

    def options(self) -> dict[str, str]:
        """Returns the columns that are named, keyed by option, such as `{"query_column": "question"}`."""
        return {f"{kind}_column": name for kind, name in self._asdict().items() if name is not None}


ANY_COLUMNS = ColumnNames()


def chosen_columns(
    data: dict[str, Dataset], query: str | None, code: str | None, source: str, quiet: bool = False
) -> dict[str, Sequence[str]]:
    """Chooses the columns to read queries and functions from, and prints detected names such as `anchor`.

    Args:
        data: the rows, keyed by split.
        query, code: the names that the user has set, or None.
        source: where the rows come from, for messages.
        quiet: True to print nothing.

    Returns:
        The candidate columns in order of preference, keyed by "query" and "code".

    Raises:
        UserError: a column that the user has set does not exist.
    """
    names = list(dict.fromkeys(name for rows in data.values() for name in rows.column_names))
    for option, name in (("query_column", query), ("code_column", code)):
        if name is not None:
            check_column(names, option, name, source)
    if query is not None and query == code:
        raise UserError(f"{source}: query_column and code_column are both {query!r}; set two different columns")
    if not (query or code):
        query, code = _recognised_pair(data, source)
        if query is not None and code is not None and not quiet:
            print_on_main(f"{source}: reading queries from column {query!r} and functions from {code!r}")
    return {"query": (query,) if query else QUERY_COLUMNS, "code": (code,) if code else CODES}


def check_column(names: Sequence[str], option: str, name: str, source: str) -> None:
    """Raises UserError if rows with the columns `names` lack the column that the user has set in `option`."""
    if name not in names:
        raise UserError(
            f"{source}: {option}={name}: no such column; the rows have {', '.join(names)}{nearest(name, names)}"
        )


def _recognised_pair(data: Mapping[str, Dataset], source: str) -> tuple[str | None, str | None]:
    """Returns the query and the code column of a pair in `PAIRS`. Both are None for CodeSearchNet's columns.

    If no pair is complete, the result has a column of one side, so that the error is about the other side.

    Raises:
        UserError: a table has two complete pairs with different code columns.
    """
    names = set()
    for rows in data.values():
        names.update(rows.column_names)
        pairs = _complete_pairs({*rows.column_names})
        for query, code in pairs:
            if code != pairs[0][1]:
                both = f"{pairs[0][0]!r} with {pairs[0][1]!r} and {query!r} with {code!r}"
                raise UserError(
                    f"{source}: the rows have two pairs of columns, {both}; set query_column and code_column"
                )
    within = [pair for rows in data.values() for pair in _complete_pairs({*rows.column_names})]
    pairs = within or _complete_pairs(names)  # queries and functions may be in separate tables
    if pairs and pairs[0] in PAIRS:
        return pairs[0]
    if names & {*QUERY_COLUMNS, *CODES}:
        return None, None
    for query, _ in PAIRS:
        if query in names:
            return query, None
    return None, next((code for _, code in PAIRS if code in names), None)


def _complete_pairs(names: Collection[str]) -> list[tuple[str, str]]:
    """Returns the pairs in `PAIRS` whose columns are both in `names`, and CodeSearchNet's pair at the end."""
    pairs = [pair for pair in PAIRS if {*pair} <= {*names}]
    queries = [name for name in QUERY_COLUMNS if name in names]
    codes = [name for name in CODES if name in names]
    if queries and codes and not any(code in codes for _, code in pairs):
        pairs.append((queries[0], codes[0]))
    return pairs


def name_unused(names: Iterable[str], used: Collection[str], place: str) -> None:
    """Prints the unused columns whose names look like recognised ones, such as `hard_negatives` or `codes`.

    Args:
        names: all columns of the rows.
        used: the columns that are read.
        place: where the rows come from, for messages.
    """
    unused = []
    for name in names:
        plain = name.lower().rstrip("_0123456789")
        alike = LOOKS_LIKE.intersection(re.findall("[a-z]+", plain))
        if name not in used and (alike or difflib.get_close_matches(plain, RECOGNISED, cutoff=0.8)):
            unused.append(name)
    if unused:
        print_on_main(
            f"{place}: not using {', '.join(map(repr, unused))}; the recognised columns are {', '.join(RECOGNISED)}"
        )


def with_positives(rows: Dataset, columns: Sequence[str], place: str, check: bool) -> Dataset:
    """Repeats each row whose code column lists several positives, so that each row has one of them.

    A column `QUERY_ROW` then has the number of the original row. Rows without such a column stay unchanged.

    Args:
        columns: the code columns that `chosen_columns` found.
        place: where the rows come from, for messages.
        check: whether a row without a positive is an error.

    Raises:
        UserError: a list contains something other than text, or is empty.
    """
    column = columns[0]
    if column not in POSITIVES or column not in rows.column_names or not _has_tokens(rows, column, place):
        return rows
    owners = []
    positives = []
    blank = 0
    for row, every in enumerate(rows[column][:]):
        texts = [text for text in every or () if text.strip()]
        blank += len(every or ()) - len(texts)
        if check and not texts:
            raise UserError(f"{place}, row {row + 1}: column {column!r} is missing or empty; fill in or drop this row")
        owners += [row] * max(len(texts), 1)
        positives += texts or [None]
    if blank:
        print_on_main(f"{place}: skipped {blank:,} empty texts in lists of column {column!r}")
    repeated = flat(rows.remove_columns(column).select(owners))
    return repeated.add_column(column, positives, feature=Value("string")).add_column(QUERY_ROW, owners)


def renamed(data: dict[str, Dataset], columns: Mapping[str, Sequence[str]], source: str) -> dict[str, Dataset]:
    """Renames the query and code columns to CodeSearchNet's names, such as `docstring`. Drops alternative columns.

    Args:
        data: the rows, keyed by split.
        columns: the result of `chosen_columns`.
        source: where the rows come from, for messages.
    """
    for side, targets in COLUMNS_OF.items():
        if columns[side] != targets:
            (name,) = columns[side]
            data = {split: _as_text(rows, name, targets, source) for split, rows in data.items()}
            continue
        for rows in data.values():
            for name in columns_in(rows, targets):
                _has_tokens(rows, name, source)
    return data


def _has_tokens(rows: Dataset, name: str, source: str) -> bool:
    """Returns True for a column of token lists, and False for a column of strings.

    Raises:
        UserError: the column has other values, or a token is missing, or its name does not allow lists. The message
            gives the first such row.
    """
    feature = rows.features[name]
    tokens = isinstance(feature, List)
    if tokens and not name.endswith(TOKENS_END) and name not in POSITIVES:
        raise UserError(f"{source}: {not_tokens(name)}")
    kinds = (str, type(None))
    if (feature.feature if tokens else feature) in (Value("string"), Value("large_string"), Value("null")):
        if not tokens:
            return False
        values = rows.select_columns(name).with_format("arrow")[:][name]
        if pc.list_flatten(values).null_count == 0:
            return True
        kinds = (str,)
    for row, value in enumerate(rows[name][:], 1):
        parts = value if tokens and value is not None else [value]
        if value is not None and not all(isinstance(part, kinds) for part in parts):
            raise UserError(f"{source}, row {row}: column {name!r} contains {shortened(repr(value))}; expected text")
    return tokens


def source_names(
    data: Mapping[str, Dataset], names: ColumnNames, columns: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Returns the original names of renamed columns, such as `{"docstring": "question"}`."""
    found = {}
    for side, targets in COLUMNS_OF.items():
        if columns[side] == targets:
            continue
        (name,) = columns[side]
        for rows in data.values():
            if name in rows.column_names:
                found[targets[isinstance(rows.features[name], List)]] = name
    if names.id is not None:
        found["url"] = names.id
    return {name: called for name, called in found.items() if name != called}


def _as_text(rows: Dataset, name: str | None, targets: tuple[str, str], source: str) -> Dataset:
    """Renames a column, if it exists, to the first of `targets`, or to the second if it contains token lists."""
    if name not in rows.column_names:
        return rows
    tokens = _has_tokens(rows, name, source)
    others = {*targets}
    if targets == CODES:
        others |= {*CODE_COLUMNS}  # an encoder with data flow would read `original_string` first
    rows = rows.remove_columns(columns_in(rows, others - {name}))
    if name == targets[tokens]:
        return rows
    return rows.rename_column(name, targets[tokens])


# ---- Ids ----


def with_ids(
    data: Mapping[str, Dataset],
    columns: Mapping[str, Sequence[str]],
    id_column: str | None,
    places: Mapping[str, str],
) -> dict[str, Dataset]:
    """Renames the id column to `url`, or drops an unrelated `url` column so that the function's text becomes the id.

    `url` remains the id if the rows have CodeSearchNet's columns, or if a split has only queries or only functions.

    Args:
        data: the rows, keyed by split.
        columns: the result of `chosen_columns`.
        id_column: the id column that the user has set, or None.
        places: where the rows of each split come from, for messages.

    Raises:
        UserError: a row has no id, or rows with the same id have different functions. CodeSearchNet's rows are exempt,
            because one url can have several versions of a function.
    """
    names = set().union(*(rows.column_names for rows in data.values()))
    of_text = {*columns["code"]}
    codesearchnet = "url" in names and bool({*QUERY_COLUMNS} & names) and bool({*CODE_COLUMNS} & names)
    if id_column is None and codesearchnet:
        return dict(data)
    if id_column is None and not all(columns_in(rows, of_text) for rows in data.values()):
        return dict(data)
    kept = {split: rows.remove_columns(columns_in(rows, {"url"} - {id_column})) for split, rows in data.items()}
    if id_column is None or id_column in of_text:
        return kept
    for split, rows in kept.items():
        if id_column not in rows.column_names:
            raise UserError(
                f"{places[split]}: id_column={id_column}: no such column; the rows have {', '.join(rows.column_names)}"
            )
        ids = pd.Series(rows[id_column][:], dtype=object)
        blank = np.flatnonzero(ids.isna() | (ids.astype(str).str.strip() == ""))
        if len(blank):
            raise UserError(f"{places[split]}, row {blank[0] + 1}: the id, column {id_column!r}, is missing or empty")
        kept[split] = rows.remove_columns(id_column).add_column("url", ids.astype(str).tolist())
    if not codesearchnet:
        _check_one_code(kept, columns["code"], id_column, places)
    return kept


def _check_one_code(
    data: Mapping[str, Dataset], columns: Sequence[str], id_column: str, places: Mapping[str, str]
) -> None:
    """Raises UserError if two rows have the same id but different functions. The message gives both rows."""
    first: dict[str, tuple[str, str]] = {}
    for split, rows in data.items():
        if not columns_in(rows, columns):
            continue
        for row, (name, text) in enumerate(zip(rows["url"], texts_of(rows, columns), strict=True)):
            known, other = first.setdefault(name, (text, f"{places[split]}, row {row + 1}"))
            if known != text:
                raise UserError(
                    f"{places[split]}, row {row + 1}: {id_column} {name!r} belongs to a different function in {other}"
                )


def with_text_ids(data: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """Adds a missing `url` column, with a hash of each function's text so that equal functions have equal ids."""
    with_urls = dict(data)
    for name, rows in data.items():
        if "url" not in rows.column_names and columns_in(rows, CODES):
            urls = [f"{TEXT_ID}{xxh3_128_hexdigest(json.dumps(text).encode())}" for text in texts_of(rows, CODES)]
            with_urls[name] = rows.add_column("url", urls)
    return with_urls


def texts_of(rows: Dataset, columns: Sequence[str]) -> list[Hashable]:
    """Returns each row's text from the first of `columns` that exists. Joins tokens. Missing texts are None."""
    texts = rows[columns_in(rows, columns)[0]][:]
    if not any(isinstance(text, list) for text in texts):
        return texts
    return [text and " ".join(text) for text in texts]
