"""Reads rows with any column names from files, a folder, a saved data set or the Hub, and splits them if needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict, concatenate_datasets

from soft_trainer.data.columns import (
    COLUMNS_OF,
    PAIRS,
    QUERIES,
    ColumnNames,
    chosen_columns,
    has_code,
    standard_rows,
    texts_of,
    with_text_ids,
)
from soft_trainer.data.judgments import Split
from soft_trainer.data.layouts.codesearchnet import SIDES_OF, SPLITS, corpus_of, load_folder, split_files, splits_in
from soft_trainer.data.layouts.judged import has_judged_splits, load_judged_splits
from soft_trainer.data.layouts.tables import format_of, is_saved, read_splits, row_files, split_of
from soft_trainer.data.places import place_of
from soft_trainer.data.python_rows import from_frame
from soft_trainer.data.row_checks import blank_rows, check_targets
from soft_trainer.data.tokens import columns_in
from soft_trainer.errors import UserError
from soft_trainer.files import read_json_lines
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
    tables = load_tables(source, query_column, code_column, id_column, needed=None)
    if not tables.keys() - {"codebase"}:
        raise UserError(f"{source}: no rows")
    return splits_of(tables)


def splits_of(tables: Mapping[str, Dataset | Split]) -> dict[str, Split]:
    """Makes splits from tables. A code answers the queries with the same url. Splits are returned unchanged.

    Raises:
        UserError: a query has no right answer in the corpus.
    """
    splits = {}
    for name, rows in tables.items():
        if isinstance(rows, Split):
            splits[name] = rows
        elif name == "train":
            splits[name] = Split.from_pairs(rows)
        elif name != "codebase":
            check_targets(rows, tables.get("codebase"), name)
            splits[name] = Split.from_urls(rows, tables["codebase"])
    return splits


def load_tables(
    source: str | Path | pd.DataFrame,
    query_column: str | None = None,
    code_column: str | None = None,
    id_column: str | None = None,
    needed: Sequence[str] | None = SPLITS,
    split: bool = True,
    check: bool = True,
) -> DatasetDict | dict[str, Split | Dataset]:
    """Loads the tables train, valid, test and codebase. Folders of judgments give a `Split` instead; see `load_rows`.

    Args:
        needed: the splits that must exist. If None, those that exist are returned.
        split: if False, only `test` is returned, with the rows of test, of valid if there is no test, or else all
            rows.
        check: whether to raise an error for rows without a query or a code.
    """
    if not isinstance(source, pd.DataFrame) and has_judged_splits(Path(source)):
        splits = load_judged_splits(Path(source))
        return splits | {"codebase": splits[list(splits)[-1]].corpus}
    names = ColumnNames(query_column, code_column, id_column)
    data = _read(source, names, needed, split, check)
    if not split:
        return _undivided(data)
    if list(data) == ["train"] and (needed is None or set(needed) - {"train"}):
        data = _split(data["train"])
    if "codebase" not in data:
        held_out = splits_in(data, ("valid", "test"))
        if held_out and all(map(has_code, held_out)):
            data["codebase"] = corpus_of(held_out)
    return DatasetDict(data)


def _read(
    source: str | Path | pd.DataFrame, names: ColumnNames, needed: Sequence[str] | None, split: bool, check: bool
) -> dict[str, Dataset]:
    """Reads tables of rows, and gives them CodeSearchNet's columns and ids. The arguments are those of `load_rows`."""
    framed = isinstance(source, pd.DataFrame)
    if not framed and not any(names) and split and is_codesearchnet(Path(source)):
        alone = list(split_files(Path(source))) == ["train"]  # the other splits are then made from it
        data = load_folder(source, needed=["train"] if alone else {*(needed or ())} - {"codebase"})
        if check:
            _check_texts(data, COLUMNS_OF, source)
        if alone or "train" not in data:
            return with_text_ids(data)
        return with_text_ids(data) | {"train": data["train"]}  # its training rows need no urls
    if framed:
        name = "the data frame"
        data = {"train": from_frame(source)}
    else:
        name = str(source)
        data = read_splits(name)
    if check:
        _check_texts(data, chosen_columns(data, names.query, names.code, name, quiet=True), source)
    return with_text_ids(standard_rows(data, name, names, partial(_place, source)))


def _undivided(data: Mapping[str, Dataset]) -> DatasetDict:
    """Returns a test split with its corpus.

    It has the rows of test if that exists, otherwise those of valid, otherwise all rows. Its corpus is `codebase`, or
    the codes of these rows if there is no `codebase`.
    """
    pairs = {}
    for name, rows in data.items():
        if name != "codebase" and columns_in(rows, QUERIES):
            pairs[name] = rows
    parts = list(pairs.values()) or list(data.values())
    chosen = pairs.get("test") or pairs.get("valid") or concatenate_datasets(parts)
    if "codebase" in data or "url" in chosen.column_names:
        _check_sides(chosen, ["query"])
    else:
        _check_sides(chosen, COLUMNS_OF)
    return DatasetDict(test=chosen, codebase=data.get("codebase") or corpus_of([chosen]))


# ---- Columns ----


def is_codesearchnet(folder: Path, query_column: str | None = None) -> bool:
    """Returns True if a folder has JSON lines in CodeSearchNet's columns. The first row decides."""
    if not folder.is_dir():
        return False
    files = split_files(folder)
    if not files:
        return not is_saved(folder) and not any(map(format_of, folder.iterdir()))
    if not {*map(split_of, folder.iterdir())} <= {None, *files}:
        return False  # a split has another name or format, such as `dev.jsonl` or `test.csv`
    try:
        _, row = next(read_json_lines(next(iter(files.values()))), (None, {}))
    except UserError:
        return True  # CodeSearchNet's reader raises a better error
    return bool({*QUERIES} & row.keys()) or not (query_column in row or any({*pair} <= row.keys() for pair in PAIRS))


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
                    "--drop_unusable true leaves such rows out"
                )


def _place(source: str | Path | pd.DataFrame, split: str, row: int) -> str:
    """Returns the location of a row in a split, by file and line if possible. The first row has number 1."""
    if isinstance(source, pd.DataFrame):
        return f"the data frame, row {row}"
    path = Path(source)
    files = []
    if path.exists() and not is_saved(path):
        files = [file for file, named in row_files(path) if named == split]
    if files:
        return place_of(files, row - 1)
    return f"{source}, {split}, row {row}"


# ---- Splits ----


def _check_sides(rows: Dataset, sides: Iterable[str]) -> None:
    """Raises UserError if the rows have no column for queries or none for codes."""
    for side in sides:
        if not columns_in(rows, COLUMNS_OF[side]):
            known = ", ".join(rows.column_names)
            raise UserError(f"no column for the {side}: the rows have {known}; give it with --{side}_column")


def _split(rows: Dataset) -> dict[str, Dataset]:
    """Splits rows into about 80 % train, 10 % valid and 10 % test, and prints the size of each."""
    _check_sides(rows, COLUMNS_OF)
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
