"""Reads rows with any column names from files, a folder, a saved data set or the Hub, and splits them if needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict

from soft_trainer.data.columns import (
    ANY_COLUMNS,
    COLUMNS_OF,
    ColumnNames,
    chosen_columns,
    has_code,
    standard_rows,
    texts_of,
    with_text_ids,
)
from soft_trainer.data.judgments import Split
from soft_trainer.data.layouts.codesearchnet import corpus_of, is_codesearchnet, load_folder, splits_in
from soft_trainer.data.layouts.files import SIDES_OF, SPLITS
from soft_trainer.data.layouts.judged import has_judged_splits, load_judged_splits
from soft_trainer.data.layouts.tables import is_saved, read_splits, row_files
from soft_trainer.data.places import place_of
from soft_trainer.data.python_rows import from_frame
from soft_trainer.data.row_checks import blank_rows, check_targets
from soft_trainer.data.tokens import columns_in
from soft_trainer.errors import UserError, name_option
from soft_trainer.mining.packages import assign_splits
from soft_trainer.terminal import print_on_main, table

REPOSITORIES = ("repo", "repository", "repository_name", "repo_name")  # recognised columns with a row's repository


def load_rows(
    source: str | Path | pd.DataFrame,
    query_column: str | None = None,
    code_column: str | None = None,
    id_column: str | None = None,
) -> dict[str, Split]:
    """Loads the splits train, valid and test, those that exist, each with its corpus and right answers.

    The column names in `PAIRS` are recognised. If there are only training rows, they are split: by repository if there
    is such a column, otherwise at random, with equal queries and equal codes kept in the same split. In rows with
    CodeSearchNet's columns, `url` is the code's id. In others, the text of the code is. The corpus of valid and test
    is `codebase`, or, if that is missing, the codes in both. Columns get CodeSearchNet's names.

    Args:
        source: a file or a folder of JSON lines, CSV or Parquet, a folder written by `save_to_disk`, a folder in the
            layout of BEIR, CoSQA or CoSQA+, a name on the Hub, or a data frame.
        query_column, code_column: the names of these columns, if they are not recognised.
        id_column: the column with the code's id, if it is another one.

    Raises:
        UserError: the rows cannot be read, a column is missing or not text, or a row (see the message) has no text.
    """
    if not isinstance(source, pd.DataFrame) and has_judged_splits(Path(source)):
        return load_judged_splits(Path(source))
    tables = load_tables(source, ColumnNames(query_column, code_column, id_column))
    if not tables.keys() - {"codebase"}:
        raise UserError(f"{source}: no rows")
    return splits_of(tables)


def splits_of(tables: Mapping[str, Dataset]) -> dict[str, Split]:
    """Makes splits from tables. A code answers the queries with the same url.

    Raises:
        UserError: a query has no right answer in the corpus.
    """
    splits = {}
    for name, rows in tables.items():
        if name == "train":
            splits[name] = Split.from_pairs(rows)
        elif name != "codebase":
            check_targets(rows, tables.get("codebase"), name)
            splits[name] = Split.from_urls(rows, tables["codebase"])
    return splits


def load_tables(
    source: str | Path | pd.DataFrame,
    names: ColumnNames = ANY_COLUMNS,
    needed: Sequence[str] = SPLITS,
    check: bool = True,
) -> DatasetDict:
    """Loads the tables train, valid, test and codebase, those that exist, from a place that has no judgments.

    Args:
        needed: the splits that are used. Training rows without other splits are split if train is not all that is
            needed. If train is not needed, it is left out unless there is nothing else.
        check: whether to raise an error for rows without a query or a code.
    """
    data = _read(source, names, needed, check)
    if list(data) == ["train"] and "train" in needed and {*needed} - {"train"}:
        data = _split(data["train"])
    if "codebase" not in data:
        held_out = splits_in(data, ("valid", "test"))
        if held_out and all(map(has_code, held_out)):
            data["codebase"] = corpus_of(held_out)
    return DatasetDict(data)


def _read(
    source: str | Path | pd.DataFrame, names: ColumnNames, needed: Sequence[str], check: bool
) -> dict[str, Dataset]:
    """Reads tables of rows, and gives them CodeSearchNet's columns and ids; see `load_tables`."""
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
    if check:
        _check_texts(data, chosen_columns(data, names.query, names.code, name, quiet=True), source)
    return with_text_ids(standard_rows(data, name, names, partial(_place, source)))


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
                    f"{name_option('drop_unusable', True)} leaves such rows out"
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
            raise UserError(
                f"no column for the {side}: the rows have {known}; give it with {name_option(f'{side}_column')}"
            )


def _split(rows: Dataset) -> dict[str, Dataset]:
    """Splits rows into about 80 % train, 10 % valid and 10 % test, and prints the size of each."""
    check_sides(rows, COLUMNS_OF)
    groups = []
    for column in columns_in(rows, REPOSITORIES)[:1]:
        groups = list(map(str, rows[column]))
        reason = f"by {column}"
    if len(set(groups)) < len(SPLITS):
        groups = _groups_of_equals(rows)
        reason = "at random; equal queries and codes stay together"
    sizes = Counter(groups)
    if len(sizes) < len(SPLITS):
        raise UserError(f"{len(rows)} rows ({len(sizes)} different ones) are too few to split: give valid and test")
    split_of_group = assign_splits(sizes)
    splits = np.array(list(map(split_of_group.get, groups)))
    data = {}
    counts = []
    for split in SPLITS[:3]:
        data[split] = rows.select(np.flatnonzero(splits == split))
        counts.append((split, len(data[split])))
    print_on_main(table((f"split {reason}", "rows"), counts))
    return data


def _groups_of_equals(rows: Dataset) -> list[str]:
    """Groups rows that share a query or a code, directly or through other rows. Returns the group of each row."""
    parent = list(range(len(rows)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for side in COLUMNS_OF.values():
        first: dict[Hashable, int] = {}
        for row, text in enumerate(texts_of(rows, side)):
            if text:
                parent[root(row)] = root(first.setdefault(text, row))
    return [str(root(row)) for row in range(len(rows))]
