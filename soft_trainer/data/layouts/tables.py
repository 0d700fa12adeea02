"""Reads rows with any column names from files, saved data sets and data sets on the Hub."""

from __future__ import annotations

import ast
import csv
import glob
import itertools
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from datasets import (
    ClassLabel,
    Dataset,
    Features,
    LargeList,
    List,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError

from soft_trainer.data.array_cache import cached_dataset, no_bar_for_few
from soft_trainer.data.column_names import may_hold_lists
from soft_trainer.data.layouts.files import SHARD, SPLIT_NAMES, check_names, check_spelling, files_of, files_of_splits
from soft_trainer.errors import UserError
from soft_trainer.files import check_encodable, check_utf8, open_text, read_json_lines
from soft_trainer.fingerprints import file_fingerprint, fingerprint

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
READ_AS = {"csv": {"keep_default_na": False, "na_values": [""]}}  # `null` and `NA` are ordinary words
# Parts of error messages about missing rows: from `datasets` for a file with only a header and for an empty saved data
# set, from pandas for an empty file, and from Arrow for an empty Parquet file.
WITHOUT_ROWS = (
    "corresponds to no data",
    "list index out of range",
    "No columns to parse",
    "BatchSize must be greater than 0",
)
logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # it raises what it logs
LABELS = ("label", "labels")  # columns that say whether a row's code answers its query
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_saved(folder: Path) -> bool:
    """Returns True if a folder contains a data set saved with `Dataset.save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def format_of(name: str) -> str | None:
    """Returns the format that a file's name implies ("json", "csv" or "parquet"), or None for other files."""
    return FORMATS.get(Path(name.removesuffix(".gz")).suffix.lower())


def split_of(name: str) -> str | None:
    """Returns the split that a file's name refers to, such as "valid" for `dev.csv`, or None for other names."""
    return SPLIT_NAMES.get((_base(name) or "").lower())


def _base(name: str) -> str | None:
    """Strips the endings and the shard number from a file name: `train-00000-of-00002.parquet` becomes `train`.

    Returns:
        The rest of the name, or None if the file does not contain rows.
    """
    if format_of(name):
        return SHARD.sub("", name.split(".")[0])
    return None


def read_splits(path: Path) -> dict[str, Dataset]:
    """Reads rows from a file, a folder of files, or a folder written by `save_to_disk`. Returns them keyed by split.

    Raises:
        UserError: the rows cannot be read.
    """
    with _reading(path):
        if path.is_dir() and is_saved(path):
            loaded = load_from_disk(str(path))
        else:
            loaded = _read_files(path)
    return named_splits(loaded if isinstance(loaded, dict) else {"train": loaded})


def named_splits(loaded: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """Renames splits such as `dev` or `validation` to `train`, `valid`, `test` and `codebase`.

    Splits with other names are skipped. If all names are unknown, all rows become `train`.

    Raises:
        UserError: two names stand for the same split, or a name is similar to the name of a missing split.
    """
    check_names(loaded)
    plain = {name: with_plain_text(rows) for name, rows in loaded.items()}
    splits = {SPLIT_NAMES[name.lower()]: rows for name, rows in plain.items() if name.lower() in SPLIT_NAMES}
    return splits or {"train": concatenate_datasets(list(plain.values()))}


@contextmanager
def _reading(source: str | Path) -> Iterator[None]:
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


def with_class_names(rows: Dataset) -> Dataset:
    """Replaces the numbers in `ClassLabel` columns, such as `language`, with their names, except in `label`."""
    for name, feature in rows.features.items():
        if isinstance(feature, ClassLabel) and name not in LABELS:
            names = [None if value in (None, -1) else feature.int2str(value) for value in rows[name]]
            rows = rows.remove_columns(name).add_column(name, names, feature=Value("string"))
    return rows


def with_plain_text(rows: Dataset) -> Dataset:
    """Casts `large_string` columns, which pandas and polars write, to `string`, so that tables can be concatenated.

    Also replaces the numbers in `ClassLabel` columns with their names.
    """
    rows = with_class_names(rows)
    large = Value("large_string")
    plain = Value("string")
    tokens = [List(large), LargeList(large), LargeList(plain)]
    features = Features(rows.features)
    for name, feature in rows.features.items():
        if feature == large:
            features[name] = plain
        elif feature in tokens:
            features[name] = List(plain)
    if features == rows.features:
        return rows
    with no_bar_for_few(rows):
        return rows.cast(features)


def names_splits(source: Path) -> bool:
    """Returns True if a source has named splits: a file such as `train.csv`, a folder of them, or a `DatasetDict`."""
    if is_saved(source):
        return (source / "dataset_dict.json").is_file()
    if source.is_dir():
        return bool(files_of_splits(source, split_of))
    return split_of(source.name) is not None


def row_files(source: Path) -> dict[str, list[Path]]:
    """Returns the paths of the row files in a folder, or of a single file, keyed by split.

    If no file is named after a split, all files belong to train. Otherwise, files with other names are skipped.

    Raises:
        UserError: two files belong to the same split but are not shards, or their names differ only in the format.
    """
    if not source.is_dir():
        split = split_of(source.name) or "train"
        return {split: [source]} if format_of(source.name) else {}
    named = files_of_splits(source, split_of)
    if named:
        check_spelling([path for name, path in files_of(source).items() if format_of(name)], named)
        return named
    unnamed = list(itertools.chain.from_iterable(files_of_splits(source, _base).values()))
    return {"train": unnamed} if unnamed else {}


def _read_files(source: Path) -> dict[str, Dataset]:
    """Reads the row files of a folder, or a single file, and returns the rows keyed by split."""
    files = row_files(source)
    if not files:
        raise UserError(
            f"{source}: no rows; expected JSON Lines, CSV or Parquet files, such as train.jsonl or rows.csv"
        )
    return {split: concatenate_datasets(list(map(_read_file, paths))) for split, paths in files.items()}


def _read_file(path: Path) -> Dataset:
    """Reads one JSON Lines, CSV or Parquet file. Caches the rows under a fingerprint of the file's content."""
    reader = format_of(path.name)
    options = READ_AS.get(reader, {})
    if reader != "parquet":
        check_utf8(path)
    if reader == "csv":  # all values are read as strings, so that an id such as 013 keeps its zero
        with _reading(path):
            _check_fields(path)
            names = pd.read_csv(path, nrows=0).columns
        options = options | {"features": Features(dict.fromkeys(names, Value("string")))}
    made_from = fingerprint(file_fingerprint(path), reader, repr(options))

    def build(stored: Path) -> Dataset:
        if ".jsonl" in path.name.lower():
            next(read_json_lines(path), None)  # Arrow crashes if the first line is not an object
        kept = {"cache_dir": str(stored.with_suffix("")), "download_mode": "force_redownload"}
        return load_dataset(reader, data_files=glob.escape(str(path)), split="train", **kept, **options)

    with _reading(path):
        try:
            return with_plain_text(cached_dataset(made_from, build))
        except DatasetGenerationError:
            if ".jsonl" in path.name.lower():
                check_encodable(read_json_lines(path, replace=False))  # raises an error with the row
            raise


def _check_fields(path: Path) -> None:
    """Checks that each row of a CSV file has as many fields as the header, because pandas would shift longer rows.

    Raises:
        UserError: a row has another number of fields, or a quote is unbalanced. The message gives the line. Or the
            header is not separated by commas.
    """
    limit = csv.field_size_limit(sys.maxsize)  # a field is a whole function
    try:
        with open_text(path, newline="") as file:
            rows = csv.reader(file, strict=True)
            header = next(rows, [])
            if len(header) == 1 and (separator := next(filter(header[0].__contains__, ";\t|"), None)):
                raise UserError(f"{path}: columns must be separated by commas, not by {separator!r}")
            lists = [place for place, name in enumerate(header) if may_hold_lists(name)]
            line = rows.line_num
            for row in rows:
                if row and len(row) != len(header):
                    raise UserError(_wrong_fields(path, line + 1, row, header))
                for place in lists if row else ():
                    if _is_list(row[place]):
                        name = header[place]
                        raise UserError(
                            f"{path}, line {line + 1}: column {name!r} contains a list, which a CSV file cannot hold; "
                            "use JSON Lines, or one row per positive with its negatives in columns such as negative_1"
                        )
                line = rows.line_num
    except csv.Error as error:
        raise UserError(
            f"{path}, line {line + 1}: {error}; put a field with commas, quotes or several lines in quotes, and write "
            'each quote inside it twice ("")'
        ) from error
    finally:
        csv.field_size_limit(limit)


def _is_list(value: str) -> bool:
    """Returns True for the text of a list of strings, as pandas and JSON write it."""
    if not value.startswith(("['", '["')):
        return False
    try:
        return isinstance(ast.literal_eval(value), list)
    except (ValueError, SyntaxError):  # for example Ruby code
        return False


def _wrong_fields(path: Path, line: int, row: list[str], header: list[str]) -> str:
    """Returns the error message for a row of a CSV file whose number of fields differs from the header's."""
    remedy = "each row needs all fields, even if some are empty"
    if len(row) > len(header):
        remedy = "put a field that contains a comma in quotes"
    if len(row) == len(header) + 1:
        remedy += "; if the first field is a row name written by R, write the file with row.names=FALSE"
    return f"{path}, line {line}: {len(row)} instead of {len(header)} fields ({', '.join(header)}); {remedy}"
