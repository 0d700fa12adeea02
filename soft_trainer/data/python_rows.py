"""Converts rows that are passed from Python: data frames, lists of dicts and data sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import chain

import pandas as pd
import pyarrow as pa
from datasets import Dataset, Value

from soft_trainer.data.columns import (
    ANY_COLUMNS,
    TEXT_ID,
    ColumnNames,
    chosen_columns,
    source_names,
    standard_rows,
    with_text_ids,
)
from soft_trainer.data.joining import join_sources
from soft_trainer.data.judgments import CODE_COLUMNS, QUERY_COLUMNS, Split
from soft_trainer.data.layouts.tables import with_plain_text
from soft_trainer.data.tokens import columns_in
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError


def from_frame(frame: pd.DataFrame, name: str = "the data frame") -> Dataset:
    """Converts a data frame, without its index. Names of columns become text.

    Raises:
        UserError: two columns have the same name, or a column has values of several types.
    """
    frame = frame.set_axis(frame.columns.map(str), axis=1)
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise UserError(f"{name}: two columns are called {repeated[0]!r}: rename one of them")
    try:
        return with_plain_text(Dataset.from_pandas(frame, preserve_index=False))
    except pa.ArrowException as error:
        raise UserError(f"{name}: {' '.join(str(error).split())}") from error


def as_rows(rows, name: str) -> Dataset | Split | None:
    """Converts a list of dicts, a data frame or a `Dataset` to a `Dataset` without a format.

    A `Split` is returned unchanged.

    Raises:
        UserError: the list is empty, or the rows have another type, such as `IterableDataset`, which has no row
            numbers.
    """
    if isinstance(rows, Dataset) and rows.format["type"]:
        return rows.with_format(None)  # without a format, columns are lists
    if rows is None or isinstance(rows, Dataset | Split):
        return rows
    if isinstance(rows, pd.DataFrame):
        return from_frame(rows, name)
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        if not rows:
            raise UserError(f"{name}: there are no rows")
        # `from_list` would drop the columns that the first row lacks.
        names = dict.fromkeys(chain.from_iterable(rows))
        return Dataset.from_list([dict.fromkeys(names) | row for row in rows])
    raise UserError(
        f"{name}: expected a datasets.Dataset, a data frame or a list of dicts, not {type(rows).__name__}; "
        "estimators and masks know a row by its number, so rows of a stream must be collected first"
    )


def as_split(
    rows, name: str, columns: ColumnNames = ANY_COLUMNS, profile: EncoderProfile | None = None
) -> Split | None:
    """Converts pairs of a query and a code to a `Split`. Anything that `as_rows` converts is accepted.

    Args:
        rows: the pairs, or a dict of several sources.
        profile: the encoder's profile, which is needed to join several sources.

    Raises:
        UserError: the rows have another type, a named column is missing, or no row has a code.
    """
    if rows is None or isinstance(rows, Split):
        return rows
    if isinstance(rows, Mapping):
        if not rows:
            raise UserError(f"{name}: the dict has no data set")
        parts = {key: as_split(part, f"{name}[{key!r}]", columns) for key, part in rows.items()}
        return join_sources(parts, profile)
    given = {name: as_rows(rows, name)}
    called = source_names(given, columns, chosen_columns(given, columns.query, columns.code, name, quiet=True))
    (pairs,) = standard_rows(given, name, columns).values()
    for column in columns_in(pairs, (*CODE_COLUMNS, *QUERY_COLUMNS)):
        if pairs.features[column] == Value("null"):
            raise UserError(f"{name}: column {column!r} is missing or empty in all rows")
    return dataclasses.replace(Split.from_pairs(pairs), called=called)


def as_evaluations(sets, corpora, columns: ColumnNames = ANY_COLUMNS):
    """Gives evaluation rows and their corpora CodeSearchNet's columns.

    Args:
        sets: one set of rows, or a dict of them.
        corpora: one corpus for all of them, a dict with the same keys, or None.

    Returns:
        The sets and the corpora in the same form.
    """
    sets = as_row_sets(sets, "eval_dataset")
    corpora = as_row_sets(corpora, "codebase")
    tables = sets if isinstance(sets, Mapping) else {"eval_dataset": sets}
    tables = {key: rows for key, rows in tables.items() if isinstance(rows, Dataset)}
    changed = {}
    if isinstance(corpora, Mapping):
        corpora = dict(corpora)
        for key in tables.keys() & corpora.keys():
            both = {key: tables[key], "codebase": corpora[key]}
            changed[key], corpora[key] = _with_common_ids(both, columns).values()
    elif tables:
        together = dict(tables)
        if corpora is not None:
            together["codebase"] = corpora
        changed = _with_common_ids(together, columns)
        if corpora is not None:
            corpora = changed.pop("codebase")
    if isinstance(sets, Mapping):
        return sets | changed, corpora
    return changed.get("eval_dataset", sets), corpora


def _with_common_ids(tables: Mapping[str, Dataset], columns: ColumnNames) -> dict[str, Dataset]:
    """Gives tables standard columns, and ids derived from the codes unless some of them have their own ids."""
    standard = standard_rows(tables, "eval_dataset", columns, quiet=True)
    for rows in standard.values():
        if "url" in rows.column_names and not str(rows["url"][0] if len(rows) else "").startswith(TEXT_ID):
            return standard
    return with_text_ids(standard)


def as_row_sets(rows, name: str) -> Dataset | Split | dict[str, Dataset | Split] | None:
    """Applies `as_rows` to one set of rows, or to every set in a dict. Returns a `Split` unchanged."""
    if isinstance(rows, Split):
        return rows
    if isinstance(rows, Mapping):
        if not rows:
            raise UserError(f"{name}: the dict has no data set")
        return {key: as_row_sets(part, f"{name}[{key!r}]") for key, part in rows.items()}
    return as_rows(rows, name)
