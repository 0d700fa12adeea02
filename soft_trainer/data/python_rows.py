"""Converts rows that are passed from Python: data frames, lists of dicts and data sets."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import pandas as pd
import pyarrow as pa
from datasets import Dataset

from soft_trainer.data.judgments import Split
from soft_trainer.data.row_files import with_plain_text
from soft_trainer.errors import UserError


def from_frame(frame: pd.DataFrame, name: str = "the data frame") -> Dataset:
    """Converts a data frame, without its index. Raises UserError if a column has values of several types."""
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
        f"{name}: a datasets.Dataset, a data frame or a list of dicts is expected, not {type(rows).__name__}; "
        "estimators and masks know a row by its number, so rows of a stream must be collected first"
    )


def as_split(rows, name: str) -> Split | None:
    """Converts pairs of a query and a code to a `Split`. Anything that `as_rows` converts is accepted."""
    if rows is None or isinstance(rows, Split):
        return rows
    return Split.from_pairs(as_rows(rows, name))


def as_row_sets(rows, name: str) -> Dataset | Split | dict[str, Dataset | Split] | None:
    """Applies `as_rows` to one set of rows, or to every set in a dict. Returns a `Split` unchanged."""
    if isinstance(rows, Split):
        return rows
    if isinstance(rows, Mapping):
        if not rows:
            raise UserError(f"{name}: the dict has no data set")
        return {key: as_row_sets(part, f"{name}[{key!r}]") for key, part in rows.items()}
    return as_rows(rows, name)
