"""Checks that rows can be used for training and evaluation, and drops the unusable ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from soft_trainer.data.judgments import EqualIds, Split
from soft_trainer.data.layouts.files import SPLITS
from soft_trainer.data.tokens import check_language_column, text_column
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.terminal import print_on_main, table

SHOWN = 5  # rows to list in an error message


def check_split(split: Split, name: str, profile: EncoderProfile) -> None:
    """Checks that a split can be used for training or evaluation. Training rows need no url.

    Raises:
        UserError: the split is empty, a column is missing, rows have no text, or a query has no relevant code. The
            message lists these rows.
    """
    corpus = "train" if name == "train" else "codebase"
    for side, rows, called in (("query", split.queries, name), ("code", split.corpus, corpus)):
        if len(rows) == 0:
            raise UserError(f"{called}: no rows")
        _check_filled(rows, text_column(rows, getattr(profile, f"{side}_columns"), side), called)
    if profile.data_flow_length:
        check_language_column(split.corpus, corpus)
        _check_filled(split.corpus, "language", corpus)
    if isinstance(split.judgments.answers, EqualIds) and split.judgments.examples is None:
        check_targets(split.queries, split.corpus, name)


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


def drop_unusable_rows(splits: Mapping[str, Split], profile: EncoderProfile) -> dict[str, Split]:
    """Drops queries and codes without a text, and queries whose code was dropped. Prints the number of each.

    Raises:
        UserError: a split lacks a column.
    """
    kept = {}
    counts = {}
    for name, split in splits.items():
        queries = _with_text(split.queries, "query", profile)
        codes = _with_text(split.corpus, "code", profile)
        if name == "train":
            pairs = split.judgments.pairs()
            usable = queries[pairs[:, 0]] & codes[pairs[:, 1]]
            kept[name] = split if usable.all() else split.keep(np.flatnonzero(usable))
            counts[name] = (len(pairs), int((~usable).sum()))
            continue
        chosen = split if codes.all() else split.select(codes=np.flatnonzero(codes))
        # A query whose code was never in the corpus stays, and causes an error later.
        answered = chosen.judgments.answer_counts() > 0
        queries &= answered | (split.judgments.answer_counts() == 0)
        kept[name] = chosen if queries.all() else chosen.select(queries=np.flatnonzero(queries))
        counts[name] = (len(queries), int((~queries).sum()))
        counts["codebase"] = (len(codes), int((~codes).sum()))
    rows = [(name, *counts[name]) for name in SPLITS if name in counts]
    print_on_main(table(("split", "rows", "dropped as unusable"), rows))
    return kept


def _with_text(rows: Dataset, side: str, profile: EncoderProfile) -> np.ndarray:
    """Returns True for the rows that have a text on one side, bool[rows]."""
    found = np.ones(len(rows), dtype=bool)
    found[blank_rows(rows, text_column(rows, getattr(profile, f"{side}_columns"), side))] = False
    return found


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
            hint = "; drop_unusable=True drops such rows"
        raise UserError(f"{split}: column {column!r} is {state} in {_rows(empty)}{hint}")


def blank_rows(rows: Dataset, column: str) -> list[int]:
    """Finds rows whose value is missing, blank or an empty list. Raises UserError if a value has the wrong type."""
    values = rows.select_columns(column).with_format("arrow")[:][column]
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lengths = pc.list_value_length(values)
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_null(values.type):
        lengths = pc.utf8_length(pc.utf8_trim_whitespace(values.cast(pa.string())))
    else:
        raise UserError(f"column {column!r} holds {values.type}; expected text")
    return pc.indices_nonzero(pc.equal(lengths.fill_null(0), 0)).to_pylist()


def _rows(places: Sequence[int]) -> str:
    shown = ", ".join(str(place + 1) for place in places[:SHOWN])
    more = ""
    if len(places) > SHOWN:
        more = f" and {len(places) - SHOWN:,} more"
    return f"{'row' if len(places) == 1 else 'rows'} {shown}{more}"
