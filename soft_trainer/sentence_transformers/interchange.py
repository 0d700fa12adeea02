"""Rows of ours as data sets of sentence-transformers and back, with negatives and their scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from datasets import Dataset

from soft_trainer.data.negative_files import TrainingRows, check_texts, column_negatives, tuple_texts
from soft_trainer.data.negatives import Negatives
from soft_trainer.data.sources import as_rows
from soft_trainer.data.tokens import column_texts, text_column
from soft_trainer.errors import UserError
from soft_trainer.sentence_transformers.rows import LABEL, LABEL_COLUMNS, NO_TEXTS, with_rows
from soft_trainer.terminal import print_on_main
from soft_trainer.training.hard_batches import COLUMN_NAME

LAYOUTS = ("n-tuple", "triplet", "labeled-list")
# columns that go with `negatives`
SCORES = "negative_scores"
OWN_SCORE = "positive_score"
QUERY_COLUMNS = ("docstring", "docstring_tokens")
CODE_COLUMNS = ("code", "original_string", "code_tokens")


def to_sentence_transformers(
    rows: Dataset | Sequence[Mapping],
    negatives: Negatives | None = None,
    layout: str = "n-tuple",
    number: int | None = None,
    scores: bool = False,
) -> Dataset:
    """Returns rows of ours as a data set that sentence-transformers trains on.

    Args:
        rows: rows in CodeSearchNet's columns. Their column `negatives` (urls or texts) is read, with the columns
            `negative_scores` and `positive_score` if there are any.
        negatives: negatives in place of that column, such as `load_negatives` gives.
        layout: "n-tuple" has the columns anchor, positive, negative_1, negative_2 and on; "triplet" anchor, positive
            and negative, a row for each negative; "labeled-list" anchor, documents and labels, the right code first.
            Without negatives an n-tuple is a pair.
        number: negatives of each row, the nearest first. None: all of them, for an n-tuple those of the row with the
            fewest. Rows with fewer are left out, and a line says how many.
        scores: add a column of scores, the right code's first. sentence-transformers takes it as its labels.

    Returns:
        The data set, for pairs, triplets and n-tuples without scores with row numbers as `label`, for
        `SoftInfoNCELoss`.

    Raises:
        UserError: no such layout, no negatives where the layout needs them, or no scores where they are asked for.
    """
    if layout not in LAYOUTS:
        raise UserError(f"layout={layout!r}: use one of {', '.join(LAYOUTS)}")
    if number is not None and number < 1:
        raise UserError(f"number={number}: must be 1 or more")
    rows = as_rows(rows, "rows")
    queries = list(column_texts(rows, text_column(rows, QUERY_COLUMNS, "query")))
    codes = list(column_texts(rows, text_column(rows, CODE_COLUMNS, "code")))
    if negatives is None and COLUMN_NAME in rows.column_names:
        names = ("url", SCORES, OWN_SCORE)
        urls, known, own = (rows[name][:] if name in rows.column_names else None for name in names)
        texts = TrainingRows(queries, codes, urls or [None] * len(rows))
        negatives = column_negatives(rows[COLUMN_NAME][:], texts, place="rows", scores=known, own=own)
    if negatives is None:
        if layout != "n-tuple" or number or scores:
            raise UserError(f"layout={layout!r}: the rows have no column {COLUMN_NAME!r}; give negatives=")
        return with_rows(Dataset.from_dict({"anchor": queries, "positive": codes}))
    if len(negatives) != len(rows):
        raise UserError(f"negatives: they are of {len(negatives):,} rows, but there are {len(rows):,} rows")
    made = list(_rows_with_negatives(queries, codes, negatives, layout, number))
    if scores and any(math.isnan(value) for row in made for value in row["scores"]):
        raise UserError("scores: not all of the negatives' scores, and of the right codes', are known")
    dataset = Dataset.from_list(made)
    dataset = dataset if scores else dataset.remove_columns("scores")
    return dataset if scores or layout == "labeled-list" else with_rows(dataset)


def _rows_with_negatives(
    queries: list[str], codes: list[str], negatives: Negatives, layout: str, number: int | None
) -> Iterator[dict]:
    """Yields the rows of a layout, with their scores; says how many rows have too few negatives."""
    if number is None and layout == "n-tuple":
        number = int(negatives.counts.min())
        if not number:
            row = int(negatives.counts.argmin()) + 1
            raise UserError(f"row {row} has no negatives: name number=, which leaves rows with fewer out")
    least = number or (1 if layout == "triplet" else 0)
    kept = np.flatnonzero(negatives.counts >= least).tolist()
    if not kept:
        raise UserError(f"no row has {least} negatives: choose a smaller number")
    if len(kept) < len(queries):
        print_on_main(f"{len(queries) - len(kept):,} of {len(queries):,} rows have too few negatives and are left out")
    texts = [*codes, *(row["code"] for row in negatives.code_only)]
    for row in kept:
        own = slice(negatives.starts[row], negatives.starts[row + 1])
        documents = [codes[row], *(texts[code] for code in negatives.codes[own][:number].tolist())]
        values = [float(negatives.own[row]), *negatives.scores[own][:number].tolist()]
        pair = {"anchor": queries[row], "positive": documents[0]}
        if layout == "labeled-list":
            labels = [1] + [0] * (len(documents) - 1)
            yield {"anchor": queries[row], "documents": documents, "labels": labels, "scores": values}
        elif layout == "triplet":
            for document, value in zip(documents[1:], values[1:], strict=True):
                yield pair | {"negative": document, "scores": [values[0], value]}
        else:
            further = {f"negative_{place}": text for place, text in enumerate(documents[1:], 1)}
            yield pair | further | {"scores": values}


def from_sentence_transformers(dataset: Dataset, language: str | None = None) -> Dataset:
    """Returns a data set of sentence-transformers as rows of ours.

    Pairs, triplets, n-tuples, labelled pairs and labelled lists are read, with or without scores; the query is the
    first column. Triplets and labelled pairs of one query and its code become one row. Row numbers as `label` are
    left out.

    Args:
        language: the rows' programming language, which encoders with data flow need.

    Returns:
        Rows with `docstring`, `code` and `url` (a name from `row-1` on); `negatives`, the texts, if there are any;
        `negative_scores` and `positive_score` if they are known; `language` if it is given.

    Raises:
        UserError: columns of no layout, a row without a text, labels that are no whole numbers, or no right code in
            any row.
    """
    dataset = as_rows(dataset, "dataset")
    row_of: dict[object, dict] = {}
    for key, query, code, wrong, score in _pairs(dataset):
        row = row_of.setdefault(key, {"docstring": query, "code": code, COLUMN_NAME: {}, OWN_SCORE: score})
        row[COLUMN_NAME].update(wrong)
    unclear = "score" in dataset.column_names and LABEL not in dataset.column_names
    if not row_of:
        raise UserError(
            "dataset: scores of labelled pairs do not say which codes are right: mine with "
            "output_format='labeled-list', or without output_scores"
            if unclear
            else "dataset: no row has a right code"
        )
    rows = list(row_of.values())
    for place, row in enumerate(rows, 1):
        wrong = row.pop(COLUMN_NAME)
        row |= {"url": f"row-{place}", COLUMN_NAME: list(wrong), SCORES: list(wrong.values())}
        row |= {"language": language} if language else {}
    unused = {OWN_SCORE} if any(math.isnan(row[OWN_SCORE]) for row in rows) else set()
    if any(math.isnan(score) for row in rows for score in row[SCORES]):
        unused.add(SCORES)
    if not any(row[COLUMN_NAME] for row in rows):
        unused |= {COLUMN_NAME, SCORES}
    return Dataset.from_list(rows).remove_columns(list(unused))


def _pairs(dataset: Dataset) -> Iterator[tuple[object, str, str, dict[str, float], float]]:
    """Yields right pairs: the key of their row, query, code, negatives with scores, and the code's score."""
    texts = [name for name in dataset.column_names if name not in NO_TEXTS]
    labels = [name for name in LABEL_COLUMNS if name in dataset.column_names]
    if len(texts) == 2 and _is_pairs(dataset, labels):
        labels = []
    dataset = dataset.select_columns([*texts, *labels])
    is_text = len(texts) == 2 and getattr(dataset.features[texts[1]], "dtype", None) in ("string", "large_string")
    labelled = labels and is_text
    merges = labelled or "negative" in texts
    table = [_documents(row, f"dataset, row {number}") for number, row in enumerate(dataset, 1)]
    wrong_of: dict[str, dict[str, float]] = {}
    if labelled:  # the negatives of a query stand in other rows
        for query, documents in table:
            wrong_of.setdefault(query, {}).update({text: score for text, label, score in documents if not label})
    for number, (query, documents) in enumerate(table):
        wrong = wrong_of.get(query) or {text: score for text, label, score in documents if not label}
        for text, label, score in documents:
            if label:
                yield ((query, text) if merges else (number, text)), query, text, wrong, score


def _documents(row: Mapping, place: str) -> tuple[str, list[tuple[str, bool, float]]]:
    """Returns the query of one row of a layout, and its documents: text, True if it is right, score or NaN."""
    names = list(row)
    labels = row.get("labels", row.get("label"))
    scores = row.get("scores", row.get("score"))
    is_pair = len(names) == 2 and names[1] not in LABEL_COLUMNS
    if not is_pair and (len(names) < 3 or names[2] not in LABEL_COLUMNS or (labels is None and scores is None)):
        query, texts, scores = tuple_texts(row, place)
        return query, list(zip(texts, [True] + [False] * (len(texts) - 1), scores, strict=True))
    query = row[names[0]]
    texts = row[names[1]]
    if isinstance(texts, str) or texts is None:
        texts = [texts]
        labels = [1 if is_pair else labels or 0]
        scores = None if scores is None else [scores]
        if labels[0] not in (0, 1):
            raise UserError(f"{place}: label {labels[0]}: 1 (right) or 0 (wrong) is expected")
    labels = [1] + [0] * (len(texts) - 1) if labels is None else labels
    scores = [math.nan] * len(texts) if scores is None else scores
    if not len(texts) == len(labels) == len(scores):
        raise UserError(f"{place}: {len(texts)} documents, {len(labels)} labels and {len(scores)} scores")
    check_texts([query, *texts], place)
    return query, list(zip(texts, map(bool, labels), map(float, scores), strict=True))


def _is_pairs(dataset: Dataset, labels: Sequence[str]) -> bool:
    """Returns True if all rows are right pairs: no labels or scores, or labels that are row numbers."""
    if list(labels) != [LABEL]:
        return not labels
    values = dataset[LABEL][:]
    if any(not isinstance(value, int) for value in values):
        raise UserError(f"dataset: column {LABEL!r}: whole numbers are expected: 0 and 1, or row numbers")
    if any(isinstance(value, bool) for value in values):
        return False
    # 0 and 1 mean wrong and right, except in one or two rows as `with_rows` numbers them.
    return values == list(range(len(values))) or not set(values) <= {0, 1}
