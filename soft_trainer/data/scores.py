"""Reads the scores of positives and negatives that rows may already have, from a reranker or a larger encoder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
from datasets import Dataset, List, Value

from soft_trainer.data.column_names import NEGATIVE, NEGATIVE_SCORES, NEGATIVES, POSITIVE_SCORES
from soft_trainer.data.named_negatives import texts_named
from soft_trainer.data.tokens import TOKENS_END, column_texts, columns_in
from soft_trainer.errors import UserError
from soft_trainer.terminal import print_on_main, shortened

SCORES = "scores"  # of a row's positives, and then of its negatives, as sentence-transformers writes them
OF_POSITIVES = ("positive_scores", "pos_scores")
OF_NEGATIVES = ("negative_scores", "neg_scores")
SCORE_COLUMNS = (SCORES, *OF_POSITIVES, *OF_NEGATIVES)
SCORE = "score"  # of the one function in a labelled pair
LABEL = "label"


class Scored(NamedTuple):
    """A row's positives and negatives, each with its score, or None where the score is unknown."""

    row: int
    positives: list[tuple[str, float | None]]
    negatives: list[tuple[str, float | None]]


def with_scores(rows: Dataset, columns: Mapping[str, Sequence[str]], place: str, quiet: bool = False) -> Dataset:
    """Moves scores to columns `POSITIVE_SCORES` and `NEGATIVE_SCORES`, beside the positives and `negatives`.

    Besides rows with columns of negatives, this reads two further forms that `mine_hard_negatives` of
    sentence-transformers writes. A labelled list has the positive and then the negatives in the column of functions,
    and all of their scores in `scores`. A labelled pair has a query, a function and a `score`; the first pair of each
    query is the positive. Other rows stay unchanged.

    Args:
        columns: the result of `chosen_columns`.
        place: where the rows come from, for messages.
        quiet: True to print nothing.

    Raises:
        UserError: a row has another number of scores than of functions, or a score is not a finite number.
    """
    given = columns_in(rows, SCORE_COLUMNS)
    codes = columns_in(rows, columns["code"])
    if not codes:
        return rows
    negatives = [name for name in rows.column_names if NEGATIVE.fullmatch(name)]
    listed = isinstance(rows.features[codes[0]], List) and not codes[0].endswith(TOKENS_END)
    if given == [SCORES] and listed and not negatives:
        scored = list(_labelled_lists(rows, codes[0], place))
        form = "labelled lists: the first function of each row is its positive, and the others are hard negatives"
    elif given and (negatives or listed):
        scored = list(_scored_rows(rows, codes[0], negatives, given, place))
        form = f"scores in {', '.join(given)}"
    elif SCORE in rows.column_names and not listed and not negatives:
        labels = _labels(rows)
        scored = _labelled_pairs(rows, columns["query"], codes[0], labels, place)
        form = "labelled pairs: the first function of each query is its positive, and the others are hard negatives"
        given = [SCORE]
        if labels is not None:
            form = f"labelled pairs in {LABEL}, {SCORE}"
            given.append(LABEL)
    else:
        scored = []
        form = ""
    if not scored:
        return rows
    if not quiet:
        print_on_main(f"{place}: reading {form}")
    return _made(rows, scored, codes[0], [*given, *negatives])


def _scored_rows(
    rows: Dataset, code: str, negatives: Sequence[str], given: Sequence[str], place: str
) -> Iterator[Scored]:
    """Reads rows that have their negatives, and the scores of both, in columns."""
    read = rows.select_columns([code, *negatives, *given])
    for number, row in enumerate(read):
        positives = row[code]
        if code.endswith(TOKENS_END) or not isinstance(positives, list):
            positives = [positives]
        wrong = []
        for name in negatives:
            texts_named(row[name], number)  # raises an error for other values than texts
            wrong += row[name] if isinstance(row[name], list) else [row[name]]
        of_positives = [None] * len(positives)
        of_negatives = [None] * len(wrong)
        for name in given:
            if name == SCORES:
                scores = _numbers(row[name], name, [*positives, *wrong], place, number)
                of_positives = scores[: len(positives)]
                of_negatives = scores[len(positives) :]
            elif name in OF_POSITIVES:
                of_positives = _numbers(row[name], name, positives, place, number)
            else:
                of_negatives = _numbers(row[name], name, wrong, place, number)
        yield Scored(
            number,
            list(zip(positives, of_positives, strict=True)),
            list(zip(wrong, of_negatives, strict=True)),
        )


def _labelled_lists(rows: Dataset, code: str, place: str) -> Iterator[Scored]:
    """Reads rows whose column of functions lists the positive and then the negatives."""
    for number, (texts, scores) in enumerate(zip(rows[code], rows[SCORES], strict=True)):
        texts = texts or []
        pairs = list(zip(texts, _numbers(scores, SCORES, texts, place, number), strict=True))
        yield Scored(number, pairs[:1], pairs[1:])


def _labelled_pairs(
    rows: Dataset, queries: Sequence[str], code: str, labels: pd.Series | None, place: str
) -> list[Scored]:
    """Reads rows that each have a query, one function and its score.

    Without labels, the first of the consecutive rows of a query is the positive.

    Args:
        labels: 1 for each positive and 0 for each negative, or None.

    Returns:
        The rows of the positives with their query's negatives. Empty if every row has another query, or if the rows
        of a query are apart, because all of these rows may be positives.
    """
    names = columns_in(rows, queries)
    if not names:
        return []
    table = pd.DataFrame({"query": list(column_texts(rows, names[0])), "text": rows[code][:], "score": rows[SCORE][:]})
    if labels is not None:
        table["right"] = labels == 1
    else:
        table["right"] = table["query"] != table["query"].shift()
        if table["right"].all() or table.loc[table["right"], "query"].duplicated().any():
            return []
    scored = []
    for query, of_query in table.groupby("query", sort=False):
        pairs = []
        for number, text, score in of_query[["text", "score"]].itertuples():
            pairs += zip([text], _numbers(score, SCORE, [text], place, number), strict=True)
        wrong = [pair for pair, right in zip(pairs, of_query["right"], strict=True) if not right]
        if len(wrong) == len(pairs):
            row = of_query.index[0] + 1
            raise UserError(f"{place}, row {row}: no function with label 1 for the query {shortened(repr(query))}")
        for number, pair, right in zip(of_query.index, pairs, of_query["right"], strict=True):
            if right:
                scored.append(Scored(number, [pair], wrong))
    return sorted(scored)


def _labels(rows: Dataset) -> pd.Series | None:
    """Returns the column `label` if all of its values are 0 or 1, otherwise None."""
    if LABEL not in rows.column_names:
        return None
    labels = pd.to_numeric(pd.Series(rows[LABEL][:]), errors="coerce")
    return labels if labels.isin((0, 1)).all() else None


def _numbers(values, name: str, texts: Sequence, place: str, row: int) -> list[float | None]:
    """Returns the score of each of a row's functions. A missing value or NaN means that the score is unknown.

    Args:
        values: a score for each function, or for each function that is not empty.
        texts: the functions.

    Raises:
        UserError: the number of scores differs from the number of functions, or a score is not a finite number.
    """
    if values is None:
        return [None] * len(texts)
    if not isinstance(values, list):
        values = [values]
    numbers = []
    for value in values:
        try:
            number = math.nan if value is None else float(value)  # a CSV file has text
        except (TypeError, ValueError):
            number = math.inf
        if math.isinf(number) or isinstance(value, bool):
            raise UserError(f"{place}, row {row + 1}: {name} contains {shortened(repr(value))}; expected numbers")
        numbers.append(None if math.isnan(number) else number)
    if len(numbers) == sum(map(_has_text, texts)):
        numbers.reverse()
        return [numbers.pop() if _has_text(text) else None for text in texts]
    if len(numbers) != len(texts):
        what = "positives and negatives"
        if name != SCORES:
            what = "positives" if name in OF_POSITIVES else "negatives"
        raise UserError(f"{place}, row {row + 1}: {name} has {len(numbers)} values for {len(texts)} {what}")
    return numbers


def _has_text(text: str | list[str] | None) -> bool:
    """Returns False for a text that is missing or blank, and for an empty list of tokens."""
    if isinstance(text, str):
        return bool(text.strip())
    return bool(text)


def _made(rows: Dataset, scored: Sequence[Scored], code: str, dropped: Sequence[str]) -> Dataset:
    """Returns the rows with their positives, negatives and scores in four columns, without the columns `dropped`."""
    made = {code: [], NEGATIVES: [], POSITIVE_SCORES: [], NEGATIVE_SCORES: []}
    for _, positives, negatives in scored:
        for name, of_name, pairs in ((code, POSITIVE_SCORES, positives), (NEGATIVES, NEGATIVE_SCORES, negatives)):
            # An empty text has no score, so that a score stays with its text when empty texts are dropped.
            kept = [pair for pair in pairs if _has_text(pair[0])]
            made[name].append([text for text, _ in kept])
            made[of_name].append([score for _, score in kept])
    numbers = [row for row, _, _ in scored]
    if numbers != list(range(len(rows))):
        rows = rows.select(numbers)
    order = rows.column_names
    texts = made.pop(code)
    if isinstance(rows.features[code], List) and not code.endswith(TOKENS_END):
        kind = List(Value("string"))
        if all(len(of_row) == 1 for of_row in texts):
            texts = [text for (text,) in texts]
            kind = Value("string")
        rows = rows.remove_columns(code).add_column(code, texts, feature=kind).select_columns(order)
    rows = rows.remove_columns(list(dropped))
    for name, values in made.items():
        kind = Value("string") if name == NEGATIVES else Value("float64")
        rows = rows.add_column(name, values, feature=List(kind))
    return rows
