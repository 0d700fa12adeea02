"""A stream of rows is written to the cache once, and then is like the list of its rows."""

import datetime

import pytest
from datasets import ClassLabel, Features, IterableDataset, IterableDatasetDict, List, Value
from refusals import refused

from soft_trainer import load_rows
from soft_trainer.data.load import as_rows, training_split

NUMBERS = range(10_003)  # more than one batch
PAIRS = [{"query": f"adds {n}", "code": f"x + {n}"} for n in NUMBERS]


def stream(rows, features=None) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows), features=features)


@pytest.mark.parametrize(
    "rows",
    [
        [row | {"stars": 1.5, "day": datetime.date(2024, 1, 2), "tags": ["a", "b"]} for row in PAIRS],
        [{"query": row["query"], "positives": [row["code"], "y"], "negatives": ["z"]} for row in PAIRS],
        [{"docstring_tokens": [row["query"]], "code_tokens": [row["code"]], "url": row["code"]} for row in PAIRS],
    ],
)
def test_a_stream_is_like_the_list_of_its_rows(rows, capsys):
    split = training_split(stream(rows))
    assert split.fingerprint() == training_split(rows).fingerprint()
    assert "train_dataset: 10,003 rows of the stream are in the cache" in capsys.readouterr().err
    assert as_rows(stream(rows), "rows").cache_files == as_rows(stream(rows), "other").cache_files


def test_declared_features_decide_the_types():
    kinds = {
        "query": Value("large_string"),
        "code": Value("string"),
        "stars": Value("float32"),
        "note": Value("string"),
    }
    features = Features(kinds | {"language": ClassLabel(names=["go", "ruby"]), "tags": List(Value("string"))})
    rows = [row | {"stars": n, "note": None, "language": n % 2, "tags": []} for n, row in enumerate(PAIRS)]
    rows[-1] |= {"note": "late", "tags": ["late"]}
    found = as_rows(stream(rows, features), "rows")
    assert found.features["stars"] == Value("float32") and found[10_002]["note"] == "late"
    assert found[1]["language"] == "ruby" and found.features["query"] == Value("string")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "rows: it has no rows"),
        ([*PAIRS, {"query": "q", "code": "c", "late": 1}], "columns or types that its first 10,000 rows do not have"),
        ([*PAIRS, {"query": 1, "code": "c"}], "columns or types that its first 10,000 rows do not have"),
        ([*PAIRS, {"query": "\ud83d", "code": "c"}], "rows, row 10004: column 'query' contains '\\ud83d', half of"),
    ],
)
def test_a_stream_that_changes_is_refused(rows, words):
    with refused(words):
        as_rows(stream(rows), "rows")


def test_streams_are_splits_or_a_codebase():
    parts = IterableDatasetDict(train=stream(PAIRS[:90]), validation=stream(PAIRS[90:100]))
    assert {name: len(split) for name, split in load_rows(parts).items()} == {"train": 90, "valid": 10}
    codes = [{"code": row["code"]} for row in PAIRS[:10]]
    assert len(load_rows({"test": PAIRS[:5]}, codebase=stream(codes))["test"].corpus) == 10
