"""Reads a source of any kind (files, the Hub, Python objects) as tables, keyed by split."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
from datasets import Dataset, IterableDataset

from soft_trainer.data.languages import tables_in
from soft_trainer.data.layouts.codesearchnet import load_hub
from soft_trainer.data.layouts.files import SPLIT_NAMES, check_names
from soft_trainer.data.layouts.tables import file_places, name_skipped, names_splits, read_splits
from soft_trainer.data.plain_columns import AT_ONCE, plain_table, table_of, tables_of, with_plain_text, write_tables
from soft_trainer.errors import UserError
from soft_trainer.fingerprints import file_fingerprint
from soft_trainer.terminal import print_on_main

TRANSFORMED_AT_ONCE = 1000  # rows


@dataclass(frozen=True)
class Tables:
    """The rows of one source as they stand there, keyed by split.

    Args:
        place: the source, for messages.
        places: the files of some splits, for messages.
        named: whether the source says which rows are which split. Otherwise, all of them are in train.
    """

    rows: Mapping[str, Dataset]
    place: str
    places: Mapping[str, str]
    named: bool = True


def read_tables(source, codebase=None, language: str | None = None, revision: str | None = None) -> Tables:
    """Reads the tables of a source.

    Args:
        codebase, language, revision: see `load_rows`.

    Raises:
        UserError: the rows cannot be read, or a split has no row in the language.
    """
    place = "the rows"
    places = {}
    named = True
    hub = isinstance(source, str | Path) and not Path(source).exists()
    if hub:
        place = str(source)
        tables = load_hub(place, language, revision)
    elif isinstance(source, str | Path):
        path = Path(source)
        place = str(source)
        tables = read_splits(path)
        places = file_places(path)
        named = names_splits(path)
        name_skipped(path)
    elif isinstance(source, Mapping):
        check_names(source)
        tables = {SPLIT_NAMES[name]: as_rows(rows, name) for name, rows in source.items()}
    else:
        place = "the data frame" if isinstance(source, pd.DataFrame) else place
        tables = {"train": as_rows(source, place)}
    if codebase is not None:
        tables["codebase"] = as_rows(codebase, "codebase")
    if language is not None and not hub:
        tables = tables_in(tables, language, place)
    return Tables(tables, place, places, named)


def as_rows(rows, name: str) -> Dataset:
    """Converts a list of dicts, a data frame or a `Dataset` to a `Dataset` that has no format set.

    A stream, an `IterableDataset`, is written to the cache first.

    Raises:
        UserError: the list is empty, two columns of a data frame have the same name, or the rows have another type.
    """
    if isinstance(rows, Dataset):
        if rows.format["type"] == "custom":
            return _transformed(rows, name)
        return with_plain_text(rows.with_format(None) if rows.format["type"] else rows)  # columns are then lists
    if isinstance(rows, IterableDataset):
        return with_plain_text(_stored(rows, name))
    if isinstance(rows, pd.DataFrame):
        frame = rows.set_axis(rows.columns.map(str), axis=1)
        repeated = frame.columns[frame.columns.duplicated()]
        if len(repeated):
            raise UserError(f"{name}: two columns are called {repeated[0]!r}; rename one of them")
        return Dataset(plain_table(dict(frame.items()), name))
    if hasattr(rows, "__arrow_c_stream__"):  # a frame of polars, or an Arrow table
        table = pa.table(rows)
        return Dataset(plain_table(dict(zip(table.column_names, table.columns, strict=True)), name))
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        if not rows:
            raise UserError(f"{name}: there are no rows")
        return Dataset(table_of(rows, name))
    if isinstance(rows, str | Path):
        raise UserError(f"{name}={rows}: expected rows, not a name; load them with load_rows first")
    raise UserError(f"{name}: expected a datasets.Dataset, a data frame or a list of dicts, not {type(rows).__name__}")


def _transformed(rows: Dataset, name: str) -> Dataset:
    """Applies the function of `Dataset.with_transform` to all rows once, because texts are read before training."""
    print_on_main(f"{name}: applying the transform of the data set once, to all rows")

    def outputs() -> Iterator[dict]:
        for batch in rows.iter(TRANSFORMED_AT_ONCE):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    return Dataset(table_of(outputs(), name))


def _stored(rows: IterableDataset, name: str) -> Dataset:
    """Writes a stream to the cache, in a file that is named after its content.

    Declared features decide the types of the columns, otherwise the first 10,000 rows.

    Raises:
        UserError: the stream has no rows, or later rows have other columns or types.
    """
    print_on_main(f"{name}: writing the stream to the cache")
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "soft_trainer"
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{os.getpid()}.stream"
    kinds = rows.features
    tables = tables_of(rows, name, set())
    if kinds is not None:
        batches = map(kinds.encode_batch, rows.iter(AT_ONCE))
        tables = (pa.Table.from_pydict(batch, kinds.arrow_schema) for batch in batches)
    try:
        if not write_tables(tables, aside, kinds):
            raise UserError(
                f"{name}: the stream has columns or types that its first {AT_ONCE:,} rows do not have; declare them "
                "(features= of the IterableDataset)"
            )
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{name}: {error}") from error
    stored = folder / f"{file_fingerprint(aside)}.arrow"
    os.replace(aside, stored)
    found = Dataset.from_file(str(stored))
    print_on_main(f"{name}: {len(found):,} rows of the stream are in the cache")
    return found
