"""Reads the column `negatives`, which lists codes that do not answer the row's query."""

from __future__ import annotations

import re

import numpy as np
from datasets import Dataset, concatenate_datasets

from soft_trainer.errors import UserError
from soft_trainer.terminal import print_on_main

NEGATIVES = "negatives"  # a column of codes, as texts or urls, that do not answer the row's query
COLUMN = re.compile(r"negative(_\d+)?")
URL = re.compile(r"code:[0-9a-f]{32}$|https?://\S+$")  # an id, which cannot be a code


def with_negative_columns(rows: Dataset, place: str) -> Dataset:
    """Collects the columns that sentence-transformers calls `negative`, `negative_1` and so on in `negatives`."""
    names = [name for name in rows.column_names if COLUMN.fullmatch(name)]
    if not names or NEGATIVES in rows.column_names:
        return rows
    print_on_main(f"{place}: {', '.join(names)}: hard negatives, not used without negatives_per_query")
    values = zip(*(rows[name][:] for name in names), strict=True)
    negatives = [[text for text in texts if text] for texts in values]
    return rows.remove_columns(names).add_column(NEGATIVES, negatives)


def with_negatives(rows: Dataset, corpus: Dataset, urls: np.ndarray) -> tuple[Dataset, np.ndarray]:
    """Adds codes that occur only in `negatives` to the corpus. Returns the corpus and the negative pairs, int64[P, 2].

    Args:
        urls: object[rows], the id of each row's code, or None.

    Raises:
        UserError: a value is neither a code nor the url of a row.
    """
    row_of = {}
    texts = _code_texts(corpus)
    for row in reversed(range(len(rows))):  # if several rows are equal, the first stays
        row_of[texts[row]] = row
        if urls[row] is not None:
            row_of[urls[row]] = row
    added = []
    pairs = []
    for query, names in enumerate(rows[NEGATIVES]):
        for name in _names(names, query):
            code = row_of.get(name)
            if code is None:
                if URL.match(name):
                    raise UserError(
                        f"negatives, row {query + 1}: no row has the url {name[:80]!r}; give the code's text"
                    )
                code = len(rows) + len(added)
                row_of[name] = code
                added.append(_code_row(name, corpus, query))
            if code != query:
                pairs.append((query, code))
    if added:
        corpus = concatenate_datasets([corpus, Dataset.from_list(added, features=corpus.features)])
    return corpus, np.unique(np.array(pairs, dtype=np.int64).reshape(-1, 2), axis=0)


def _names(names, row: int) -> list[str]:
    """Returns a row's negatives as a list of strings."""
    if names is None:
        return []
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"negatives, row {row + 1}: expected a list of codes or urls, not {names!r:.80}")
    return [name for name in names if name.strip()]


def _code_texts(corpus: Dataset) -> list[str]:
    """Returns each row's code, to match negatives against. Tokens are joined by single spaces."""
    if "code" in corpus.column_names:
        return [code or "" for code in corpus["code"]]
    return [" ".join(tokens or ()) for tokens in corpus["code_tokens"]]


def _code_row(code: str, corpus: Dataset, row: int) -> dict:
    """Makes a corpus row for a code without a query, in the language of the row that mentions it."""
    values = {"original_string": code, "code": code, "code_tokens": code.split()}
    if "language" in corpus.column_names:
        values["language"] = corpus[row]["language"]
    return {name: values.get(name) for name in corpus.column_names}
