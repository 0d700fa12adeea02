"""The same ten cases in every layout: the splits that are read, or the line that is printed."""

import gzip
import json

import pytest
from refusals import refused

from soft_trainer import load_rows
from soft_trainer.data.layouts.codesearchnet import languages_in

NUMBERS = range(30)
SPLITS = {"train": range(20), "valid": range(20, 25), "test": range(25, 30)}
HEAD = "query-id\tcorpus-id\tscore\n"


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(n: int) -> dict:
    return {"question": f"adds {n}", "answer": f"x + {n}"}


def published(n: int) -> dict:
    return {"docstring": f"adds {n}", "code": f"x + {n}", "url": f"u{n}"}


def qrels(rows) -> str:
    return HEAD + "".join(f"q{n}\tc{n}\t1\n" for n in rows)


def entry(n: int) -> dict:
    return {"doc": f"adds {n}", "retrieval_idx": n}


GOOD = {
    "tables": {f"{split}.jsonl": lines(map(table, rows)) for split, rows in SPLITS.items()},
    "codesearchnet": {f"{split}.jsonl": lines(map(published, rows)) for split, rows in SPLITS.items()},
    "beir": {
        "corpus.jsonl": lines({"_id": f"c{n}", "text": f"x + {n}"} for n in NUMBERS),
        "queries.jsonl": lines({"_id": f"q{n}", "text": f"adds {n}"} for n in NUMBERS),
        "qrels/train.tsv": qrels(SPLITS["train"]),
        "qrels/dev.tsv": qrels(SPLITS["valid"]),
        "qrels/test.tsv": qrels(SPLITS["test"]),
    },
    "cosqa": {
        "code_idx_map.txt": json.dumps({f"x + {n}": n for n in NUMBERS}),
        "cosqa-retrieval-train-20.json": json.dumps([entry(n) for n in SPLITS["train"]]),
        "cosqa-retrieval-dev-5.json": json.dumps([entry(n) for n in SPLITS["valid"]]),
        "cosqa-retrieval-test-5.json": json.dumps([entry(n) for n in SPLITS["test"]]),
    },
}
ALL = {"train": 20, "valid": 5, "test": 5}
WITHOUT_VALID = {"train": 20, "test": 5}
# The file that a case changes, and the one with valid.
FILE = {"tables": "test.jsonl", "codesearchnet": "test.jsonl", "beir": "corpus.jsonl", "cosqa": "code_idx_map.txt"}
VALID = {
    "tables": "valid.jsonl",
    "codesearchnet": "valid.jsonl",
    "beir": "qrels/dev.tsv",
    "cosqa": "cosqa-retrieval-dev-5.json",
}
# (layout, case): what the file holds instead, and the sizes of the splits or the words of the error.
CASES = {
    ("tables", "empty file"): ("", "test.jsonl: cannot be read: it has no rows"),
    ("tables", "missing column"): (lines([{"question": "x"}]), "no corpus to rank these queries against"),
    ("tables", "blank text"): (lines([table(1), table(2) | {"answer": " "}]), "test.jsonl, line 2: column 'answer'"),
    ("tables", "duplicate id"): (lines([table(25)] * 2), ALL | {"test": 2}),
    ("tables", "wrong type"): (lines([table(1) | {"answer": 3}]), "column 'answer' holds int64, text is expected"),
    ("codesearchnet", "empty file"): ("", "test.jsonl: no rows"),
    ("codesearchnet", "missing column"): (lines([{"docstring": "x"}]), "no corpus to rank these queries against"),
    ("codesearchnet", "blank text"): (lines([published(1) | {"docstring": " "}]), "test.jsonl, line 1: column"),
    ("codesearchnet", "duplicate id"): (lines([published(25)] * 2), ALL | {"test": 2}),
    ("codesearchnet", "wrong type"): (lines([published(1) | {"code": 3}]), "test.jsonl, row 1: code is int"),
    ("beir", "empty file"): ("", "corpus.jsonl: no rows"),
    ("beir", "missing column"): (lines([{"_id": "c0"}]), "corpus.jsonl, row 1: BEIR's columns _id and text"),
    ("beir", "blank text"): (lines({"_id": f"c{n}", "text": ""} for n in NUMBERS), ALL),  # refused with the profile
    ("beir", "duplicate id"): (lines([{"_id": "c0", "text": "x"}] * 2), "corpus.jsonl, row 2: repeats the _id 'c0'"),
    ("beir", "wrong type"): (lines([{"_id": "c0", "text": 3}]), "corpus.jsonl, row 1: BEIR's columns _id and text"),
    ("cosqa", "empty file"): ("{}", "code_idx_map.txt: no rows"),
    ("cosqa", "missing column"): (json.dumps({"x": 0}), "is not in code_idx_map"),
    ("cosqa", "blank text"): (json.dumps({" " * n: n for n in NUMBERS}), ALL),  # refused with the profile
    ("cosqa", "duplicate id"): (json.dumps({"x": 0, "y": 0}), "two codes have the same number"),
    ("cosqa", "wrong type"): ("[]", "code_idx_map.txt"),
}


@pytest.fixture
def write(tmp_path):
    """Writes a layout's good files, with changes; returns the folder."""

    def make(layout: str, changes: dict | None = None, packed: bool = False, plain: bool = True):
        for name, content in (GOOD[layout] | (changes or {})).items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            if content is not None and plain:
                path.write_text(content)
            if content is not None and packed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content.encode()))
        return tmp_path

    return make


def sizes(splits: dict) -> dict:
    for split in splits.values():
        for query, code in split.judgments.pairs():
            number = split.queries["docstring"][query].split()[-1]
            assert split.corpus["code"][code].split()[-1:] in ([number], [])  # a blank code has none
    return {name: len(split) for name, split in splits.items()}


@pytest.mark.parametrize("layout", GOOD)
@pytest.mark.parametrize("kinds", [{}, {"packed": True, "plain": False}, {"packed": True}], ids=["good", "gz", "both"])
def test_files_are_read_once_plain_or_gzipped(write, layout, kinds):
    assert sizes(load_rows(write(layout, **kinds))) == ALL


@pytest.mark.parametrize("layout", GOOD)
def test_a_split_may_be_missing(write, layout):
    assert sizes(load_rows(write(layout, {VALID[layout]: None}))) == WITHOUT_VALID


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_a_case_is_read_or_refused_in_one_line(write, layout, case):
    content, expected = CASES[layout, case]
    folder = write(layout, {FILE[layout]: content})
    if isinstance(expected, dict):
        assert sizes(load_rows(folder)) == expected
        return
    with refused(expected):
        load_rows(folder)


@pytest.mark.parametrize("layout", ["tables", "codesearchnet", "beir"])
def test_rows_of_several_languages_say_theirs(write, layout):
    name = FILE[layout]
    rows = [json.loads(line) for line in GOOD[layout][name].splitlines()]
    spoken = lines(row | {"language": ("go", "go", "java")[n % 3]} for n, row in enumerate(rows))
    splits = load_rows(write(layout, {name: spoken}))
    assert languages_in({"test": splits["test"].corpus}) == ["go", "java"]
