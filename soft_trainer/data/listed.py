"""Reads what rows list besides a query and its function: further positives, hard negatives, and scores of both."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from datasets import Dataset, List, Value, concatenate_datasets

from soft_trainer.data.array_cache import flat
from soft_trainer.data.column_names import CODES, POSITIVES, is_list_text
from soft_trainer.data.columns import Columns, known_columns, row_texts
from soft_trainer.errors import UserError
from soft_trainer.system.terminal import print_on_main, shortened

URL = re.compile(r"code:[0-9a-f]{32}$|https?://\S+$")  # such a value is an id, not the text of a function


@dataclass(frozen=True)
class Listed:
    """The negatives and scores of R rows. A row that lists several positives is repeated for each.

    Args:
        query_of (`int64[R]`): the number of each row's query, in ascending order.
        negatives: N functions that do not answer a query, as texts or as urls of rows.
        negative_of (`int64[N]`): the query of each negative.
        scores (`float32[R + N]`): the score of each row's function and of each negative, or NaN.
    """

    query_of: np.ndarray
    negatives: Sequence[str]
    negative_of: np.ndarray
    scores: np.ndarray

    def distinct_queries(self, rows: Dataset) -> Dataset:
        """Returns the first of the rows of each query."""
        first = np.unique(self.query_of, return_index=True)[1]
        return rows if len(first) == len(rows) else rows.select(first)

    def with_negatives(self, corpus: Dataset, urls: np.ndarray) -> tuple[Dataset, np.ndarray]:
        """Finds the negatives among the functions of the rows, and adds the others to the end of the corpus.

        Args:
            corpus: the function of each row.
            urls: object[R], the id of each row's function, or None.

        Returns:
            The extended corpus, and the (query, negative function) pairs, int64[N, 2].

        Raises:
            UserError: a negative is a url that no row has.
        """
        column = known_columns(corpus, CODES)[0]
        row_of = {}
        for row, names in reversed([*enumerate(zip(row_texts(corpus, column), urls, strict=True))]):
            row_of |= dict.fromkeys(filter(None, names), row)  # the first of several equal rows wins
        added = []
        languages = corpus["language"][:] if "language" in corpus.column_names else None
        for query, name in zip(self.negative_of, self.negatives, strict=True):
            if name in row_of:
                continue
            if URL.match(name):
                raise UserError(f"negatives, row {query + 1}: no row has the url {name[:80]!r}; use its text instead")
            row_of[name] = len(corpus) + len(added)
            values = {"original_string": name, "code": name, "code_tokens": name.split()}
            if languages is not None:
                values["language"] = languages[np.searchsorted(self.query_of, query)]
            added.append({column: values.get(column) for column in corpus.column_names})
        pairs = np.stack([self.negative_of, [row_of[name] for name in self.negatives]], axis=1)
        if added:
            corpus = concatenate_datasets([corpus, Dataset.from_list(added, features=corpus.features)])
        return corpus, pairs


def read_listed(rows: Dataset, columns: Columns, source: str, check: bool) -> tuple[Dataset, Listed | None]:
    """Reads the columns of several positives, of negatives and of scores, besides the code of each row.

    Args:
        source: where the rows come from, for messages.
        check: whether a row without a positive is an error.

    Returns:
        The rows, with one positive each and without these columns, and what they list.

    Raises:
        UserError: a value is neither a text nor a list of texts, or a score does not fit. The message gives the row.
    """
    code = next(iter(known_columns(rows, columns.code)), None)
    negatives = known_columns(rows, columns.negatives)
    given = known_columns(rows, columns.scores)
    several = code in POSITIVES and isinstance(rows.features[code], List)
    if not (several or negatives):
        return rows, None
    read = {name: rows[name][:] for name in (*([code] if code else ()), *negatives, *given)}
    rows = rows.remove_columns([*negatives, *given])
    if not code:
        return rows, None
    positives = []  # (row, text, score)
    wrong = []
    blank = 0
    for row in range(len(rows)):
        own = (read[code][row] or []) if several else [read[code][row]]
        others = [*chain.from_iterable(_texts(read[name][row], row, source) for name in negatives)]
        values = {name: read[name][row] if name in read else None for name in columns.scores}
        scores = _scores(values, own, others, source, row)
        listed = [(row, *pair) for pair in zip([*own, *others], scores, strict=True)]
        found = [each for each in listed[: len(own)] if not several or has_text(each[1])]
        if check and not found:
            raise UserError(f"{source}, row {row + 1}: column {code!r} is missing or empty; fill in or drop this row")
        blank += len(own) - len(found)
        positives += found or [(row, None, math.nan)]
        wrong += [each for each in listed[len(own) :] if has_text(each[1])]
    if blank:
        print_on_main(f"{source}: skipped {blank:,} empty texts in lists of column {code!r}")
    query_of, texts, scores = map(list, zip(*positives, strict=True))
    if several:
        rows = flat(rows.remove_columns(code).select(query_of)).add_column(code, texts, feature=Value("string"))
    negative_of, negatives, more = map(list, zip(*wrong, strict=True)) if wrong else ([], [], [])
    scores = np.asarray([*scores, *more], np.float32)
    return rows, Listed(np.asarray(query_of, np.int64), negatives, np.asarray(negative_of, np.int64), scores)


def _texts(value, row: int, source: str) -> list[str | None]:
    """Converts a value in a column of negatives (None, a text or a list of texts) to a list.

    Raises:
        UserError: the value has another type, or is the text of a list.
    """
    if isinstance(value, str) and is_list_text(value):
        raise UserError(
            f"{source}, row {row + 1}: a column of negatives contains the text of a list; use JSON Lines, or several "
            "columns such as negative_1"
        )
    texts = value if isinstance(value, list) else [value]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise UserError(
            f"{source}, row {row + 1}: a column of negatives contains {shortened(repr(value))}; expected a function, "
            "its url or a list of these"
        )
    return texts


def _scores(given: Mapping, positives: Sequence, negatives: Sequence, source: str, row: int) -> list[float]:
    """Returns the score of each positive and then of each negative, or NaN.

    Args:
        given: the row's values by column: one column scores all functions, or two score positives and negatives. A
            value lists a score for each function, or for each function that is not empty.

    Raises:
        UserError: the number of scores differs from the number of functions.
    """
    parts = [[*positives, *negatives]] if len(given) < 2 else [positives, negatives]
    scores = []
    for (name, values), texts in zip(given.items() or [(None, None)], parts, strict=True):
        if values is None:
            scores += [math.nan] * len(texts)
            continue
        values = values if isinstance(values, list) else [values]
        numbers = [_number(value, name, source, row) for value in values]
        if len(numbers) == sum(map(has_text, texts)):
            known = iter(numbers)
            numbers = [next(known) if has_text(text) else math.nan for text in texts]
        if len(numbers) != len(texts):
            raise UserError(f"{source}, row {row + 1}: {name} has {len(numbers)} values for {len(texts)} functions")
        scores += numbers
    return scores


def _number(value, name: str, source: str, row: int) -> float:
    """Converts a score to a number, or to NaN if it is missing. Raises UserError if it is not a finite number."""
    try:
        number = math.nan if value is None else float(value)  # a CSV file has text
    except (TypeError, ValueError):
        number = math.inf
    if math.isinf(number) or isinstance(value, bool):
        raise UserError(f"{source}, row {row + 1}: {name} contains {shortened(repr(value))}; expected numbers")
    return number


def has_text(text: str | list[str] | None) -> bool:
    """Returns False for a text that is missing or blank, and for an empty list of tokens."""
    return bool(text.strip() if isinstance(text, str) else text)
