"""Checks that rows can be used for training and evaluation, and drops those that cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict

from soft_trainer.data.layouts.files import SIDES_OF, SPLITS
from soft_trainer.data.tokens import check_language_column, text_column
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError, name_option
from soft_trainer.terminal import print_on_main, table

SHOWN = 5  # rows to list in an error message


def check_rows(data: DatasetDict, profile: EncoderProfile) -> None:
    """Checks that rows can be used for training and evaluation. Training rows need no url.

    Raises:
        UserError: a split is empty, a column is missing, a row has no text, or the queries fail `check_targets`.
    """
    for split, rows in data.items():
        check_texts(rows, split, profile)
    check_urls(data)


def check_texts(rows: Dataset, split: str, profile: EncoderProfile) -> None:
    """Checks that rows have the texts that their split needs.

    Raises:
        UserError: the split is empty, a column is missing, or rows have no text. The message lists these rows.
    """
    if len(rows) == 0:
        raise UserError(f"{split}: no rows")
    columns = [text_column(rows, getattr(profile, f"{side}_columns"), side) for side in SIDES_OF[split]]
    if profile.data_flow_length and "code" in SIDES_OF[split]:
        check_language_column(rows, split)
        columns.append("language")
    for column in columns:
        _check_filled(rows, column, split)


def check_urls(data: DatasetDict) -> None:
    """Checks that each query's code is in the corpus. Raises UserError if the queries fail `check_targets`."""
    for split in ("valid", "test"):
        if split in data:
            check_targets(data[split], data.get("codebase"), split)


def check_targets(queries: Dataset, corpus: Dataset | None, name: str = "eval_dataset") -> None:
    """Checks that exactly one code in the corpus has each query's url.

    Args:
        queries: rows with a `url`.
        corpus: rows with a `url`, the codes that are ranked for the queries.
        name: what to call the queries in messages.

    Raises:
        UserError: the queries or the corpus are empty, a url is missing or empty, two codes have the same url, or no
            code has a query's url.
    """
    if queries is None:
        raise UserError(f"{name}: no queries; pass eval_dataset= here or to the trainer")
    if not queries:
        raise UserError(f"{name}: there are no rows")
    if corpus is None:
        raise UserError(
            f"{name}: no corpus to rank these queries against; add codebase.jsonl or codebase.jsonl.gz to the folder "
            "(in Python: codebase=)"
        )
    for part, rows in ((name, queries), ("codebase", corpus)):
        _check_filled(rows, "url", part)
    urls = pd.Series(corpus["url"][:], dtype=object)
    own = pd.Series(queries["url"][:], dtype=object)
    repeated = np.flatnonzero(urls.duplicated())
    if len(repeated):
        row = int(repeated[0])
        first = int(np.flatnonzero(urls == urls[row])[0])
        raise UserError(f"codebase: row {row + 1} repeats the url of row {first + 1}: {urls[row]}")
    missing = np.flatnonzero(~own.isin(urls)).tolist()
    if missing:
        if len(missing) == 1:
            verb = "has"
        else:
            verb = "have"
        raise UserError(f"{name}: {_rows(missing)} {verb} a url that is not in the codebase ({own[missing[0]]})")


def drop_unusable_rows(data: DatasetDict, profile: EncoderProfile) -> DatasetDict:
    """Drops rows without a text, and queries whose code was dropped. Prints the number dropped from each split.

    Raises:
        UserError: a split lacks a column.
    """
    kept = {}
    counts = []
    for split in reversed(SPLITS):  # the corpus first
        if split not in data:
            continue
        rows = data[split]
        unusable = set()
        for side in SIDES_OF[split]:
            unusable |= {*blank_rows(rows, text_column(rows, getattr(profile, f"{side}_columns"), side))}
        if split in ("valid", "test") and "codebase" in kept and "url" in rows.column_names:
            # A query whose url was never in the corpus stays, and causes an error later.
            lost = set(data["codebase"]["url"]) - set(kept["codebase"]["url"])
            unusable |= set(np.flatnonzero(pd.Series(rows["url"][:]).isin(lost)))
        kept[split] = rows
        if unusable:
            kept[split] = rows.select(sorted(set(range(len(rows))) - unusable))
        counts.append((split, len(rows), len(unusable)))
    print_on_main(table(("split", "rows", "left out as unusable"), counts[::-1]))
    return DatasetDict(reversed(kept.items()))


def _check_filled(rows: Dataset, column: str, split: str) -> None:
    if column not in rows.column_names:
        raise UserError(f"{split}: no column {column!r}")
    if empty := blank_rows(rows, column):
        if rows.data.column(column).null_count == len(rows):
            state = "missing"
        else:
            state = "missing or empty"
        if column in ("url", "language"):
            hint = ""
        else:
            hint = f"; {name_option('drop_unusable', True)} leaves such rows out"
        raise UserError(f"{split}: column {column!r} is {state} in {_rows(empty)}{hint}")


def blank_rows(rows: Dataset, column: str) -> list[int]:
    """Finds rows whose value is missing, blank or an empty list. Raises UserError if a value has the wrong type."""
    values = rows.select_columns(column).with_format("arrow")[:][column]
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lengths = pc.list_value_length(values)
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_null(values.type):
        lengths = pc.utf8_length(pc.utf8_trim_whitespace(values.cast(pa.string())))
    else:
        raise UserError(f"column {column!r} holds {values.type}, text is expected")
    return pc.indices_nonzero(pc.equal(lengths.fill_null(0), 0)).to_pylist()


def _rows(places: Sequence[int]) -> str:
    shown = ", ".join(str(place + 1) for place in places[:SHOWN])
    more = ""
    if len(places) > SHOWN:
        more = f" and {len(places) - SHOWN:,} more"
    return f"{'row' if len(places) == 1 else 'rows'} {shown}{more}"
