"""Makes splits from tables with any column names, and divides rows that are in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from datasets import Dataset

from soft_trainer.data.array_cache import flat
from soft_trainer.data.column_names import GROUP
from soft_trainer.data.columns import (
    ANY_COLUMNS,
    ColumnNames,
    check_column,
    check_one_code,
    check_table,
    choose_columns,
    with_usual_names,
)
from soft_trainer.data.folders import SPLITS
from soft_trainer.data.holdout import Division, divided, held_out
from soft_trainer.data.languages import tables_in
from soft_trainer.data.listed import read_listed
from soft_trainer.data.plain_columns import concatenated
from soft_trainer.data.row_checks import check_split
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.system.terminal import print_on_main


class Context(NamedTuple):
    """The facts that a caller knows about a source, and the splits that it needs.

    Args:
        names: the columns that the user has named.
        needed: the splits that the caller uses. If valid or test is needed but there is only train, train is divided.
            If train is not needed, it is skipped unless there is no other split.
        division: how to divide train. If None, rows without a column `partition` stay train, or become test if train
            is not needed.
        check: whether to raise an error for rows without a text or without a relevant function.
        codebase: the corpus of all splits except train, instead of the source's.
        run_corpus: the corpus of judged queries if their folder has none.
        language: the configuration of a data set on the Hub. Of other rows, only those in this language are read.
        languages: the languages of judged queries. By default, all languages in the corpus.
        revision: the branch, tag or commit of a data set on the Hub.
    """

    names: ColumnNames = ANY_COLUMNS
    needed: Sequence[str] = SPLITS
    division: Division | None = Division()
    check: bool = True
    codebase: Dataset | None = None
    run_corpus: Dataset | None = None
    language: str | None = None
    languages: Sequence[str] = ()
    revision: str | None = None


def splits_of_tables(
    tables: Mapping[str, Dataset],
    label: str,
    context: Context,
    files: Mapping[str, str] | None = None,
    named: bool = True,
) -> dict[str, Split]:
    """Makes the splits of one source from its tables. Divides train if there is no other split.

    Args:
        tables: the rows, keyed by split.
        label: what messages call the source.
        files: the paths of some splits' files, for messages.
        named: whether the source says which rows are which split. Otherwise, all of them are in train.

    Raises:
        UserError: no row is in the language, `make_splits` fails, or there are too few rows to divide.
    """
    tables = dict(tables)
    if context.codebase is not None:
        tables["codebase"] = context.codebase
    if context.language is not None:
        tables = tables_in(tables, context.language, label)
    if "train" not in context.needed:
        if tables.keys() - {"train", "codebase"}:
            tables.pop("train", None)
        elif {"train", "codebase"} <= tables.keys() and context.division is None:
            tables["test"] = tables.pop("train")
    known = set().union(*(rows.column_names for rows in tables.values()))
    names = context.names.among(known)
    splits = make_splits(tables, label, names, context.check, files)
    if tables.keys() != {"train"}:
        if names.group is not None:
            print_on_main(f"{label}: not using group_column={names.group}, because the rows are split already")
        return splits
    division = context.division
    if named and {*context.needed} <= {"train"}:
        division = None
    try:
        splits = divided(splits["train"], division, names.group)
    except UserError as error:
        raise UserError(f"{label}: {error}") from error
    if [*splits] == ["train"] and "train" not in context.needed:
        splits = held_out(splits["train"], {"test": np.arange(len(splits["train"].judgments))})
    return splits


def make_splits(
    tables: Mapping[str, Dataset],
    label: str = "the rows",
    names: ColumnNames = ANY_COLUMNS,
    check: bool = True,
    files: Mapping[str, str] | None = None,
) -> dict[str, Split]:
    """Makes splits from rows with any column names. A function is relevant to the queries with the same id.

    Args:
        tables: the rows, keyed by split. The rows of `codebase` are the corpus of all splits except train.
        label: what messages call the source.
        names: the column names set by the user.
        check: whether to raise an error for rows without a text or without a relevant function.
        files: the paths of some splits' files, for messages.

    Raises:
        UserError: a table is empty, a column is missing or is not text, there is no corpus, or `check_split` fails.
    """
    labels = {name: f"{label}, {name}" for name in tables} | dict(files or {})
    if [*tables] == ["train"] and not files:
        labels["train"] = label
    tables = {name: tables[name] for name in SPLITS if name in tables} | dict(tables)
    columns = choose_columns(
        {name: rows.column_names for name, rows in tables.items()}, names, label, quiet="train" not in tables
    )
    paired = "codebase" not in tables  # each row has a query and its code
    listed = {}
    called = {}
    for name, rows in tables.items():
        source = labels[name]
        check_table(rows, name, columns, source, not paired)
        if name == "train" and names.group is not None:
            # A copy, because the column may also be the one of queries or ids.
            check_column(rows.column_names, "group_column", names.group, source)
            groups = rows[names.group][:]
            if None in groups:
                number = groups.index(None) + 1
                raise UserError(f"{source}, row {number}: the group, column {names.group!r}, is missing or empty")
            rows = rows.add_column(GROUP, list(map(str, groups)))
        rows, listed[name] = read_listed(rows, columns, source, check)
        tables[name], before = with_usual_names(rows, columns, source)
        called |= before
    if columns.id is not None:
        check_one_code(tables, columns.id, labels)
    corpus = tables.pop("codebase", None)
    if paired and (evaluated := [rows for name, rows in tables.items() if name != "train"]):
        corpus = concatenated(evaluated)
        corpus = corpus.select(np.flatnonzero(~pd.Series(corpus["url"][:]).duplicated().to_numpy()))
    corpus = corpus and flat(corpus)  # the splits share it, so that it is encoded once
    splits = {}
    for name, rows in tables.items():
        pairs = split = None
        if paired or name == "train":
            split = pairs = Split.from_pairs(rows, listed[name])
        if name != "train":
            split = Split.from_urls(rows, corpus, listed[name])
        splits[name] = split = dataclasses.replace(split, called=called)
        if check:
            code_place = labels[name] if pairs else labels["codebase"]
            rows_as_given = dataclasses.replace(pairs or split, called=called)
            check_split(rows_as_given, name, files={"query": labels[name], "code": code_place})
            if name != "train":
                split.mark_checked()  # `pairs` has the same rows
    if not splits:
        raise UserError(f"{label}: no rows of train, valid or test")
    return splits
