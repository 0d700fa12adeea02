"""Checks that a split can be used for training or evaluation, and drops unusable rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from soft_trainer.data.column_names import COLUMNS_OF
from soft_trainer.data.columns import (
    check_language_column,
    known_columns,
    row_numbers,
    text_column,
)
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError

MOST_RELEVANT = 100  # relevant pairs per query or function; more means that the id column does not identify functions


def check_split(
    split: Split, name: str, profile: EncoderProfile | None = None, files: Mapping[str, str] | None = None
) -> None:
    """Checks the texts, languages, ids and relevant functions of a split before training or evaluation.

    A split that is not for training is then marked as checked.

    Args:
        name: the name of the split in messages. For "train", relevant functions are not checked.
        profile: the encoder that reads the rows. If None, a row needs a text in any query or code column.
        files: the files that queries and functions come from, for messages, keyed by "query" and "code".

    Raises:
        UserError: the split is empty, a column is missing, rows have no text, or a query has no relevant function. The
            message gives the file and the row numbers.
    """
    sources = {"query": name, "code": "train" if name == "train" else "codebase"} | (files or {})
    for side, rows in (("query", split.queries), ("code", split.corpus)):
        source = sources[side]
        if len(rows) == 0:
            raise UserError(f"{source}: no rows")
        read = COLUMNS_OF[side] if profile is None else getattr(profile, f"{side}_columns")
        columns = [text_column(rows, read, side)]
        if profile is None:
            columns = known_columns(rows, read)
        if len(empty := blank_rows(rows, columns)):
            column = split.called.get(columns[0], columns[0])
            quote = "; in an unusually long row, look for an unbalanced quote" if ".csv" in source else ""
            raise UserError(
                f"{source}, {row_numbers(empty)}: column {column!r} is missing or empty ({len(empty):,} of "
                f"{len(rows):,} rows); fill in or drop these rows (in the shell: --drop_unusable true){quote}"
            )
    if profile is not None and profile.data_flow_length:
        source = sources["code"]
        check_language_column(split.corpus, source)
        if len(empty := blank_rows(split.corpus, ["language"])):
            raise UserError(f"{source}, {row_numbers(empty)}: column 'language' is missing or empty")
    if name != "train":
        _check_relevant(split, sources)
        split.mark_checked()


def _check_relevant(split: Split, sources: Mapping[str, str]) -> None:
    """Raises UserError if a query has no relevant function, or an id is missing, repeated or shared by many rows."""
    relevance = split.judgments.stored
    counts = relevance.counts()
    by_ids = not split.judgments.graded
    if by_ids and split.judgments.examples is None:
        for side, rows in (("query", split.queries), ("code", split.corpus)):
            if "url" not in rows.column_names:
                if counts.any():  # judgments in Python need no ids
                    continue
                raise UserError(f"{sources[side]}: no column 'url', the id that connects a query with its function")
            if len(empty := blank_rows(rows, ["url"])):
                raise UserError(f"{sources[side]}, {row_numbers(empty)}: the id, column 'url', is missing or empty")
        for row in np.flatnonzero(pd.Series(relevance.group).duplicated()):
            earlier = np.argmax(relevance.group == relevance.group[row])
            url = split.corpus["url"][int(row)]
            raise UserError(f"{sources['code']}, row {row + 1} repeats the url of row {earlier + 1}: {url}")
    missing = np.flatnonzero(counts == 0)
    if len(missing):
        reason = "no relevant function in the corpus"
        if by_ids and "url" in split.queries.column_names:
            reason = f"no function in the corpus has the url, such as {split.queries['url'][int(missing[0])]!r}"
        raise UserError(f"{sources['query']}, {row_numbers(missing)}: {reason}")
    if counts.sum() > MOST_RELEVANT * (len(split.queries) + len(split.corpus)):
        raise UserError(
            f"{sources['query']}, row {counts.argmax() + 1} shares its id with {counts.max():,} functions, and so do "
            "most other rows. Each function needs a unique id"
        )


def drop_unusable_rows(split: Split, name: str, profile: EncoderProfile) -> tuple[Split, tuple[int, int]]:
    """Drops queries and functions without text, and then queries that have no relevant function left.

    Args:
        name: the split's name. For "train", the function drops pairs.
        profile: the encoder that reads the rows.

    Returns:
        The remaining split, and two numbers of training pairs or queries: how many there were, and how many were
            dropped.

    Raises:
        UserError: the split lacks a column.
    """
    queries = _with_text(split.queries, "query", profile)
    codes = _with_text(split.corpus, "code", profile)
    if name == "train":
        pairs = split.judgments.pairs()
        usable = queries[pairs[:, 0]] & codes[pairs[:, 1]]
        kept = split if usable.all() else split.keep(np.flatnonzero(usable))
        return kept, (len(pairs), int((~usable).sum()))
    kept = split if codes.all() else split.select(codes=np.flatnonzero(codes))
    # A query without any relevant function from the start is kept, so that `check_split` reports it.
    queries &= (kept.judgments.stored.counts() > 0) | (split.judgments.stored.counts() == 0)
    if not queries.all():
        kept = kept.select(queries=np.flatnonzero(queries))
    return kept, (len(queries), int((~queries).sum()))


def _with_text(rows: Dataset, side: str, profile: EncoderProfile) -> np.ndarray:
    """Marks the rows with a text in the column that the encoder reads, bool[rows]. `side` is "query" or "code"."""
    found = np.ones(len(rows), dtype=bool)
    found[blank_rows(rows, [text_column(rows, getattr(profile, f"{side}_columns"), side)])] = False
    return found


def blank_rows(rows: Dataset, columns: list[str]) -> np.ndarray:
    """Returns the indices of rows in which all of `columns` are missing, blank or empty lists, int64[n]."""
    blank = np.ones(len(rows), dtype=bool)
    table = rows.select_columns(columns).with_format("arrow")[:]
    for column in columns:
        values = table[column]
        if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
            lengths = pc.list_value_length(values)
        else:
            lengths = pc.utf8_length(pc.utf8_trim_whitespace(values.cast(pa.string())))
        blank &= lengths.fill_null(0).to_numpy() == 0
    return np.flatnonzero(blank)
