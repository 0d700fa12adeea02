"""Reading the row files in a folder: each row is read exactly once."""

import gzip
import json

import pytest
from refusals import refused

from soft_trainer.data.layouts.tables import row_files
from soft_trainer.data.load import load_rows, read_source

LINES = "".join(json.dumps({"query": f"q{n}", "code": f"c{n}"}) + "\n" for n in range(10))


def write(folder, *names):
    for name in names:
        content = LINES.encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def test_a_plain_file_takes_precedence_over_its_gzipped_copy(tmp_path):
    write(tmp_path, "train.jsonl", "train.jsonl.gz", "test.jsonl.gz")
    assert {split: path.name for split, [path] in row_files(tmp_path).items()} == {
        "test": "test.jsonl.gz",
        "train": "train.jsonl",
    }
    assert len(read_source(tmp_path, needed=("train",))["train"]) == 10


@pytest.mark.parametrize(
    "names", [("train.csv", "train.parquet"), ("dev.csv", "valid.csv"), ("rows.csv", "rows.jsonl")]
)
def test_two_files_of_the_same_rows_are_refused(tmp_path, names):
    write(tmp_path, *names)
    with refused(f"{names[0]} and {names[1]} both contain rows of"):
        row_files(tmp_path)


def test_shards_and_files_of_different_names_are_read_together(tmp_path):
    write(tmp_path, "train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
    assert len(row_files(tmp_path)["train"]) == 2
    other = tmp_path / "other"
    other.mkdir()
    assert len(row_files(write(other, "a.csv", "b.csv"))["train"]) == 2


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_an_empty_file_has_no_rows(tmp_path, name):
    (tmp_path / name).write_text("")
    with refused(name, "it has no rows"):
        load_rows(tmp_path / name)
