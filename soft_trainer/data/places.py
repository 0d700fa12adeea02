"""Locates rows in the files that they were read from, for messages."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from soft_trainer.files import open_text


def place_of(files: Sequence[Path], row: int) -> str:
    """Returns a row's file and line, or its number if the file has no lines.

    Args:
        row: the index of the row across all files, starting at 0.
    """
    located = (f"{path}, {place}" for path in files for place in _places(path))
    return next(itertools.islice(located, row, None), f"row {row + 1}")


def _places(path: Path) -> Iterator[str]:
    """Yields the location of each row in a file."""
    name = path.name.removesuffix(".gz").lower()
    if name.endswith(".parquet"):
        for row in range(pq.ParquetFile(path).metadata.num_rows):
            yield f"row {row + 1}"
    elif name.endswith(".csv"):
        yield from _csv_lines(path)
    else:
        yield from _json_lines(path)


def _csv_lines(path: Path) -> Iterator[str]:
    """Yields the line on which each row begins. Quoted text may span several lines."""
    with open_text(path, newline="") as file:
        reader = csv.reader(file)
        last = 0
        header = True
        for values in reader:
            if values and not header:
                yield f"line {last + 1}"
            header = header and not values
            last = reader.line_num


def _json_lines(path: Path) -> Iterator[str]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}"
