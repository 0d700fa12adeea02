"""Converts the columns of any source to Arrow types that `datasets` supports, with all values as they stand."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath

import pandas as pd
import pyarrow as pa
from datasets import Dataset, Features, Json, concatenate_datasets

from soft_trainer.data.array_cache import no_bar_for_few
from soft_trainer.terminal import print_on_main

AT_ONCE = 10_000  # rows; an Arrow column of strings with 32-bit offsets holds at most 2 GiB
MIXED = pa.json_()  # the type of a column whose values have several types, such as 5 and "five"
TEXT_LIKE = (uuid.UUID, PurePath, pd.Period, pd.Interval)  # the text of such a value identifies it


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the plain type for text, bytes and lists that are large, viewed or encoded, also inside other types."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    return kind


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Converts an Arrow column to a type that `datasets` supports. Other types become text or JSON.

    Raises:
        ValueError, TypeError: the values have no such form.
    """
    kind = plain_type(column.type)
    chunks = []
    for chunk in column.chunks:
        for start in range(0, len(chunk), AT_ONCE):
            part = chunk.slice(start, AT_ONCE)
            if kind != column.type:
                part = _cast(part, kind)
            chunks.append(part)
    column = pa.chunked_array(chunks, kind)
    try:
        Features.from_arrow_schema(pa.schema({"column": kind}))
    except ValueError:
        return _as_text_or_json(column.to_pylist())
    return column


def _cast(part: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return part.cast(kind)
    except pa.ArrowNotImplementedError:  # for example a dictionary inside a list
        return pa.array(part.to_pylist(), kind)


def column_of(values: Sequence) -> pa.ChunkedArray:
    """Makes an Arrow column from Python values.

    UUIDs, paths, periods and large integers become text. Values of several types become JSON, which `datasets` decodes
    when they are read.

    Raises:
        ValueError, TypeError: a value has no such form. UnicodeEncodeError, a ValueError: a text contains half of a
            character.
    """
    values = list(values)
    for read in (pa.array, _without_nan):
        try:
            column = pa.chunked_array([read(values)])
            if isinstance(column.type, pa.BaseExtensionType):
                break
            return plain_column(column)
        except UnicodeEncodeError:
            raise
        except (pa.ArrowException, OverflowError):
            continue
    return _as_text_or_json(values)


def _as_text_or_json(values: list) -> pa.ChunkedArray:
    """Makes a column of text from UUIDs and the like, or a column of JSON."""
    if all(value is None or isinstance(value, TEXT_LIKE) for value in values) or _are_large_numbers(values):
        return pa.chunked_array([pa.array([None if value is None else str(value) for value in values], pa.string())])
    encoded = [None if value is None else json.dumps(value) for value in values]
    for text in filter(None, encoded):
        Json().decode_example(text)  # raises a ValueError for an integer of more than 64 bits
    return pa.chunked_array([pa.array(encoded, MIXED)])


def _are_large_numbers(values: list) -> bool:
    """Returns True for integers that Arrow cannot store in 64 bits, such as ids."""
    numbers = [value for value in values if value is not None]
    return all(type(value) is int for value in numbers) and any(value >= 2**64 for value in map(abs, numbers))


def _without_nan(values: list) -> pa.Array:
    """Makes an array in which NaN, pandas' missing text, is missing."""
    return pa.array(values, from_pandas=True)


def joined(chunks: Sequence[pa.Array | pa.ChunkedArray]) -> pa.ChunkedArray:
    """Concatenates parts of a column. Parts of different types become JSON, unless one type holds the others."""
    try:
        tables = [pa.table({"column": chunk}) for chunk in chunks]
        return plain_column(pa.concat_tables(tables, promote_options="permissive").column("column"))
    except pa.ArrowException:
        values = []
        for chunk in chunks:
            parts = chunk.to_pylist()
            if chunk.type == MIXED:
                parts = [None if part is None else json.loads(part) for part in parts]
            values += parts
        return column_of(values)


def table_of(rows: Iterable[Mapping], place: str) -> pa.Table:
    """Makes an Arrow table from rows that may have different keys. A key that a row lacks is None.

    Columns that cannot be converted are dropped, and their names are printed.

    Args:
        place: where the rows come from, for messages.

    Raises:
        UnicodeEncodeError: a text contains half of a character.
    """
    chunks: dict[str, list] = {}
    failed: dict[str, Exception] = {}
    rows_before = 0
    for batch in _batches(rows):
        for name in dict.fromkeys(name for row in batch for name in row):
            chunks.setdefault(name, [pa.nulls(rows_before)])
        for name, parts in chunks.items():
            try:
                parts.append(column_of([row.get(name) for row in batch]))
            except UnicodeEncodeError:
                raise
            except (ValueError, TypeError) as error:
                failed[name] = error
        rows_before += len(batch)
    columns = {}
    for name, parts in chunks.items():
        if name in failed:
            continue
        try:
            columns[str(name)] = joined(parts)
        except (ValueError, TypeError) as error:
            failed[name] = error
    name_dropped(failed, place)
    return pa.table(columns)


def table_of_frame(frame: pd.DataFrame, place: str) -> pa.Table:
    """Makes an Arrow table from a data frame, without its index. See `table_of`."""
    columns = {}
    failed = {}
    for name in frame.columns:
        try:
            columns[name] = _column_of_series(frame[name])
        except UnicodeEncodeError:
            raise
        except (ValueError, TypeError) as error:
            failed[name] = error
    name_dropped(failed, place)
    return pa.table(columns)


def _column_of_series(series: pd.Series) -> pa.ChunkedArray:
    try:
        column = pa.array(series, from_pandas=True)
        if not isinstance(column.type, pa.BaseExtensionType):
            if isinstance(column, pa.Array):
                column = pa.chunked_array([column])
            return plain_column(column)
    except UnicodeEncodeError:
        raise
    except (pa.ArrowException, OverflowError):
        pass
    return column_of(series.astype(object).where(series.notna(), None).tolist())


def plain_table(table: pa.Table, place: str) -> pa.Table:
    """Converts the columns of an Arrow table, from a file or another library's frame. See `table_of`."""
    columns = {}
    failed = {}
    for name in table.column_names:
        try:
            columns[name] = plain_column(table.column(name))
        except (ValueError, TypeError) as error:
            failed[name] = error
    name_dropped(failed, place)
    return pa.table(columns)


def name_dropped(failed: Mapping[str, Exception], place: str) -> None:
    """Prints the columns that are dropped because their values are neither text, numbers, dates nor lists of these."""
    for name, error in failed.items():
        reason = " ".join(str(error).split())
        print_on_main(f"{place}: dropped column {name!r}, which cannot be stored ({reason})")


def concatenated(parts: Sequence[Dataset]) -> Dataset:
    """Concatenates data sets that may differ in columns, or in the types of a column."""
    try:
        return concatenate_datasets(list(parts))
    except (ValueError, TypeError, pa.ArrowException):
        names = dict.fromkeys(name for rows in parts for name in rows.column_names)
        columns = {}
        failed = {}
        for name in names:
            chunks = []
            for rows in parts:
                if name in rows.column_names:
                    chunks.append(rows.with_format("arrow")[:][name])
                else:
                    chunks.append(pa.nulls(len(rows)))
            try:
                columns[name] = joined(chunks)
            except (ValueError, TypeError) as error:
                failed[name] = error
        name_dropped(failed, "the rows")
        return Dataset(pa.table(columns))


def plain_rows(rows: Dataset) -> Dataset:
    """Casts the columns of a data set that have large, viewed or dictionary-encoded text or lists to plain ones."""
    features = Features(rows.features)
    for field in rows.data.schema:
        kind = plain_type(field.type)
        if kind != field.type:
            features |= Features.from_arrow_schema(pa.schema({field.name: kind}))
    if features == rows.features:
        return rows
    with no_bar_for_few(rows):
        return rows.cast(Features(features))


def _batches(rows: Iterable[Mapping]) -> Iterator[list[Mapping]]:
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
