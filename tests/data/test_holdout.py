"""Rows in one file are divided into train, valid and test, and held-out rows are kept out of train."""

import json
import unicodedata

import pandas as pd
import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer import load_rows
from soft_trainer.data.holdout import warn_of_overlap
from soft_trainer.data.load import read_source
from soft_trainer.data.make_splits import Context
from soft_trainer.data.split import Split

FORK = 10  # rows in a repository; its fork has the same rows


def function(number: int, **columns) -> dict:
    return {"docstring": f"adds {number}", "code": f"x + {number}"} | columns


def forked() -> list[dict]:
    """200 rows from 20 repositories. Every second repository is a copy of the one before."""
    rows = []
    for number in range(20 * FORK):
        repository, copy = divmod(number, FORK)
        rows.append(function(repository // 2 * FORK + copy, repo=f"someone/r{repository}", url=f"u{number}"))
    return rows


def versions() -> list[dict]:
    """Two versions of 60 functions, with different texts but the same url."""
    return [function(number, url=f"u{number % 60}", language="python") for number in range(120)]


def asked_twice() -> list[dict]:
    """60 queries with two functions each."""
    return [function(number // 2, code=f"x * {number}") for number in range(120)]


def values(split, column: str) -> set:
    """Returns the values of a query or code column in the pairs of a split."""
    return set(split.to_pairs()[column])


@pytest.mark.parametrize("rows", [forked(), versions(), asked_twice()], ids=["a fork", "versions", "queries"])
def test_nothing_that_is_held_out_is_trained_on(rows, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = load_rows(path)
    assert min(map(len, splits.values())) > 0
    for column in ("docstring", "code", "url"):
        trained = values(splits["train"], column)
        assert trained.isdisjoint(values(splits["valid"], column) | values(splits["test"], column))
    dropped = len(rows) - sum(map(len, splits.values()))
    assert (f"| dropped: equal to a row of valid or test | {dropped:>6} |" in capsys.readouterr().err) == (dropped > 0)
    assert (dropped > 0) == ("repo" in rows[0])


def test_one_large_repository_beside_two_small_ones_is_trained_on():
    for other in "abcdefgh":
        rows = [function(number, repo=other if number == 0 else f"r{number // 59}") for number in range(60)]
        assert {name: len(split) for name, split in load_rows(rows).items()} == {"train": 58, "valid": 1, "test": 1}


def test_copies_that_would_leave_nothing_to_train_on_are_refused():
    rows = [function(number % 20, repo=f"someone/r{number // 20}") for number in range(60)]
    with refused("rows: divided by repo, every training row equals a row of valid or test"):
        load_rows(rows)


@pytest.mark.parametrize(
    ("partitions", "expected"),
    [
        (["train"] * 40 + ["valid"] * 10 + ["test"] * 10, {"train": 40, "valid": 10, "test": 10}),
        (["train"] * 40 + ["test"] * 20, {"train": 40, "test": 20}),
        (["train"] * 30 + ["validation"] * 20 + ["other"] * 10, {"train": 30, "valid": 20}),
        (["train"] * 60, {"train": 48, "valid": 6, "test": 6}),  # a single split does not count
    ],
)
def test_a_column_partition_decides_where_it_names_two_splits(partitions, expected, tmp_path):
    rows = [function(number, partition=partition) for number, partition in enumerate(partitions)]
    for name in ("rows.csv", "train.csv"):
        pd.DataFrame(rows).to_csv(tmp_path / name, index=False)
        assert {key: len(split) for key, split in load_rows(tmp_path / name).items()} == expected
    only_train = read_source(tmp_path / "train.csv", Context(needed=("train",)))
    assert {key: len(split) for key, split in only_train.items()} == (
        expected if len({*partitions}) > 1 else {"train": 60}
    )


@pytest.mark.parametrize("group_column", ["team", "url", "question"])
@pytest.mark.parametrize("form", ["positives", "negatives"])
def test_a_group_stays_within_one_split(form, group_column):
    rows = []
    for number in range(40):
        row = {"question": f"q{number}", "team": f"t{number % 7}", "url": f"page{number % 9}"}
        pair = row | {"answer": f"x + {number}"}
        rows += {
            "positives": [row | {"positive": [f"x + {number}", f"y + {number}"]}],
            "negatives": [pair | {"negative": "z"}],
        }[form]
    groups = {}
    for name, split in load_rows(rows, group_column=group_column).items():
        for query in split.queries["docstring"]:
            row = next(row for row in rows if row["question"] == query)
            groups.setdefault(row[group_column], set()).add(name)
    assert {*map(len, groups.values())} == {1} and len(groups) == len({row[group_column] for row in rows})
    rows[3] |= {group_column: None, "question": "q3" if group_column != "question" else None}
    with refused("row 4: the group, column"):
        load_rows(rows, group_column=group_column)
    with refused("the rows: group_column=colour: no such column"):
        load_rows(rows, group_column="colour")


def test_a_row_that_equals_a_held_out_one_is_dropped_from_the_train_partition(capsys):
    names = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
    rows = [function(number, partition=partition) for number, partition in enumerate(names)]
    rows[0] |= {"docstring": " adds  59\n"}
    rows[1] |= {"code": rows[45]["code"]}
    assert {name: len(split) for name, split in load_rows(rows).items()} == {"train": 38, "valid": 10, "test": 10}
    assert "| dropped: equal to a row of valid or test |      2 |" in capsys.readouterr().err


def test_rows_in_a_file_without_a_split_are_divided_whatever_else_is_measured(tmp_path):
    rows = "".join(json.dumps(function(number)) + "\n" for number in range(40))
    for name in ("pairs.jsonl", "train.jsonl"):
        (tmp_path / name).write_text(rows)
    whole = load_rows(tmp_path / "pairs.jsonl")
    for needed in (("train",), ()):  # training or evaluation with other queries
        splits = read_source(tmp_path / "pairs.jsonl", Context(needed=needed))
        assert values(splits["test"], "docstring") == values(whole["test"], "docstring")
    assert [*read_source(tmp_path / "train.jsonl", Context(needed=("train",)))] == ["train"]


def test_evaluation_rows_that_are_trained_on_are_counted(capsys):
    train = load_rows({"train": [function(number) for number in range(9)], "test": [function(99)]})["train"]
    for first, said in ((5, "warning: web: 4 of 10 pairs share a query, function or id with a training row"), (9, "")):
        rows = [function(number) for number in range(first, first + 10)]
        test = read_source({"test": rows}, Context(needed=("test",)))["test"]
        warn_of_overlap({"web": test}, train)
        assert capsys.readouterr().err.strip() == said


def test_equal_texts_in_different_unicode_forms_are_equal(capsys):
    text = "öffnet die Datei"
    train, test = (
        Split.from_pairs(Dataset.from_list([{"docstring": unicodedata.normalize(form, text), "code": form}]))
        for form in ("NFC", "NFD")
    )
    warn_of_overlap({"test": test}, train)
    assert "warning: test: 1 of 1 pairs share a query, function or id" in capsys.readouterr().err
