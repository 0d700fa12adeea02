"""Compares the rows that `load_rows` gives with what each format's own reader says is in the file."""

import contextlib
import csv
import gzip
import json
import tempfile
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st

from soft_trainer.data.column_names import is_list_text
from soft_trainer.data.load import load_rows
from soft_trainer.errors import UserError

TEXTS = st.one_of(
    st.text(min_size=1, max_size=12),
    st.text(alphabet="aé日\U0001f600\"',;\t\n\r\\ 0", min_size=1, max_size=12),
    st.sampled_from(
        ["NA", "null", "None", "nan", "001", "1e5", "2020-01-01", "True", '["a", "b"]', "=1+1", "\ufeffx"]
    ),
)
MAYBE_BLANK = st.one_of(TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, st.sampled_from(["", " ", None]))
# Values of columns that nobody reads.
OTHERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**62), max_value=2**62),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    TEXTS,
    st.lists(st.integers(0, 9), max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 9), max_size=2),
)
NAMES = st.sampled_from([("query", "code"), ("anchor", "positive"), ("question", "answer"), ("docstring", "code")])


def csv_module(path: Path) -> list[dict]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_gzipped(path: Path, rows: list[dict]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_lines(path: Path) -> list[dict]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        return [json.loads(line) for line in file]


def read_pandas(path: Path) -> list[dict]:
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def texts_only(rows: list[dict]) -> list[dict]:
    """Rows without the columns of several types, which the writer of a table refuses."""
    return [{name: value for name, value in row.items() if name != "other"} for row in rows]


# The ending of the file, its writer, its reader.
FORMATS = {
    "csv": (".csv", write_csv, csv_module),
    "tsv": (".tsv", write_csv, csv_module),
    "pandas csv": (".csv", lambda path, rows: pd.DataFrame(rows).to_csv(path, index=False), read_pandas),
    "polars csv": (".csv", lambda path, rows: pl.DataFrame(texts_only(rows)).write_csv(path), read_pandas),
    "json lines": (".jsonl", write_lines, read_lines),
    "gzipped": (".jsonl.gz", write_gzipped, read_lines),
    "json": (
        ".json",
        lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
        lambda path: json.loads(path.read_text()),
    ),
    "pandas parquet": (
        ".parquet",
        lambda path, rows: pd.DataFrame(texts_only(rows)).to_parquet(path),
        lambda path: pq.ParquetFile(path).read().to_pylist(),
    ),
    "pyarrow parquet": (
        ".parquet",
        lambda path, rows: pq.write_table(pa.Table.from_pylist(texts_only(rows)), path),
        lambda path: pq.ParquetFile(path).read().to_pylist(),
    ),
    "polars parquet": (
        ".parquet",
        lambda path, rows: pl.DataFrame(texts_only(rows)).write_parquet(path),
        lambda path: pl.read_parquet(path).to_dicts(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@settings(
    derandomize=True,
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(data=st.data())
def test_rows_are_those_of_the_formats_reader(kind, data):
    ending, write, read = FORMATS[kind]
    names = data.draw(NAMES)
    row = st.fixed_dictionaries({names[0]: MAYBE_BLANK, names[1]: MAYBE_BLANK, "other": OTHERS})
    rows = data.draw(st.lists(row, min_size=1, max_size=6))
    shards = data.draw(st.integers(0, 3))
    parts = [rows]
    if shards:
        parts = [rows] + [data.draw(st.lists(row, min_size=1, max_size=3)) for _ in range(shards - 1)]
    texts = [value for part in parts for row in part for value in row.values() if isinstance(value, str)]
    if kind in ("pandas csv", "polars csv"):
        # Both write a lone carriage return without quotes, which reads as the end of a row.
        assume(not any("\r" in text for text in texts))
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, part in enumerate(parts):
            stem = f"train-{number:05d}-of-{shards:05d}" if shards else "train"
            paths.append(Path(folder) / (stem + ending))
            with contextlib.suppress(UnicodeEncodeError):
                write(paths[-1], part)
            if not paths[-1].exists():
                return
        test = Path(folder) / f"test{ending}"
        write(test, [{names[0]: "asks", names[1]: "answers", "other": None}])
        try:
            split = load_rows(folder)["train"]
        except UserError as error:
            assert "\n" not in str(error)
            blank = any(not (row[name] or "").strip() for part in parts for row in part for name in names)
            listed = any(is_list_text(text) for text in texts)  # a CSV file holds no lists
            assert blank or listed or not all(text.isprintable() for text in texts), error
            return
        found = [row for path in paths for row in read(path)]
    pairs = split.judgments.pairs()
    assert [split.queries["docstring"][query] for query, _ in pairs] == [row[names[0]] for row in found]
    assert [split.corpus["code"][code] for _, code in pairs] == [row[names[1]] for row in found]
    if "other" in split.queries.column_names and ending.startswith(".json"):
        for value, row in zip(split.queries["other"], found, strict=True):
            # `datasets` decodes JSON without the last digit of a number, and adds missing keys to a dict.
            same = value == pytest.approx(row["other"]) if isinstance(value, float) else value == row["other"]
            assert same or isinstance(value, dict)
