"""Rows as people have them: what is read, what is refused and what is said, in Python and in the shell.

To add a case, add an entry to CASES: the files of a folder, the options, and what is expected.
"""

import bz2
import decimal
import json
import lzma
import uuid
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, List, Value
from refusals import refused

from soft_trainer.data.load import as_rows, load_rows, training_split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.rows import load_data


@dataclass(frozen=True)
class Case:
    """The files of a folder and what loading the folder gives.

    Args:
        files: the content of each file, keyed by name.
        options: the options of `load_rows`, which the shell has too.
        train: the (query, code) pairs of train, if the folder can be loaded.
        error: words in the error message, if it cannot.
        said: words that are printed.
    """

    files: dict[str, str | bytes]
    options: dict = field(default_factory=dict)
    train: list[tuple[str, str]] | None = None
    error: str = ""
    said: str = ""


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def both(*rows: dict) -> dict[str, str]:
    """Returns training rows and a test row with the same columns."""
    other = {name: f"other {name}" if isinstance(value, str) else value for name, value in rows[0].items()}
    return {"train.jsonl": lines(*rows), "test.jsonl": lines(other)}


def zstd(text: str) -> bytes:
    return pa.compress(text.encode(), codec="zstd", asbytes=True)


def shard(number: int) -> str:
    return lines(*({"query": f"q{number}{n}", "code": f"c{number}{n}"} for n in range(2)))


SHARDS = [(f"q{number}{n}", f"c{number}{n}") for number in range(3) for n in range(2)]
TEST = {"test.jsonl": lines({"query": "asks", "code": "answers"})}
NEEDED = ("train", "test", "codebase")
LATE = [{"query": f"q{n}", "code": f"c{n}"} for n in range(10_003)]
LATE[-2] |= {"meta": 5, "late": "a"}
LATE[-1] |= {"meta": "five"}

CASES = {
    "query and code beside a docstring": Case(
        both({"docstring": "d", "query": "q", "code": "c"}),
        train=[("q", "c")],
        said="reading queries from column 'query' and functions from 'code'",
    ),
    "two pairs": Case(
        both({"query": "q", "code": "c", "positive": "p"}),
        error="two pairs of columns, 'query' with 'code' and 'query' with 'positive'; set query_column and",
    ),
    "two pairs, one chosen": Case(
        both({"query": "q", "code": "c", "positive": "p"}),
        {"query_column": "query", "code_column": "positive"},
        train=[("q", "p")],
    ),
    "question and code": Case(
        both({"question": "q", "code": "c"}),
        train=[("q", "c")],
    ),
    "query and context": Case(
        both({"query": "q", "context": "c"}),
        train=[("q", "c")],
    ),
    "passages that are dicts": Case(
        both({"query": "q", "positive_passages": [{"text": "c"}]}),
        error="no column for the code: the rows have query, positive_passages; set code_column",
    ),
    "equal columns": Case(
        both({"query": "q", "code": "c"}),
        {"query_column": "code", "code_column": "code"},
        error="query_column and code_column are both 'code'; set two different columns",
    ),
    "compressed shards": Case(
        {
            "train-00000-of-00003.jsonl.xz": lzma.compress(shard(0).encode()),
            "train-00001-of-00003.jsonl.bz2": bz2.compress(shard(1).encode()),
            "train-00002-of-00003.jsonl.zst": zstd(shard(2)),
            **TEST,
        },
        train=SHARDS,
    ),
    "a missing shard": Case(
        {"train-00000-of-00003.jsonl": shard(0), "train-00002-of-00003.jsonl": shard(2)},
        error="train-00000-of-00003.jsonl is one of 3 shards of train, but shard 00001 is missing",
    ),
    "a shard in an unread format": Case(
        {"train-00000-of-00002.jsonl": shard(0), "train-00001-of-00002.jsonl.lz4": b""},
        error="is one of 2 shards of train, but shard 00001 is missing or in a format that is not read",
    ),
    "a file in an unread format": Case(
        {"train.jsonl": shard(0), "valid.xlsx": b"", "more.csv": "query,code\na,b\n", **TEST},
        train=SHARDS[:2],
        said="not reading more.csv, valid.xlsx; rows are in JSON Lines, CSV, TSV or Parquet files",
    ),
    "tabs": Case(
        {"train.tsv": "query\tcode\na, b\tx\n", "test.tsv": "query\tcode\nasks\tanswers\n"},
        train=[("a, b", "x")],
    ),
    "words that pandas would drop": Case(
        {"train.csv": "query,code,id\nNA,null,001\n1e5,nan,002\n", "test.csv": "query,code,id\na,b,003\n"},
        {"id_column": "id"},
        train=[("NA", "null"), ("1e5", "nan")],
    ),
    "a list in a CSV file": Case(
        {"train.csv": "query,positive\nq,\"['c', 'd']\"\n"},
        error="line 2: column 'positive' contains a list, which a CSV file cannot hold",
    ),
    "a list of negatives in a CSV file": Case(
        {"train.csv": 'query,positive,hard_negatives\nq,c,"[""d""]"\n'},
        error="line 2: column 'hard_negatives' contains a list, which a CSV file cannot hold",
    ),
    "a list in the set column of negatives": Case(
        {"train.csv": "query,code,bad\nq,c,\"['d']\"\n"},
        {"negatives_column": "bad"},
        error="row 1: a column of negatives contains the text of a list",
    ),
    "a column that appears late and has two types": Case(
        {"train.jsonl": lines(*LATE), **TEST}, train=[(row["query"], row["code"]) for row in LATE]
    ),
    "dates and numbers as text": Case(
        both({"query": "2020-01-01", "code": "1", "n": 2**70, "e": {}, "l": [1, "a"]}),
        train=[("2020-01-01", "1")],
    ),
    "a number as a query": Case(
        {"train.jsonl": lines({"query": "q", "code": "c"}, {"query": 5, "code": "d"})},
        error="row 2: column 'query' contains 5; expected text",
    ),
    "no query in any row": Case(
        {"train.csv": "query,code\n,c\n,d\n", "test.csv": "query,code\na,b\n"},
        error="rows 1, 2: column 'query' is missing or empty (2 of 2 rows)",
    ),
    "a prompt": Case(
        both({"query": "q", "pos": ["c"], "prompt": "find"}),
        train=[("q", "c")],
        said="not using 'prompt'; the recognised columns are",
    ),
    "an empty text in a list": Case(
        both({"query": "q", "pos": ["c", " "]}),
        train=[("q", "c")],
        said="skipped 1 empty texts in lists of column 'pos'",
    ),
    "groups of rows that are split already": Case(
        {"train.jsonl": shard(0), **TEST},
        {"group_column": "query"},
        train=SHARDS[:2],
        said="not using group_column=query, because the rows are split already",
    ),
    "an unknown group": Case(
        {"rows.jsonl": shard(0)}, {"group_column": "grup"}, error="group_column=grup: no such column; the rows"
    ),
    "an unknown column of negatives": Case(
        {"train.jsonl": shard(0)}, {"negatives_column": "bad"}, error="negatives_column=bad: no such column"
    ),
}  # fmt: skip


IN_THE_SHELL = ("words that pandas would drop", "a number as a query")  # which reads rows as `load_rows` does


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "Python") for name in CASES), *((name, "shell") for name in IN_THE_SHELL)]
)
def test_what_is_read_and_said(tmp_path, capsys, name, way):
    case = CASES[name]
    for file, content in case.files.items():
        path = tmp_path / file
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    def load() -> dict:
        if way == "Python":
            return load_rows(tmp_path, **case.options)
        return load_data(DataArguments(data_dir=str(tmp_path), **case.options), EncoderProfile(), NEEDED)

    if case.error:
        with refused(case.error):
            load()
        return
    pairs = load()["train"].to_pairs()
    assert list(zip(pairs["docstring"], pairs["code"], strict=True)) == case.train
    assert case.said in capsys.readouterr().err


# ---- Objects in Python ----


def frame() -> pd.DataFrame:
    """A data frame with columns of types that only pandas and Python have."""
    return pd.DataFrame(
        {
            "query": pd.Categorical(["q0", "q1"]),
            "code": ["c0", "c1"],
            "key": [uuid.UUID(int=n) for n in range(2)],
            "month": pd.period_range("2024-01", periods=2, freq="M"),
            "price": [decimal.Decimal("1.50"), None],
            "raw": [b"\xff", None],
            "mixed": [5, "five"],
            "tags": [{"a"}, {"b"}],
            "thing": [object(), object()],
        }
    )


OBJECTS = {
    "pandas": frame,
    "polars": lambda: pl.DataFrame({"query": ["q0", "q1"], "code": ["c0", "c1"], "n": [1, None]}),
    "arrow": lambda: pa.table(
        {
            "query": pa.array(["q0", "q1"], pa.string_view()),
            "code": pa.array(["c0", "c1"]).dictionary_encode(),
            "other": pa.array([["a"], None], pa.large_list(pa.large_string())),
            "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
            "span": pa.array([(1, 2, 3), None], pa.month_day_nano_interval()),
            "key": pa.array([uuid.UUID(int=n).bytes for n in range(2)], pa.uuid()),
        }
    ),
    "a list": lambda: frame().to_dict("records"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_of_python(kind, capsys):
    split = load_rows({"train": OBJECTS[kind](), "test": [{"query": "a", "code": "b"}]})["train"]
    assert (split.queries["docstring"][:], split.corpus["code"][:]) == (["q0", "q1"], ["c0", "c1"])
    if kind == "arrow":
        assert split.queries["key"][:] == [str(uuid.UUID(int=n)) for n in range(2)]
        assert split.queries["map"][:] == [[["a", 1]], None]
        assert split.queries.features["other"] == List(Value("string"))
    if kind in ("pandas", "a list"):
        assert split.queries["key"][:] == [str(uuid.UUID(int=n)) for n in range(2)]
        assert split.queries["month"][:] == ["2024-01", "2024-02"] and split.queries["mixed"][:] == [5, "five"]
        assert "dropped column 'thing', which cannot be stored" in capsys.readouterr().err


@pytest.mark.parametrize(("column", "value"), [("mixed", "5"), ("raw", "b'\\xff'"), ("price", "Decimal('1.50')")])
def test_a_column_that_is_not_text_is_refused_only_if_it_is_read(column, value):
    with refused(f"row 1: column {column!r} contains {value}; expected text"):
        load_rows({"train": frame()}, query_column=column, code_column="code")


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_of_any_arrow_type_in_a_parquet_file(tmp_path, kind):
    table = pa.table({"query": pa.array(["q0", "q1"]).cast(kind), "code": pa.array(["c0", "c1"]).cast(kind)})
    for name in ("train.parquet", "test.parquet"):
        pq.write_table(table, tmp_path / name)
    assert load_rows(tmp_path)["train"].queries["docstring"][:] == ["q0", "q1"]
    blank = pa.table({"query": pa.array(["q", " "]).cast(kind), "code": pa.array(["c", "d"]).cast(kind)})
    pq.write_table(blank, tmp_path / "train.parquet")
    with refused("train.parquet, row 2: column 'query' is missing or empty"):
        load_rows(tmp_path)


def test_a_transform_is_applied_once(capsys):
    calls = []

    def instruct(batch: dict) -> dict:
        calls.append(len(batch["query"]))
        return {"query": [f"find: {text}" for text in batch["query"]], "code": batch["code"]}

    rows = Dataset.from_dict({"query": ["q0", "q1"], "code": ["c0", "c1"]}).with_transform(instruct)
    split = training_split(rows)
    assert split.queries["docstring"][:] == ["find: q0", "find: q1"]
    assert calls == [2]
    assert "train_dataset: applying the transform of the data set once, to all rows" in capsys.readouterr().err
    assert as_rows(rows.with_format("numpy"), "rows")["query"][:] == ["q0", "q1"]


def test_shards_with_columns_of_different_types(tmp_path, capsys):
    parts = {"n": [[1], ["one"]], "raw": [[b"\xff"], [1]]}
    for number in range(2):
        columns = {name: values[number] for name, values in parts.items()}
        table = pa.table({"query": [f"q{number}"], "code": [f"c{number}"], **columns})
        pq.write_table(table, tmp_path / f"train-{number:05d}-of-00002.parquet")
    pq.write_table(pa.table({"query": ["a"], "code": ["b"]}), tmp_path / "test.parquet")
    split = load_rows(tmp_path)["train"]
    assert split.queries["docstring"][:] == ["q0", "q1"] and split.queries["n"][:] == [1, "one"]
    assert "dropped column 'raw', which cannot be stored" in capsys.readouterr().err


# ---- Division ----


def test_a_group_stays_within_one_split_and_a_seed_gives_another_division():
    rows = [{"query": f"q{n}", "code": f"c{n}", "customer": n % 12} for n in range(120)]
    options = {"group_column": "customer", "test_fraction": 0.25}
    divisions = [load_rows(rows, **options, seed=seed) for seed in (0, 0, 1)]
    groups = [[set(splits[name].queries["customer"]) for name in ("train", "valid", "test")] for splits in divisions]
    assert [len(each) for each in groups[0]] == [6, 3, 3] and len(set.union(*groups[0])) == 12
    assert groups[0] == groups[1] != groups[2]
    for fraction in (0, 0.5):
        with refused(f"test_fraction={fraction}: expected a number above 0 and below 0.5"):
            load_rows(rows, test_fraction=fraction)
    with refused("group_column=one: 1 groups are too few for train, valid and test"):
        load_rows([row | {"one": 1} for row in rows], group_column="one")


def test_the_shell_divides_as_python_does(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(*({"query": f"q{n}", "code": f"c{n}", "team": f"t{n % 9}"} for n in range(90))))
    options = {"group_column": "team", "test_fraction": 0.2}
    shell = load_data(DataArguments(data_dir=str(path), split_seed=3, **options), EncoderProfile())
    python = load_rows(path, seed=3, **options)
    assert {name: split.queries["docstring"][:] for name, split in shell.items()} == {
        name: split.queries["docstring"][:] for name, split in python.items()
    }
    assert np.sum([len(split) for split in shell.values()]) == 90
