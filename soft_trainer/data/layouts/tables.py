"""Reads rows with any column names from files, saved data sets and data sets on the Hub."""

from __future__ import annotations

import csv
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, Features, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from soft_trainer.data.array_cache import cached_dataset
from soft_trainer.data.column_names import NEGATIVE, POSITIVES, is_list_text
from soft_trainer.data.folders import (
    ACCEPTED,
    JUDGMENTS,
    SPLIT_NAMES,
    SPLITS,
    Files,
    check_names,
    format_of,
    name_skipped,
    row_files,
    split_of,
)
from soft_trainer.data.layouts.beir import finds as is_beir
from soft_trainer.data.make_splits import Context, splits_of_tables
from soft_trainer.data.plain_columns import (
    AT_ONCE,
    class_names,
    concatenated,
    joined,
    plain_table,
    tables_of,
    with_plain_text,
    write_tables,
)
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.system.files import (
    open_bytes,
    open_text,
    read_json,
    read_json_lines,
    uncompressed_name,
)
from soft_trainer.system.fingerprints import file_fingerprint, fingerprint

SEPARATORS = {"csv": ",", "tsv": "\t"}
TABLE_FORMAT = 2  # raise it if the same file gives other rows
# Parts of error messages of `datasets` and Arrow about missing rows: of an empty saved data set, of an empty file.
WITHOUT_ROWS = ("corresponds to no data", "list index out of range", "Parquet file size is 0 bytes")
logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # it raises what it logs


def finds(files: Files) -> bool:
    """Returns True if a folder has files of train, valid or test, or was written by `save_to_disk`."""
    if is_beir(files):  # its corpus has other columns
        return False
    return files.is_saved() or not {*map(split_of, files.paths)} <= {"codebase", None}


def read(files: Files, context: Context) -> dict[str, Split]:
    """Reads the splits of a file, of a folder of files, or of a folder written by `save_to_disk`.

    Raises:
        UserError: the rows cannot be read, or `splits_of_tables` fails.
    """
    tables, paths, named = read_tables(files)
    if "train" not in context.needed and {*tables} <= {"train", "codebase"} and JUDGMENTS in files.paths:
        return {}  # the folder's judged queries are measured
    return splits_of_tables(tables, str(files.source), context, paths, named)


def read_tables(files: Files) -> tuple[dict[str, Dataset], dict[str, str], bool]:
    """Reads the tables of a file, of a folder of files, or of a folder written by `save_to_disk`.

    Returns:
        The rows, keyed by split; the path of each split's file, for messages, without splits of several files; and
        whether splits are named: by a file such as `train.csv`, or in a `DatasetDict`.

    Raises:
        UserError: the rows cannot be read.
    """
    source = files.source
    if files.is_saved():
        with reading(source):
            loaded = load_from_disk(str(source))
            named = isinstance(loaded, dict)
            return named_splits(loaded if named else {"train": loaded}), {}, named
    paths = row_files(files)
    if not paths and any(format_of(path.name) for path in source.glob("*/*")):  # a copy of a data set of the Hub
        with reading(source):
            return named_splits(load_dataset(str(source))), {}, True
    if not paths:
        raise UserError(f"{source}: no rows; expected {ACCEPTED} files, such as train.jsonl or rows.csv")
    tables = {split: table_of_files(paths[split]) for split in SPLITS if split in paths}
    name_skipped(files, paths)
    named = split_of(next(iter(paths.values()))[0].name) is not None
    return tables, {split: str(of_split[0]) for split, of_split in paths.items() if len(of_split) == 1}, named


def table_of_files(paths: Sequence[Path]) -> Dataset:
    """Reads the shards of one split, or several files without the name of a split."""
    return with_plain_text(concatenated(list(map(read_file, paths))))


def named_splits(loaded: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """Renames splits such as `dev` or `validation` to `train`, `valid`, `test` and `codebase`.

    Splits with other names are skipped. If all names are unknown, all rows become `train`.

    Raises:
        UserError: two names stand for the same split, or a name is similar to the name of a missing split.
    """
    check_names(loaded)
    plain = {name: with_plain_text(rows) for name, rows in loaded.items()}
    splits = {SPLIT_NAMES[name.lower()]: rows for name, rows in plain.items() if name.lower() in SPLIT_NAMES}
    return splits or {"train": concatenated(list(plain.values()))}


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Turns an error while reading `source` into a one-line UserError that begins with `source`."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, IndexError, DatasetGenerationError, StopIteration) as error:
        reason = (str(error.__cause__ or error).strip() or "it has no rows").splitlines()[0]
        if any(words in reason for words in WITHOUT_ROWS):
            reason = "it has no rows"
        raise UserError(f"{source}: cannot be read: {reason}") from error


def read_file(path: Path) -> Dataset:
    """Reads one file of rows. Caches the rows under a fingerprint of the file's content."""
    reader = format_of(path.name)
    made_from = fingerprint(file_fingerprint(path), path.suffix, reader, TABLE_FORMAT)

    def build(stored: Path) -> Dataset:
        dropped: set[str] = set()
        if not write_tables(batches_of(path, dropped), stored):  # batches have different columns or types
            table = joined(list(batches_of(path, dropped)), str(path), dropped)
            write_tables((table.slice(start, AT_ONCE) for start in range(0, len(table), AT_ONCE)), stored)
        return Dataset.from_file(str(stored))

    with reading(path):
        return cached_dataset(made_from, build)


def batches_of(path: Path, dropped: set[str]) -> Iterator[pa.Table]:
    """Yields the rows of a file in tables of 10,000 rows. `dropped` collects the columns that cannot be stored."""
    reader = format_of(path.name)
    if reader == "parquet":
        return _read_parquet(path, dropped)
    rows = _read_json(path) if reader == "json" else _read_csv(path)
    return tables_of(rows, str(path), dropped)


def _read_parquet(path: Path, dropped: set[str]) -> Iterator[pa.Table]:
    """Reads a Parquet file, plain or compressed. Classes that `datasets` has written become their names."""
    plain = uncompressed_name(path.name) == path.name
    # pyarrow reads a relative path such as `rows:v1.parquet` as a URI, so it gets an open file.
    with pa.OSFile(os.fsencode(path)) if plain else open_bytes(path) as file:
        read = pq.ParquetFile(file if plain else pa.BufferReader(file.read()))
        classes = {}
        if b"huggingface" in (read.schema_arrow.metadata or {}):
            classes = class_names(Features.from_arrow_schema(read.schema_arrow))
        for batch in read.iter_batches(AT_ONCE):
            columns = dict(zip(batch.schema.names, map(pa.chunked_array, zip(batch.columns)), strict=True))
            for name, names in classes.items():
                columns[name] = names.take(pc.if_else(pc.less(columns[name], 0), None, columns[name]))
            yield plain_table(columns, str(path), dropped)


def _read_json(path: Path) -> Iterator[dict]:
    """Yields the rows of a JSON Lines file, or of a JSON file that contains a list of objects.

    Raises:
        UserError: a row is not a JSON object. The message gives the row.
    """
    first = ""
    if ".jsonl" not in path.name.lower():
        with open_text(path) as file:
            first = next(filter(str.strip, iter(lambda: file.read(1), "")), "")
    if first == "[":
        for number, row in enumerate(read_json(path, list), 1):
            if not isinstance(row, dict):
                raise UserError(f"{path}, row {number}: expected a JSON object, not {type(row).__name__}")
            yield row
        return
    for _, row in read_json_lines(path, replace=False):
        yield row


def _read_csv(path: Path) -> Iterator[dict]:
    """Yields the rows of a CSV or TSV file. All values are text, and an empty field is None.

    Raises:
        UserError: a row has another number of fields than the header, or a quote is unbalanced, or a column of
            positives or negatives contains lists. The message gives the line. Or the header has another separator.
    """
    separator = SEPARATORS[format_of(path.name)]
    limit = csv.field_size_limit(sys.maxsize)  # a field is a whole function
    try:
        with open_text(path, newline="") as file:
            rows = csv.reader(file, strict=True, delimiter=separator)
            header = _header(path, next(rows, []), separator)
            lists = [number for number, name in enumerate(header) if name in POSITIVES or NEGATIVE.fullmatch(name)]
            line = rows.line_num
            for row in rows:
                if row and len(row) != len(header):
                    remedy = "each row needs all fields, even if some are empty"
                    if len(row) > len(header):
                        remedy = "put a field that contains a comma in quotes"
                    if len(row) == len(header) + 1:
                        remedy += (
                            "; if the first field is a row name written by R, write the file with row.names=FALSE"
                        )
                    raise UserError(
                        f"{path}, line {line + 1}: {len(row)} instead of {len(header)} fields ({', '.join(header)}); "
                        f"{remedy}"
                    )
                for number in lists if row else ():
                    if is_list_text(row[number]):
                        raise UserError(
                            f"{path}, line {line + 1}: column {header[number]!r} contains a list, which a CSV file "
                            "cannot hold; use JSON Lines, or one row per positive with its negatives in columns such "
                            "as negative_1"
                        )
                if row:
                    yield dict(zip(header, (value or None for value in row), strict=True))
                line = rows.line_num
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line + 1}: {error}; put a field with commas, quotes or several lines in quotes, and write "
            'each quote inside it twice ("")'
        ) from error
    finally:
        csv.field_size_limit(limit)


def _header(path: Path, header: list[str], separator: str) -> list[str]:
    """Returns the names of a CSV file's columns. A column without a name gets the name that pandas gives it.

    Raises:
        UserError: the header has another separator, or two columns have the same name.
    """
    if len(header) == 1 and (other := next(filter(header[0].__contains__, {*";\t|,"} - {separator}), None)):
        expected = {",": "commas", "\t": "tabs"}[separator]
        raise UserError(f"{path}: columns must be separated by {expected}, not by {other!r}")
    names = []
    for number, name in enumerate(header):
        name = name or f"Unnamed: {number}"
        if name in names:
            raise UserError(f"{path}: two columns are called {name!r}; rename one of them")
        names.append(name)
    return names
