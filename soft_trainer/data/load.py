"""Reads rows with any column names from files, a folder, a saved data set or the Hub, and splits them if needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from datasets import Dataset, DatasetDict

from soft_trainer.data.array_cache import flat
from soft_trainer.data.columns import (
    ANY_COLUMNS,
    COLUMNS_OF,
    ColumnNames,
    chosen_columns,
    has_code,
    source_names,
    standard_rows,
    with_text_ids,
)
from soft_trainer.data.dividing import by_partition, divided
from soft_trainer.data.judgments import Split
from soft_trainer.data.layouts.codesearchnet import corpus_of, is_codesearchnet, load_folder, splits_in
from soft_trainer.data.layouts.files import SIDES_OF, SPLITS
from soft_trainer.data.layouts.judged import load_judged
from soft_trainer.data.layouts.tables import is_saved, read_splits, row_files
from soft_trainer.data.places import place_of
from soft_trainer.data.python_rows import from_frame
from soft_trainer.data.row_checks import blank_rows, check_targets
from soft_trainer.data.tokens import columns_in
from soft_trainer.errors import UserError

COLUMN_OPTIONS = ("query_column", "code_column", "id_column")


def load_rows(
    source: str | Path | pd.DataFrame,
    query_column: str | None = None,
    code_column: str | None = None,
    id_column: str | None = None,
    *,
    needed: Sequence[str] = SPLITS,
    check: bool = True,
    divide: bool = True,
) -> dict[str, Split]:
    """Loads train, valid and test, as far as they exist, each with its corpus and relevant codes.

    The column names in `PAIRS` are recognised. If there are only training rows, they are split: by the column
    `partition` if that names at least two splits, else by repository, or at random if fewer than three are known.
    Training rows whose id, query or code is also in valid or test are dropped. In rows with
    CodeSearchNet's columns, `url` is the code's id. In others, the text of the code is. The corpus of valid and test
    is `codebase`, or, if that is missing, the codes in both. Columns get CodeSearchNet's names.

    Args:
        source: a file or a folder of JSON lines, CSV or Parquet, a folder written by `save_to_disk`, a folder in the
            layout of BEIR, CoSQA or CoSQA+, a name on the Hub, or a data frame.
        query_column, code_column: the names of these columns, if they are not recognised.
        id_column: the column with the code's id, if it is another one.
        needed: the splits that are used. Rows without a split are divided if train is not all that is needed. If train
            is not needed, it is skipped unless there is nothing else.
        check: whether to raise an error for rows without a text or without a relevant code.
        divide: whether to divide rows without a split. Otherwise, they are train, or test if train is not needed.

    Raises:
        UserError: the rows cannot be read, a column is missing or not text, or a row (see the message) has no text.
    """
    columns = ColumnNames(query_column, code_column, id_column)
    if not isinstance(source, pd.DataFrame) and (judged := load_judged(Path(source))):
        for option, name in zip(COLUMN_OPTIONS, columns, strict=True):
            if name is not None:
                raise UserError(f"{option}={name}: {source} has a layout with columns that have fixed names; drop it")
        return judged
    tables = load_tables(source, columns, needed, check, divide)
    splits = splits_of(tables, str(source), check)
    return {name: dataclasses.replace(split, called=tables.called) for name, split in splits.items()}


class Tables(DatasetDict):
    """Tables with the names that their columns have in the source, keyed by the names here."""

    called: Mapping[str, str] = {}


def splits_of(tables: Mapping[str, Dataset], source: str = "the rows", check: bool = True) -> dict[str, Split]:
    """Makes splits from tables. A code answers the queries with the same url.

    Raises:
        UserError: a query has no relevant code in the corpus.
    """
    tables = dict(tables)
    if "codebase" in tables:
        tables["codebase"] = flat(tables["codebase"])  # valid and test share one corpus
    splits = {}
    for name, rows in tables.items():
        if name == "train":
            splits[name] = Split.from_pairs(rows)
        elif name != "codebase":
            if check or "codebase" not in tables:
                check_targets(rows, tables.get("codebase"), name)
            splits[name] = Split.from_urls(rows, tables["codebase"])
    if not splits:
        raise UserError(f"{source}: no rows")
    return splits


def load_tables(
    source: str | Path | pd.DataFrame,
    names: ColumnNames = ANY_COLUMNS,
    needed: Sequence[str] = SPLITS,
    check: bool = True,
    divide: bool = True,
) -> Tables:
    """Loads the tables train, valid, test and codebase, as far as they exist, from a place without judgments.

    Args:
        needed: the splits that are used. Rows without a split are divided if train is not all that is needed. If train
            is not needed, it is skipped unless there is nothing else.
        check: whether to raise an error for rows without a query or a code.
        divide: whether to divide rows without a split.
    """
    data, called = _read(source, names, needed, check)
    if list(data) == ["train"] and (found := by_partition(data["train"])):
        data = {split: data["train"].select(places) for split, places in found.items()}
    only_train = "train" in data and not data.keys() - {"train", "codebase"}
    if only_train and not divide and "train" not in needed:
        check_sides(data["train"], ("query",) if "codebase" in data else COLUMNS_OF)
        data["test"] = data.pop("train")
    if divide and list(data) == ["train"] and {*needed} - {"train"}:
        data = _split(data["train"], source)
    if "codebase" not in data:
        held_out = splits_in(data, ("valid", "test"))
        if held_out and all(map(has_code, held_out)):
            data["codebase"] = corpus_of(held_out)
    tables = Tables(data)
    tables.called = called
    return tables


def _read(
    source: str | Path | pd.DataFrame, names: ColumnNames, needed: Sequence[str], check: bool
) -> tuple[dict[str, Dataset], dict[str, str]]:
    """Reads tables of rows, and gives them CodeSearchNet's columns and ids; see `load_tables`.

    Returns:
        The tables, and the names that columns have in the source.
    """
    name = str(source)
    if isinstance(source, pd.DataFrame):
        name = "the data frame"
        data = {"train": from_frame(source)}
    elif not any(names) and is_codesearchnet(Path(source)):
        data = load_folder(source)
    else:
        data = read_splits(name)
    for split, rows in data.items():
        if not len(rows):
            raise UserError(f"{name}: {split} has no rows")
    if "train" not in needed and data.keys() - {"train", "codebase"}:
        data.pop("train", None)
    columns = chosen_columns(data, names.query, names.code, name, quiet=True)
    if check:
        _check_texts(data, columns, source)
    called = source_names(data, names, columns)
    return with_text_ids(standard_rows(data, name, names, partial(_place, source))), called


# ---- Columns ----


def _check_texts(
    data: Mapping[str, Dataset], columns: Mapping[str, Sequence[str]], source: str | Path | pd.DataFrame
) -> None:
    """Raises UserError if any rows have no text. The message gives their number and the location of the first."""
    for split, rows in data.items():
        if "codebase" in data:
            sides = SIDES_OF[split]
        else:
            sides = COLUMNS_OF
        for side in sides:
            names = columns_in(rows, columns[side])
            blank = set(range(len(rows)))
            for name in names:
                blank &= set(blank_rows(rows, name))
            if names and blank:
                place = _place(source, split, min(blank) + 1)
                counts = f"{len(blank):,} of {len(rows):,} rows"
                raise UserError(
                    f"{place}: column {names[0]!r} is missing or empty, as in {counts} of {split}; "
                    f"drop_unusable=True drops such rows"
                )


def _place(source: str | Path | pd.DataFrame, split: str, row: int) -> str:
    """Returns the location of a row in a split, by file and line if possible. The first row has number 1."""
    if isinstance(source, pd.DataFrame):
        return f"the data frame, row {row}"
    path = Path(source)
    files = []
    if path.exists() and not is_saved(path):
        files = row_files(path).get(split)
    if files:
        return place_of(files, row - 1)
    return f"{source}, {split}, row {row}"


# ---- Splits ----


def check_sides(rows: Dataset, sides: Iterable[str]) -> None:
    """Raises UserError if the rows have no column for queries or none for codes."""
    for side in sides:
        if not columns_in(rows, COLUMNS_OF[side]):
            known = ", ".join(rows.column_names)
            raise UserError(f"no column for the {side}: the rows have {known}; give it with {side}_column")


def _split(rows: Dataset, source: str | Path | pd.DataFrame) -> dict[str, Dataset]:
    name = "the data frame" if isinstance(source, pd.DataFrame) else source
    try:
        check_sides(rows, COLUMNS_OF)
        places = divided(rows)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    return {split: rows.select(numbers) for split, numbers in places.items()}
