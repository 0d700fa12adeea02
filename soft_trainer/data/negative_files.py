"""Reads negatives that were mined before, from a column of the rows, or from tables of sentence-transformers."""

from __future__ import annotations

import gzip
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import numpy as np
import xxhash

from soft_trainer.data.any_rows import read_splits
from soft_trainer.data.codesearchnet import row_of_url
from soft_trainer.data.negatives import Negatives
from soft_trainer.errors import UserError
from soft_trainer.files import read_json_lines, written_aside

FORMAT = "soft_trainer_negatives"
SHOWN = 80  # characters of a text that a message shows
NO_TEXT = xxhash.xxh3_64_intdigest(b"")


class TrainingRows:
    """The urls of the training rows and hashes of their texts, by which negatives are found.

    Two texts that differ only in white space are equal here, so that tokens joined by spaces equal the text that they
    were split from.

    Args:
        queries, codes: one text for each row, as the encoder reads it. They are read once and not kept.
        urls: one for each row, None for a row without a url.

    Attributes:
        fingerprint: a name that changes with any text and with the order of the rows.
        queries, codes: the first row with each text.
        urls: the given urls.
    """

    def __init__(self, queries: Iterable[str], codes: Iterable[str], urls: Sequence[str | None]):
        digest = xxhash.xxh3_128()
        self.queries, self.codes = (_FirstRows(texts, digest) for texts in (queries, codes))
        self.fingerprint = digest.hexdigest()
        self.urls = urls

    def __len__(self) -> int:
        return len(self.codes.first_equal)

    @cached_property
    def row_of_url(self) -> dict[str, int]:
        """The first row that has each url."""
        return {url: row for url, row in row_of_url(self.urls).items() if url}


class _FirstRows:
    """The first row with each text; an empty text equals no other. The texts are added to `digest`."""

    def __init__(self, texts: Iterable[str], digest):
        hashes = array("Q")
        for text in texts:
            content = text.encode()
            digest.update(len(content).to_bytes(8, "little") + content)
            hashes.append(_text_hash(text))
        ids = np.array(hashes, np.uint64)
        self._known, self._first, places = np.unique(ids, return_index=True, return_inverse=True)
        self.first_equal = np.where(ids == NO_TEXT, np.arange(len(ids)), self._first[places])  # int64[rows]

    def find(self, text: str) -> int | None:
        """Returns the first row with the text."""
        value = np.uint64(_text_hash(text))
        place = int(np.searchsorted(self._known, value))
        found = value != NO_TEXT and place < len(self._known) and self._known[place] == value
        return int(self._first[place]) if found else None


def _text_hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest("".join(text.split()).encode())


class _Codes:
    """Finds the number of a code by its url or its text; numbers codes that are not training rows."""

    def __init__(self, rows: TrainingRows, code_only: Iterable[dict] = ()):
        self.rows = rows
        self.code_only = list(code_only)
        self._known = len(rows) + len(self.code_only)  # codes that `#` and a number may name
        self._numbers: dict[int, int] = {}  # by hash of the text

    def text(self, text: str) -> int:
        """Returns the number of the code with this text."""
        row = self.rows.codes.find(text)
        name = _text_hash(text)
        if row is not None:
            return row
        if name not in self._numbers:
            self._numbers[name] = len(self.rows) + len(self.code_only)
            self.code_only.append({"code": text})
        return self._numbers[name]

    def _number(self, name: str, place: str) -> int:
        """Returns the number of the code that a url, `#` and a number from 1, or a text names."""
        if name in self.rows.row_of_url:
            return self.rows.row_of_url[name]
        if name.startswith("#") and name[1:].isdecimal() and 0 < int(name[1:]) <= self._known:
            return int(name[1:]) - 1
        if len(name.split()) < 2:
            raise UserError(
                f"{place}: the negative {_shown(name)} is neither the url of a training row nor a code; give its text"
            )
        return self.text(name)

    def named(self, lines: Iterable[tuple], place: str) -> Iterator[tuple[dict[int, float], float]]:
        """Yields the candidates that lines of names, their scores or None, and the own code's score stand for."""
        for number, (names, scores, own) in enumerate(lines, 1):
            row = f"{place}, row {number}"
            if scores and len(scores) != len(names):
                raise UserError(f"{row}: {len(names)} negatives and {len(scores)} scores")
            codes = (self._number(name, row) for name in names)
            yield dict(zip(codes, map(_score, scores or [None] * len(names)), strict=True)), _score(own)

    def negatives(self, candidates: Iterable[tuple[Mapping[int, float], float]]) -> Negatives:
        """Turns each row's candidates with their scores, and the score of the row's code, into arrays.

        Codes with the text of the row's own are left out.
        """
        codes = array("q")
        scores = array("f")
        own = array("f")
        starts = array("q", [0])
        first_equal = self.rows.codes.first_equal.tolist()
        for row, (of_row, positive) in enumerate(candidates):
            left = [(c, s) for c, s in of_row.items() if c >= len(first_equal) or first_equal[c] != first_equal[row]]
            if not any(math.isnan(score) for _, score in left):
                left.sort(key=lambda item: -item[1])
            codes.extend(code for code, _ in left)
            scores.extend(score for _, score in left)
            starts.append(len(codes))
            own.append(positive)
        return Negatives(*(np.array(values) for values in (starts, codes, scores, own)), self.code_only)


def load_negatives(path: str | Path, rows: TrainingRows) -> Negatives:
    """Reads the negatives of a file or folder.

    It is one that `write_negatives` wrote, or a table of n-tuples (see `tuple_negatives`) as JSON lines, Parquet or a
    folder of `save_to_disk`, with one split if it has any.

    Raises:
        UserError: there is no such file, it has another format, or its negatives are those of other rows.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir() or path.suffix == ".parquet":
        splits = read_splits(str(path))
        if len(splits) > 1:
            raise UserError(f"{path}: one table of negatives is expected, not {', '.join(splits)}")
        return tuple_negatives(*splits.values(), rows, str(path))
    lines = (row for _, row in read_json_lines(path))
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path}: no rows")
    if FORMAT in first:
        return _read(path, first, lines, rows)
    return tuple_negatives(chain([first], lines), rows, str(path))


def write_negatives(path: str | Path, negatives: Negatives, rows: TrainingRows, estimator: str) -> None:
    """Writes negatives as JSON lines, gzipped if the name ends in `.gz`, as a whole file.

    The first line names the estimator and the rows' fingerprint; then come the code-only rows, then one line for each
    training row. A negative is named by its url, or by `#` and its number from 1 if no url names it.

    Args:
        estimator: the name of the estimator that gave the scores.
    """
    head = {FORMAT: 1, "estimator": estimator, "fingerprint": rows.fingerprint, "rows": len(rows)}
    head["code_only"] = len(negatives.code_only)
    opener = gzip.open if str(path).endswith(".gz") else open
    with written_aside(path) as aside, opener(aside, "wt", encoding="utf-8") as file:
        for line in chain([head], negatives.code_only, (_line(negatives, rows, row) for row in range(len(rows)))):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _line(negatives: Negatives, rows: TrainingRows, row: int) -> dict:
    """Returns the line of a row, with the shortest digits that give the same float32 again."""
    own = slice(negatives.starts[row], negatives.starts[row + 1])
    names = []
    for code in negatives.codes[own].tolist():
        url = rows.urls[code] if code < len(rows) else None
        names.append(url if url and rows.row_of_url[url] == code else f"#{code + 1}")
    positive, *scores = (
        None if np.isnan(score) else float(str(score)) for score in (negatives.own[row], *negatives.scores[own])
    )
    return {"url": rows.urls[row], "positive_score": positive, "negatives": names, "scores": scores}


def _read(path: Path, head: dict, lines: Iterator[dict], rows: TrainingRows) -> Negatives:
    """Reads the negatives that `write_negatives` wrote, after its first line."""
    if head.get("fingerprint") != rows.fingerprint:
        raise UserError(
            f"{path}: made for other rows ({head.get('rows')} rows with the fingerprint "
            f"{str(head.get('fingerprint'))[:8]}, the training set has {len(rows)} with {rows.fingerprint[:8]}); mine "
            "negatives of these rows, or train on those"
        )
    codes = _Codes(rows, islice(lines, head.get("code_only", 0)))
    fields = ((line.get("negatives") or (), line.get("scores"), line.get("positive_score")) for line in lines)
    negatives = codes.negatives(codes.named(fields, str(path)))
    if len(negatives) != len(rows):
        raise UserError(f"{path}: {len(negatives)} rows, the first line says {len(rows)}: the file is not whole")
    return negatives


def column_negatives(
    values: Sequence[Sequence[str] | str | None],
    rows: TrainingRows,
    place: str = "train",
    scores: Sequence[Sequence[float] | None] | None = None,
    own: Sequence[float | None] | None = None,
) -> Negatives:
    """Returns the negatives of a column of urls or texts: nearest first if there are scores, else in their order.

    A value is the text of a code if it contains white space and is not a url.

    Args:
        values: for each row one or several, or None.
        place: the name of the file, for a message.
        scores: for each row one score for each of its values, if known.
        own: the score of each row's code, if known.

    Raises:
        UserError: a url that no training row has, or a wrong number of scores (names the row).
    """
    codes = _Codes(rows)
    unknown = [None] * len(values)
    names = ([value] if isinstance(value, str) else value or () for value in values)
    lines = zip(names, scores or unknown, own or unknown, strict=True)
    return codes.negatives(codes.named(lines, place))


def code_numbers(columns: Sequence[Sequence[str]], rows: TrainingRows) -> tuple[np.ndarray, list[dict]]:
    """Numbers codes that are given by their texts, column by column.

    Args:
        columns: k columns with one text for each of n rows.

    Returns:
        int64[n, k], and the code-only rows in the order of their numbers from n on.
    """
    codes = _Codes(rows)
    numbers = [[codes.text(text) for text in column] for column in columns]
    return np.array(numbers, np.int64).reshape(len(columns), len(rows)).T, codes.code_only


def tuple_negatives(table: Iterable[Mapping], rows: TrainingRows, place: str = "negatives") -> Negatives:
    """Returns the negatives of a table of n-tuples, as sentence-transformers' `mine_hard_negatives` makes it.

    Rows are found by the text of the query, white space aside. A text that is right for a query somewhere in the
    table is not a negative of it.

    Args:
        table: rows of query, code, then `negative` or `negative_1` and so on, perhaps with `scores`, the code's first.

    Raises:
        UserError: the table has another layout, or a query that no training row has.
    """
    codes = _Codes(rows)
    right: dict[int, dict[int, float]] = {}  # row of the query -> codes with their scores
    wrong: dict[int, dict[int, float]] = {}
    unknown: dict[str, None] = {}
    for number, row in enumerate(table, 1):
        query, documents, scores = tuple_texts(row, f"{place}, row {number}")
        first = rows.queries.find(query)
        if first is None:
            unknown[query] = None
            continue
        numbered = list(zip(map(codes.text, documents), scores, strict=True))
        right.setdefault(first, {}).update(numbered[:1])
        wrong.setdefault(first, {}).update(numbered[1:])
    if unknown:
        raise UserError(
            f"{place}: made for other rows: {len(unknown)} of its {len(unknown) + len(right)} queries are in no "
            f"training row, the first: {_shown(next(iter(unknown)))}"
        )
    own_of = rows.codes.first_equal.tolist()
    return codes.negatives(
        (
            {code: score for code, score in wrong.get(query, {}).items() if code not in right[query]},
            right.get(query, {}).get(own_of[row], math.nan),
        )
        for row, query in enumerate(rows.queries.first_equal.tolist())
    )


def tuple_texts(row: Mapping, place: str) -> tuple[str, list[str], list[float]]:
    """Returns the query of an n-tuple, its code and negatives, and the score of each or NaN.

    Args:
        place: the name of the row, for a message.

    Raises:
        UserError: other columns, a missing text, a value that is not text, or a wrong number of scores.
    """
    names = list(row)
    texts = [*names[:2], *(name for name in names[2:] if name == "negative" or name.startswith("negative_"))]
    if len(texts) < 3:
        raise UserError(
            f"{place}: columns {', '.join(names)}: expected a query, a document and then negative, or negative_1 and "
            "on; soft_trainer.sentence_transformers.from_sentence_transformers turns other layouts into training rows"
        )
    query, *documents = (row[name] for name in texts)
    check_texts([query, *documents], place)
    scores = row.get("scores") or [None] * len(documents)
    if len(scores) != len(documents):
        raise UserError(f"{place}: {len(documents)} documents and {len(scores)} scores")
    return query, documents, list(map(_score, scores))


def check_texts(texts: Sequence[str | None], place: str) -> None:
    """Raises UserError if a query or document is missing or is not text; `place` names its row."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            found = "has no text" if text is None else f"is {type(text).__name__}, text is expected"
            raise UserError(f"{place}: the {'document' if number else 'query'} {found}")


def _score(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
