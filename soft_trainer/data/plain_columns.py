"""Converts columns of any source to Arrow types that `datasets` supports, with all values as they stand."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath

import pandas as pd
import pyarrow as pa
from datasets import ClassLabel, Dataset, Features, Json, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter

from soft_trainer.data.array_cache import no_bar_for_few
from soft_trainer.data.column_names import LABELS
from soft_trainer.errors import UserError
from soft_trainer.system.files import written_aside
from soft_trainer.system.terminal import print_on_main

AT_ONCE = 10_000  # rows; an Arrow column of strings with 32-bit offsets holds at most 2 GiB
TEXT_LIKE = (uuid.UUID, PurePath, pd.Period, pd.Interval)  # the text of such a value identifies it


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the plain type for text, bytes and lists that are large, viewed or encoded, also inside other types."""
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        value = plain_type(kind.value_type)
        return pa.list_(pa.string() if types.is_null(value) else value)  # empty lists only
    if types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    return kind


def arrow_column(values: Sequence | pa.ChunkedArray) -> pa.ChunkedArray:
    """Makes a column from the values of a list, a pandas series or an Arrow table.

    Values of several types, or of a type that `datasets` lacks, become JSON, which `datasets` decodes when it is read.
    Integers of more than 64 bits become text.

    Raises:
        ValueError, TypeError: a value has no such form. UnicodeEncodeError, a ValueError: a text contains half of a
            character.
    """
    try:
        column = values if isinstance(values, pa.ChunkedArray) else pa.array(values, from_pandas=True)
        parts = pa.table({"column": column}).to_batches(AT_ONCE)
        column = pa.Table.from_batches(parts, pa.schema({"column": column.type}))["column"]
        column = column.cast(plain_type(column.type))
        if not isinstance(column.type, pa.BaseExtensionType):
            Features.from_arrow_schema(pa.schema({"column": column.type}))
            return column
    except UnicodeEncodeError:
        raise
    except (pa.ArrowException, OverflowError, ValueError):
        pass
    values = values.to_pylist() if isinstance(values, pa.ChunkedArray) else values
    if all(value is None or type(value) is int for value in values):  # some have more than 64 bits
        return pa.chunked_array([pa.array([None if value is None else str(value) for value in values])])
    encoded = []
    for value in values:
        missing = value is None or (pd.api.types.is_scalar(value) and pd.isna(value))
        encoded.append(None if missing else json.dumps(value, default=_text))
        if encoded[-1]:
            Json().decode_example(encoded[-1])  # raises a ValueError for an integer of more than 64 bits
    return pa.chunked_array([pa.array(encoded, pa.json_())])


def _text(value) -> str:
    if isinstance(value, TEXT_LIKE):
        return str(value)
    raise TypeError(f"{type(value).__name__} is neither text, a number, a date nor a list of these")


def plain_table(
    columns: Mapping[str, Sequence | pa.ChunkedArray], source: str, dropped: set[str] | None = None, start: int = 1
) -> pa.Table:
    """Makes an Arrow table from columns. A column that cannot be stored is dropped, and its name is printed.

    Args:
        dropped: the columns that are dropped from earlier rows. The columns dropped from these rows are added.
        start: the number of the first row, for messages.

    Raises:
        UserError: a text contains half of a character. The message gives the row and the column.
    """
    dropped = set() if dropped is None else dropped
    kept = {}
    for name, values in columns.items():
        if name in dropped:
            continue
        try:
            kept[str(name)] = arrow_column(values)
        except UnicodeEncodeError:
            for row, value in enumerate(values, start):
                try:
                    json.dumps(value, ensure_ascii=False, default=str).encode()
                except UnicodeEncodeError as error:
                    half = error.object[error.start]
                    raise UserError(
                        f"{source}, row {row}: column {name!r} contains {half!r}, half of a character, which UTF-8 "
                        "cannot store; replace it, for example by text.encode(errors='replace').decode()"
                    ) from None
            raise
        except (ValueError, TypeError) as error:
            dropped.add(name)
            reason = " ".join(str(error).split())
            print_on_main(f"{source}: dropped column {name!r}, which cannot be stored ({reason})")
    return pa.table(kept)


def tables_of(rows: Iterable[Mapping], source: str, dropped: set[str]) -> Iterator[pa.Table]:
    """Makes an Arrow table from every 10,000 rows, which may have different keys."""
    rows = iter(rows)
    start = 1
    while batch := list(itertools.islice(rows, AT_ONCE)):
        names = dict.fromkeys(itertools.chain.from_iterable(batch))
        yield plain_table({name: [row.get(name) for row in batch] for name in names}, source, dropped, start)
        start += len(batch)


def table_of(rows: Iterable[Mapping], source: str) -> pa.Table:
    """Makes an Arrow table from rows that may have different keys. A key that a row lacks is None."""
    dropped: set[str] = set()
    return joined(list(tables_of(rows, source, dropped)), source, dropped)


def joined(tables: Sequence[pa.Table], source: str, dropped: Collection[str] = ()) -> pa.Table:
    """Concatenates tables that may differ in columns, without those in `dropped`. Different types become JSON."""
    tables = [table.drop_columns([name for name in table.column_names if name in dropped]) for table in tables]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        pass
    columns = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(table.column_names for table in tables)):
        parts = [table.select([name] if name in table.column_names else []) for table in tables]
        try:
            columns[name] = pa.concat_tables(parts, promote_options="permissive")[name]
        except pa.ArrowException:
            columns[name] = list(itertools.chain.from_iterable(map(_values, parts)))
    return plain_table(columns, source)


def _values(table: pa.Table) -> list:
    """Returns the values of a table's only column, or as many None as the table has rows."""
    if not table.num_columns:
        return [None] * len(table)
    values = table.column(0).to_pylist()
    return [value and json.loads(value) for value in values] if table.schema.types == [pa.json_()] else values


def write_tables(tables: Iterable[pa.Table], path: Path, features: Features | None = None) -> bool:
    """Writes tables to an Arrow file, one after the other. Returns False if later columns or types are new.

    Args:
        features: the types of the columns, if they are declared. By default, the first table has them.

    Raises:
        ValueError: there are no rows.
    """
    tables = iter(tables)
    first = next(tables, None)
    if first is None or not len(first):
        raise ValueError("it has no rows")
    if features is None:
        kinds = {field.name: pa.string() if pa.types.is_null(field.type) else field.type for field in first.schema}
        features = Features.from_arrow_schema(pa.schema(kinds))
    empty = features.arrow_schema.empty_table()
    with written_aside(path) as aside, ArrowWriter(path=str(aside), features=features) as writer:
        for table in itertools.chain([first], tables):
            try:
                table = pa.concat_tables([empty, table], promote_options="default")  # missing values get a type
            except pa.ArrowException:
                return False
            if table.schema.names != empty.schema.names:
                return False
            writer.write_table(table)
        writer.finalize()
    return True


def concatenated(parts: Sequence[Dataset]) -> Dataset:
    """Concatenates data sets that may differ in columns, or in the types of a column."""
    try:
        return concatenate_datasets(list(parts))
    except (ValueError, TypeError, pa.ArrowException):
        return Dataset(joined([rows.with_format("arrow")[:] for rows in parts], "the rows"))


def class_names(features: Features) -> dict[str, pa.Array]:
    """Returns the names of the classes in `ClassLabel` columns, such as `language`, except in `label`."""
    names = {}
    for name, feature in features.items():
        if isinstance(feature, ClassLabel) and name not in LABELS:
            names[name] = pa.array(feature.names)
    return names


def with_plain_text(rows: Dataset) -> Dataset:
    """Casts text of other Arrow types, which pandas and polars write, to `string`, and replaces classes by names."""
    for name, names in class_names(rows.features).items():
        values = [None if value in (None, -1) else names[value].as_py() for value in rows[name]]
        rows = rows.remove_columns(name).add_column(name, values, feature=Value("string"))
    kinds = {field.name: plain_type(field.type) for field in rows.data.schema if plain_type(field.type) != field.type}
    if not kinds:
        return rows
    with no_bar_for_few(rows):
        return rows.cast(Features(rows.features | Features.from_arrow_schema(pa.schema(kinds))))
