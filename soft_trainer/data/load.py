"""Loads train, valid and test from any source (files, folders, the Hub, Python objects) with any column names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
from datasets import Dataset, IterableDataset

from soft_trainer.data.columns import ANY_COLUMNS, ColumnNames
from soft_trainer.data.folders import SPLIT_NAMES, check_names, list_files
from soft_trainer.data.holdout import HELD_OUT_SHARE, Division, warn_of_overlap
from soft_trainer.data.layouts import JUDGED, LAYOUTS, TABLES
from soft_trainer.data.layouts.codesearchnet import load_hub
from soft_trainer.data.make_splits import Context, make_splits, splits_of_tables
from soft_trainer.data.plain_columns import (
    AT_ONCE,
    plain_table,
    table_of,
    tables_of,
    with_plain_text,
    write_tables,
)
from soft_trainer.data.row_checks import check_split
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.system.fingerprints import file_fingerprint
from soft_trainer.system.terminal import print_on_main

TRANSFORMED_AT_ONCE = 1000  # rows
EVERYTHING = Context()


def load_rows(
    source,
    query_column: str | None = None,
    code_column: str | None = None,
    id_column: str | None = None,
    codebase=None,
    language: str | None = None,
    revision: str | None = None,
    negatives_column: str | None = None,
    group_column: str | None = None,
    test_fraction: float = HELD_OUT_SHARE,
    seed: int = 0,
) -> dict[str, Split]:
    """Loads the splits train, valid and test of a data source, each with queries, corpus and judgments.

    Columns with a name in `PAIRS` are detected automatically. If there are only training rows, they are divided by the
    column `partition` (if it contains at least two splits), by repository, or at random (if there are fewer than three
    repositories). Training rows whose id, query or function is also in valid or test are then dropped. The id of a
    function is its `url` in rows with CodeSearchNet's columns, otherwise its text. The corpus of valid and test is
    `codebase` or, if there is none, the functions of both splits. Columns are renamed to CodeSearchNet's names;
    `repr(split)` lists the old and the new names.

    Args:
        source: a file or a folder of JSON Lines, CSV or Parquet, a folder written by `save_to_disk`, a folder in the
            layout of BEIR, or with a codebase and judged queries, a name on the Hub, a data frame, a list of dicts, or
            a `Dataset`, or a dict from the names of splits to such rows.
        query_column, code_column: the names of these columns, if they are not detected.
        id_column: the column with the function's id. The default is described above.
        codebase: the corpus, as a data frame, a list of dicts or a `Dataset`, if the source has no corpus.
        language: the configuration of a data set on the Hub, such as "ruby" for CodeSearchNet. Of other rows with a
            column `language`, only those in this language are loaded.
        revision: the branch, tag or commit of a data set on the Hub.
        negatives_column: the column with hard negatives, texts or lists of texts, if it is not detected.
        group_column: if train is divided, all rows with the same value in this column go to the same split.
        test_fraction: if train is divided, the share of the rows in test, and the share in valid.
        seed: another seed gives another division.

    Returns:
        The splits keyed by name.

    Raises:
        UserError: the rows cannot be read, a column is missing or is not text, or a row has no text. The message
            includes the row's number.
    """
    if not 0 < test_fraction < 0.5:
        raise UserError(f"test_fraction={test_fraction}: expected a number above 0 and below 0.5")
    names = ColumnNames(query_column, code_column, id_column, negatives_column, group_column)
    context = Context(
        names,
        division=Division(test_fraction, seed),
        codebase=None if codebase is None else as_rows(codebase, "codebase"),
        language=language,
        languages=() if language is None else (language,),
        revision=revision,
    )
    splits = read_source(source, context)
    if "train" in splits:
        warn_of_overlap({name: split for name, split in splits.items() if name != "train"}, splits["train"])
    return splits


def read_source(source, context: Context = EVERYTHING) -> dict[str, Split]:
    """Loads the splits of one source; see `load_rows`.

    A folder may have several layouts. Judged queries beside rows are read only if `context.needed` has their name.
    They are called test if there are no others to evaluate.
    """
    if not isinstance(source, str | Path):
        label = "the data frame" if isinstance(source, pd.DataFrame) else "the rows"
        named = isinstance(source, Mapping)
        if named:
            check_names(source)
            if unknown := source.keys() - SPLIT_NAMES.keys():
                raise UserError(f"{min(map(str, unknown))!r} is not the name of a split; use {', '.join(SPLIT_NAMES)}")
            tables = {SPLIT_NAMES[name]: as_rows(rows, name) for name, rows in source.items()}
        else:
            tables = {"train": as_rows(source, label)}
        return splits_of_tables(tables, label, context, named=named)
    source = os.path.expanduser(source)
    if not Path(source).exists():
        tables = load_hub(str(source), context.language, context.revision)
        return splits_of_tables(tables, str(source), context._replace(language=None))
    files = list_files(source)
    layouts = [layout for layout in LAYOUTS if layout.finds(files)] or [TABLES]
    if TABLES in layouts:
        layouts = [layout for layout in layouts if layout is not JUDGED or JUDGED.name in context.needed]
    elif not context.names.shared:
        for option, name in context.names.options().items():
            raise UserError(f"{option}={name}: the columns of {source} have fixed names; omit {option}")
    splits = {}
    for layout in layouts:
        part = layout.read(files, context)
        for name in splits.keys() & part.keys():
            both = " and ".join(layout.name for layout in layouts)
            raise UserError(f"{source}: both {both} have {name} queries; put them into separate folders")
        splits |= part
    if layouts == [JUDGED]:
        splits = {"test": splits[JUDGED.name]}
    return splits


# ---- Objects in Python ----


def training_split(
    rows, name: str = "train_dataset", names: ColumnNames = ANY_COLUMNS, most: int | None = None
) -> Split | None:
    """Makes a split from a trainer's `train_dataset`: a `Dataset`, a data frame or a list.

    A `Split` is returned unchanged. Of a stream, which may have no end, at most `most` rows are read.

    Raises:
        UserError: the rows have another type, or `make_splits` fails.
    """
    if rows is None or isinstance(rows, Split):
        return rows
    if isinstance(rows, Mapping):
        raise UserError(
            f"{name}: expected one set of rows, not a dict of {', '.join(map(str, rows)) or 'none'}; pass one of its "
            "values, or join them with datasets.concatenate_datasets"
        )
    if most is not None and isinstance(rows, IterableDataset):
        rows = rows.take(most)
    return make_splits({"train": as_rows(rows, name)}, name, names)["train"]


def evaluation_splits(
    sets, codebase=None, name: str = "eval_dataset", names: ColumnNames = ANY_COLUMNS
) -> Split | dict[str, Split] | None:
    """Makes splits from a trainer's `eval_dataset` and `codebase`.

    Args:
        sets: rows with a query and the `url` of its function, rows with a query and a function, a `Split` with its
            corpus, or a dict of any of these.
        codebase: the corpus of all sets, or a dict of corpora with the keys of `sets`. By default, the functions of
            each set.

    Returns:
        A split, or a dict of splits with the keys of `sets`.

    Raises:
        UserError: the corpus is missing, or it contains no relevant function for a query.
    """
    if sets is None:
        return None
    if isinstance(sets, Mapping):
        if not sets:
            raise UserError(f"{name}: the dict contains no data set")
        corpora = codebase if isinstance(codebase, Mapping) else dict.fromkeys(sets, codebase)
        if missing := [key for key in sets if key not in corpora and not isinstance(sets[key], Split)]:
            raise UserError(f"codebase: no corpus for {missing[0]!r}, only for {', '.join(map(repr, corpora))}")
        return {
            key: evaluation_splits(part, corpora.get(key), f"{name}[{key!r}]", names) for key, part in sets.items()
        }
    if isinstance(sets, Split):
        if not sets.checked:
            check_split(sets, name)
        return sets
    tables = {name: as_rows(sets, name)}
    if codebase is not None:
        tables["codebase"] = as_rows(codebase, "codebase")
    return make_splits(tables, name, names, files={name: name, "codebase": "codebase"})[name]


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
    if isinstance(rows, list):
        if not rows:
            raise UserError(f"{name}: there are no rows")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise UserError(f"{name}, row {number}: expected a dict, not {type(row).__name__}")
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
