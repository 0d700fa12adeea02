"""Negatives from files: those that were mined before, a column of one's own, and sentence-transformers' layouts."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import xxhash
from datasets import load_from_disk

from soft_trainer.data.negatives import Negatives
from soft_trainer.errors import UserError
from soft_trainer.files import written_aside

FORMAT = "soft_trainer_negatives"
SHOWN = 80  # characters of a text that a message shows


@dataclass(frozen=True)
class TrainingRows:
    """The texts and urls of the training rows, by which negatives are found.

    Args:
        queries, codes: one text for each row, as the encoder reads it.
        urls: one for each row, or None for a row without.
    """

    queries: Sequence[str]
    codes: Sequence[str]
    urls: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.queries)

    @cached_property
    def fingerprint(self) -> str:
        """A name that changes with any text and with the order of the rows."""
        digest = xxhash.xxh3_128()
        for texts in (self.queries, self.codes):
            for text in texts:
                content = text.encode()
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()

    @cached_property
    def row_of_url(self) -> dict[str, int]:
        """The first row that has each url."""
        return _first(self.urls)

    @cached_property
    def row_of_code(self) -> dict[str, int]:
        """The first row that has each code text, white space aside."""
        return _first(map(_squeezed, self.codes))

    @cached_property
    def first_alike(self) -> list[int]:
        """For each row the first row with its code text, white space aside."""
        return [self.row_of_code.get(_squeezed(text), row) for row, text in enumerate(self.codes)]


def _first(names: Iterable[str | None]) -> dict[str, int]:
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        if name:
            first.setdefault(name, row)
    return first


def _squeezed(text: str) -> str:
    """A text without white space: tokens joined by spaces equal the text that they were cut from."""
    return "".join(text.split())


@dataclass
class _Codes:
    """Finds the number of a code by its url or its text; gives new numbers to codes that are no training rows."""

    rows: TrainingRows
    further: Sequence[Mapping] = ()
    code_only: list[dict] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self.by_url = {row["url"]: row for row in self.further if row.get("url")}

    def number(self, name: str, place: str, known: int | None = None) -> int:
        """The number of the code that a url, `#` and a number from 1, or a text names.

        Args:
            known: codes that a number may name; the training rows when None.

        Raises:
            UserError: none of these.
        """
        if name in self.rows.row_of_url:
            return self.rows.row_of_url[name]
        if name in self.by_url:
            return self._added(name, dict(self.by_url[name]))
        if name.startswith("#") and name[1:].isdecimal() and 0 < int(name[1:]) <= (known or len(self.rows)):
            return int(name[1:]) - 1
        if len(name.split()) < 2:
            raise UserError(
                f"{place}: the negative {_shown(name)} is neither the url of a training row nor that of a code beside "
                "them; give its text, or name the file that holds it"
            )
        return self.text(name)

    def text(self, text: str) -> int:
        """The number of the code with this text."""
        row = self.rows.row_of_code.get(_squeezed(text))
        return self._added(_squeezed(text), {"code": text}) if row is None else row

    def _added(self, name: str, row: dict) -> int:
        if name not in self.numbers:
            self.numbers[name] = len(self.rows) + len(self.code_only)
            self.code_only.append(row)
        return self.numbers[name]

    def negatives(self, candidates: Iterable[tuple[Mapping[int, float], float]]) -> Negatives:
        """Candidates of each row with their scores, and the score of its own code, as arrays.

        Codes with the text of the row's own are left out.
        """
        codes, scores, own, starts = array("q"), array("f"), array("f"), array("q", [0])
        alike = self.rows.first_alike
        for row, (of_row, positive) in enumerate(candidates):
            left = [(c, s) for c, s in of_row.items() if c >= len(alike) or alike[c] != alike[row]]
            if not any(math.isnan(score) for _, score in left):
                left.sort(key=lambda item: -item[1])
            codes.extend(code for code, _ in left)
            scores.extend(score for _, score in left)
            starts.append(len(codes))
            own.append(positive)
        return Negatives(*(np.array(values) for values in (starts, codes, scores, own)), self.code_only)


def load_negatives(path: str | Path, rows: TrainingRows, further: Sequence[Mapping] = ()) -> Negatives:
    """The negatives of a file or folder.

    It is one that `write_negatives` wrote, or a table in one of the layouts of sentence-transformers' mined negatives
    (triplet, n-tuple, labeled-pair, labeled-list; with scores or without), as JSON lines, Parquet or a folder of
    `Dataset.save_to_disk`.

    Args:
        further: rows with `url` and `code` that are no training rows.

    Raises:
        UserError: no such file, no such layout, or negatives of other rows.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        return layout_negatives(load_from_disk(str(path)), rows, str(path))
    if path.suffix == ".parquet":
        return layout_negatives(pq.read_table(path).to_pylist(), rows, str(path))
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise UserError(f"{path}: no rows")
    if FORMAT in first:
        return _read(path, first, lines, rows, further)
    return layout_negatives([first, *lines], rows, str(path))


def write_negatives(path: str | Path, negatives: Negatives, rows: TrainingRows, estimator: str) -> None:
    """Write negatives as JSON lines, gzipped where the name ends in `.gz`, as a whole file.

    The first line names the estimator and the rows' fingerprint; then come the code-only rows, then one line for each
    training row. A negative is named by its url, or by `#` and its number from 1 where it has no url of its own.

    Args:
        estimator: the name of what gave the scores.
    """
    head = {"estimator": estimator, "fingerprint": rows.fingerprint, "rows": len(rows)}
    path = Path(path)
    with written_aside(path) as aside:
        compressed = path.name.endswith(".gz")
        with gzip.open(aside, "wt", encoding="utf-8") if compressed else open(aside, "w", encoding="utf-8") as file:
            for line in ({FORMAT: 1} | head | {"code_only": len(negatives.code_only)}, *negatives.code_only):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            for row in range(len(rows)):
                file.write(json.dumps(_line(negatives, rows, row), ensure_ascii=False) + "\n")


def _line(negatives: Negatives, rows: TrainingRows, row: int) -> dict:
    own = slice(negatives.starts[row], negatives.starts[row + 1])
    return {
        "url": rows.urls[row],
        "positive_score": _number(negatives.own[row]),
        "negatives": [_name(code, negatives, rows) for code in negatives.codes[own].tolist()],
        "scores": [_number(score) for score in negatives.scores[own]],
    }


def _name(code: int, negatives: Negatives, rows: TrainingRows) -> str:
    url = rows.urls[code] if code < len(rows) else None
    return url if url and rows.row_of_url[url] == code else f"#{code + 1}"


def _number(score: np.float32) -> float | None:
    # The shortest digits that give the same float32 again.
    return None if np.isnan(score) else float(str(score))


def _read(path: Path, head: dict, lines: Iterator[dict], rows: TrainingRows, further: Sequence[Mapping]) -> Negatives:
    """The negatives that `write_negatives` wrote, after its first line."""
    if head.get("fingerprint") != rows.fingerprint:
        raise UserError(
            f"{path}: made for other rows ({head.get('rows')} rows with the fingerprint "
            f"{str(head.get('fingerprint'))[:8]}, the training set has {len(rows)} with {rows.fingerprint[:8]}); mine "
            "negatives of these rows, or train on those"
        )
    codes = _Codes(rows, further)
    codes.code_only = [next(lines, {}) for _ in range(head.get("code_only", 0))]
    known = len(rows) + len(codes.code_only)

    def candidates() -> Iterator[tuple[dict[int, float], float]]:
        for number, line in enumerate(lines, 1):
            place = f"{path}, row {number}"
            names, scores = line.get("negatives") or (), line.get("scores") or ()
            if len(scores) not in (0, len(names)):
                raise UserError(f"{place}: {len(names)} negatives and {len(scores)} scores")
            numbers = (codes.number(name, place, known) for name in names)
            of_row = zip(numbers, map(_score, scores or [None] * len(names)), strict=True)
            yield dict(of_row), _score(line.get("positive_score"))

    negatives = codes.negatives(candidates())
    if len(negatives) != len(rows):
        raise UserError(f"{path}: {len(negatives)} rows, the first line says {len(rows)}: the file is not whole")
    return negatives


def column_negatives(
    values: Sequence[Sequence[str] | str | None],
    rows: TrainingRows,
    further: Sequence[Mapping] = (),
    place: str = "train",
    scores: Sequence[Sequence[float] | None] | None = None,
    own: Sequence[float | None] | None = None,
) -> Negatives:
    """The negatives of a column of urls or texts: without scores in their order, else the nearest first.

    A value is the text of a code if it holds white space and is not a url.

    Args:
        values: for each row one or several, or None.
        further: rows with `url` and `code` that are no training rows.
        place: the name of the file, for a message.
        scores: for each row one for each of its values, if they are known.
        own: for each row the score of its own code, if it is known.

    Raises:
        UserError: a url that is neither a training row's nor a further code's, or scores of another number (names
            the row).
    """
    codes = _Codes(rows, further)
    candidates = []
    for row, value in enumerate(values):
        names = [value] if isinstance(value, str) else value or ()
        numbers = [codes.number(name, f"{place}, row {row + 1}") for name in names]
        known = (scores and scores[row]) or [None] * len(names)
        if len(known) != len(names):
            raise UserError(f"{place}, row {row + 1}: {len(names)} negatives and {len(known)} scores")
        of_row = dict(zip(numbers, map(_score, known), strict=True))
        candidates.append((of_row, _score(own[row] if own else None)))
    return codes.negatives(candidates)


def code_numbers(columns: Sequence[Sequence[str]], rows: TrainingRows) -> tuple[np.ndarray, list[dict]]:
    """The numbers of codes that are given by their texts, column by column.

    Args:
        columns: k columns with one text for each of n rows.

    Returns:
        int64[n, k], and the code-only rows in the order of their numbers from n on.
    """
    codes = _Codes(rows)
    numbers = [[codes.text(text) for text in column] for column in columns]
    return np.array(numbers, np.int64).reshape(len(columns), len(rows)).T, codes.code_only


def layout_negatives(table: Iterable[Mapping], rows: TrainingRows, place: str = "negatives") -> Negatives:
    """The negatives of a table as sentence-transformers' `mine_hard_negatives` makes it, in any of its four layouts.

    Rows are found by the text of the query, white space aside. A text that is right for a query somewhere in the
    table is no negative of it.

    Args:
        table: rows with the query first and the document or documents second, then the layout's own columns.

    Raises:
        UserError: no such layout, or a query that no training row has.
    """
    right: dict[str, dict[str, float]] = {}
    wrong: dict[str, dict[str, tuple[str, float]]] = {}
    for number, row in enumerate(table, 1):
        query, documents = layout_documents(row, f"{place}, row {number}")
        query = _squeezed(query)
        right_here, wrong_here = right.setdefault(query, {}), wrong.setdefault(query, {})
        for text, label, score in documents:
            if label:
                right_here[_squeezed(text)] = score
            else:
                wrong_here[_squeezed(text)] = (text, score)
    queries = [_squeezed(query) for query in rows.queries]
    unknown = sorted(right.keys() - set(queries))
    if unknown:
        raise UserError(
            f"{place}: made for other rows: {len(unknown)} of its {len(right)} queries are in no training row, the "
            f"first (without white space): {_shown(unknown[0])}"
        )
    codes = _Codes(rows)
    # Scores without labels do not tell which document is right; the training rows do.
    for query, code in zip(queries, rows.codes, strict=True):
        if _squeezed(code) in wrong.get(query, {}):
            right[query][_squeezed(code)] = wrong[query].pop(_squeezed(code))[1]
    candidates = []
    for query, code in zip(queries, rows.codes, strict=True):
        documents = {name: item for name, item in wrong.get(query, {}).items() if name not in right[query]}
        of_row = {codes.text(text): score for text, score in documents.values()}
        candidates.append((of_row, right.get(query, {}).get(_squeezed(code), math.nan)))
    return codes.negatives(candidates)


def layout_documents(row: Mapping, place: str) -> tuple[str, list[tuple[str, bool, float]]]:
    """The query of one row of a layout, and its documents, each with True if it is right and its score or NaN.

    Args:
        place: the name of the row, for a message.

    Raises:
        UserError: no such layout, documents without labels or scores, a missing text, or a pair's label besides 0, 1.
    """
    names = list(row)
    texts = [name for name in names[2:] if name == "negative" or name.startswith("negative_")]
    labels = row.get("labels", row.get("label"))
    scores = row.get("scores", row.get("score"))
    if texts:
        documents = [row[name] for name in (names[1], *texts)]
        labels = [1] + [0] * len(texts)
    elif len(names) > 2 and isinstance(row[names[1]], list) and (labels is not None or scores is not None):
        documents = row[names[1]]
        labels = labels if labels is not None else [1] + [0] * (len(documents) - 1)
    elif len(names) > 2 and isinstance(row[names[1]], str) and (labels is not None or scores is not None):
        documents, labels = [row[names[1]]], [labels or 0]
        if labels[0] not in (0, 1):
            raise UserError(f"{place}: label {labels[0]}: 1 (right) or 0 (wrong) is expected")
        scores = None if scores is None else [scores]
    else:
        raise UserError(
            f"{place}: columns {', '.join(names)}: expected a query, a document and then negative, negative_1 and on, "
            "label, labels, score or scores"
        )
    scores = [None] * len(documents) if scores is None else scores
    if not len(documents) == len(labels) == len(scores):
        raise UserError(f"{place}: {len(documents)} documents, {len(labels)} labels and {len(scores)} scores")
    check_texts([row[names[0]], *documents], place)
    values = zip(documents, map(bool, labels), map(_score, scores), strict=True)
    return row[names[0]], list(values)


def check_texts(texts: Sequence[str | None], place: str) -> None:
    """Raises UserError if a query or document is missing; `place` names its row."""
    if None in texts:
        raise UserError(f"{place}: the {'document' if texts.index(None) else 'query'} has no text")


def _lines(path: Path) -> Iterator[dict]:
    """The JSON objects of a file of lines, plain or gzipped."""
    opened = gzip.open(path, "rt", encoding="utf-8") if path.name.endswith(".gz") else open(path, encoding="utf-8")
    with opened as lines:
        try:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UserError(f"{path}, line {number}: a JSON object is expected, not {type(row).__name__}")
                yield row
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: cannot be read as JSON lines: {error}") from None


def _score(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
