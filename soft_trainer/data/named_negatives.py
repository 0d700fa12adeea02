"""Reads the columns of negatives, which list each row's hard negatives: functions that do not answer its query."""

from __future__ import annotations

import re
from itertools import chain

import numpy as np
from datasets import Dataset, List, Value, concatenate_datasets

from soft_trainer.data.column_names import NEGATIVE, NEGATIVE_SCORES, NEGATIVES, is_list_text
from soft_trainer.errors import UserError
from soft_trainer.terminal import print_on_main

URL = re.compile(r"code:[0-9a-f]{32}$|https?://\S+$")  # such a value is an id, not the text of a function


def with_negative_columns(rows: Dataset, place: str, quiet: bool = False, column: str | None = None) -> Dataset:
    """Merges columns such as `neg`, or `negative` and `negative_1`, into one column `negatives`.

    Args:
        place: where the rows come from, for messages.
        quiet: True to print nothing.
        column: the column of negatives that the user has set. Other columns are then not read.

    Raises:
        UserError: a value is neither a text nor a list of texts.
    """
    names = [name for name in rows.column_names if NEGATIVE.fullmatch(name)]
    if column is not None:
        rows = rows.remove_columns([name for name in names if name != column])
        names = [column] if column in rows.column_names else []
    if names in ([], [NEGATIVES]):
        return rows
    if not quiet:
        print_on_main(f"{place}: reading hard negatives in {', '.join(names)}")
    negatives = []
    for row, values in enumerate(zip(*(rows[name][:] for name in names), strict=True)):
        for value in values:
            if isinstance(value, str) and is_list_text(value):
                raise UserError(
                    f"{place}, row {row + 1}: a column of negatives contains the text of a list; use JSON Lines, or "
                    "several columns such as negative_1"
                )
        negatives.append(list(chain.from_iterable(texts_named(value, row) for value in values)))
    return rows.remove_columns(names).add_column(NEGATIVES, negatives, feature=List(Value("string")))


def with_negatives(rows: Dataset, corpus: Dataset, urls: np.ndarray) -> tuple[Dataset, np.ndarray, np.ndarray]:
    """Finds the functions that the column `negatives` lists in the corpus, and adds missing ones to the corpus.

    Args:
        rows: training rows with the column `negatives`. A column `NEGATIVE_SCORES` has a score for each of them.
        corpus: the functions of the rows, in the same order.
        urls: object[rows], the id of each row's code, or None.

    Returns:
        The extended corpus, the (query, negative function) pairs, int64[P, 2], and the score of each pair or NaN,
        float32[P].

    Raises:
        UserError: a value is not a list of texts, or is a url that no row has.
    """
    row_of = {}
    texts = _code_texts(corpus)
    for row in reversed(range(len(rows))):  # if several rows are equal, the first one wins
        row_of[texts[row]] = row
        if urls[row] is not None:
            row_of[urls[row]] = row
    added = []
    pairs = []
    scores = []
    given = [None] * len(rows)
    if NEGATIVE_SCORES in rows.column_names:
        given = rows[NEGATIVE_SCORES][:]
    for query, (names, of_row) in enumerate(zip(rows[NEGATIVES], given, strict=True)):
        names = texts_named(names, query)
        for name, score in zip(names, of_row or [None] * len(names), strict=True):
            code = row_of.get(name)
            if code is None:
                if URL.match(name):
                    raise UserError(
                        f"negatives, row {query + 1}: no row has the url {name[:80]!r}; use its text instead"
                    )
                code = len(rows) + len(added)
                row_of[name] = code
                added.append(_code_row(name, corpus, query))
            if code != query:
                pairs.append((query, code))
                scores.append(score)
    if added:
        corpus = concatenate_datasets([corpus, Dataset.from_list(added, features=corpus.features)])
    distinct, first = np.unique(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=0, return_index=True)
    return corpus, distinct, np.array(scores, dtype=np.float32)[first]


def texts_named(names, row: int) -> list[str]:
    """Converts a value of the column `negatives` (None, a string or a list) to a list of non-blank strings."""
    if names is None:
        return []
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"negatives, row {row + 1}: expected a list of functions or urls, not {names!r:.80}")
    return [name for name in names if name.strip()]


def _code_texts(corpus: Dataset) -> list[str]:
    """Returns the text of each function in the corpus, for comparison with negatives. Joins tokens with spaces."""
    if "code" in corpus.column_names:
        return [code or "" for code in corpus["code"]]
    return [" ".join(tokens or ()) for tokens in corpus["code_tokens"]]


def _code_row(code: str, corpus: Dataset, row: int) -> dict:
    """Makes a corpus row for a negative that is not in the corpus yet, with the language of the row that lists it."""
    values = {"original_string": code, "code": code, "code_tokens": code.split()}
    if "language" in corpus.column_names:
        values["language"] = corpus[row]["language"]
    return {name: values.get(name) for name in corpus.column_names}
