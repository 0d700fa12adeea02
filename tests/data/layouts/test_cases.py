"""Ten cases in every layout of rows: the splits that are loaded, or the error message."""

import csv
import gzip
import io
import json

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from refusals import refused

from soft_trainer import load_rows
from soft_trainer.data.languages import languages_in
from soft_trainer.data.layouts import codesearchnet as hub_layout
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets
from soft_trainer.shell.rows import load_data

HEAD = "query-id\tcorpus-id\tscore\n"
ALL = {"train": 20, "valid": 5, "test": 5}


def pair(n: int, **changes) -> dict:
    return {"query": f"adds {n}", "code": f"x + {n}", "id": f"{n}"} | changes


def good_rows() -> dict[str, list[dict]]:
    numbers = {"train": range(20), "valid": range(20, 25), "test": range(25, 30)}
    return {split: [pair(n) for n in own] for split, own in numbers.items()}


def named(rows: list[dict], **names: str) -> list[dict]:
    """Renames columns of rows. Columns without a new name stay, except for the id."""
    columns = {"query": "question", "code": "answer", "id": None} | names
    kept = []
    for row in rows:
        kept.append({columns.get(name, name): value for name, value in row.items() if columns.get(name, name)})
    return kept


# ---- Writers: each returns the content of every file, as text or bytes ----


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def json_lines(splits: dict) -> dict:
    return {f"{split}.jsonl": lines(named(rows)) for split, rows in splits.items()}


def csv_files(splits: dict) -> dict:
    files = {}
    for split, rows in splits.items():
        text = io.StringIO()
        table = named(rows)
        if table:
            writer = csv.DictWriter(text, table[0])
            writer.writeheader()
            writer.writerows(table)
        files[f"{split}.csv"] = text.getvalue()
    return files


def parquet(splits: dict) -> dict:
    return {f"{split}.parquet": pd.DataFrame(named(rows)).to_parquet(None) for split, rows in splits.items()}


def codesearchnet(splits: dict) -> dict:
    names = {"query": "docstring", "code": "code", "id": "url"}
    return {f"{split}.jsonl": lines(named(rows, **names)) for split, rows in splits.items()}


def beir(splits: dict) -> dict:
    whole = [row for rows in splits.values() for row in rows]
    corpus = named([{name: row[name] for name in row if name != "query"} for row in whole], code="text", id="_id")
    files = {
        "corpus.jsonl": lines(corpus),
        "queries.jsonl": lines([{"_id": row["id"], "text": row["query"]} for row in whole]),
    }
    for split, rows in splits.items():
        name = split.replace("valid", "dev")
        files[f"qrels/{name}.tsv"] = HEAD + "".join(f"{row['id']}\t{row['id']}\t1\n" for row in rows)
    return files


def annotations(splits: dict) -> dict:
    rows = splits["test"]
    judged = [{"query": row["query"], "url": row["id"], "relevance": 1} for row in rows]
    names = {"query": None, "code": "code", "id": "url"}
    return {"relevance.jsonl": lines(judged), "codebase.jsonl": lines(named(rows, **names))}


FILES = {
    "json lines": json_lines,
    "csv": csv_files,
    "parquet": parquet,
    "codesearchnet": codesearchnet,
    "beir": beir,
    "annotations": annotations,
}
LAYOUTS = (*FILES, "saved", "frame", "hub")


# ---- Cases ----


def without_code(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "code"} for row in rows]


CHANGES = {  # to the rows of test
    "empty file": lambda rows: [],
    "missing column": without_code,
    "blank text": lambda rows: [*rows[:-1], rows[-1] | {"code": " "}],
    "duplicate id": lambda rows: [*rows, rows[-1]],
    "wrong type": lambda rows: [row | {"code": int(row["id"])} for row in rows],
}
TWICE = ALL | {"test": 6}
NO_CORPUS = "these queries have no corpus to rank"
FEW = "column 'answer' is missing or empty (1 of 5 rows)"
NUMBERS = ", row 1: column 'answer' contains "
EXPECTED = {
    "json lines": (
        "test.jsonl: cannot be read: it has no rows",
        NO_CORPUS,
        f"test.jsonl, row 5: {FEW}",
        TWICE,
        NUMBERS,
    ),
    "csv": (
        "test.csv: cannot be read: it has no rows",
        NO_CORPUS,
        f"test.csv, row 5: {FEW}",
        TWICE,
        ALL,  # all values are strings in this layout
    ),
    "parquet": (
        "test.parquet: cannot be read: it has no rows",
        NO_CORPUS,
        f"test.parquet, row 5: {FEW}",
        TWICE,
        NUMBERS,
    ),
    "saved": ("saved: cannot be read: it has no rows", NO_CORPUS, f"saved, test, row 5: {FEW}", TWICE, NUMBERS),
    "hub": ("someone/rows, test: no rows", NO_CORPUS, f"rows, test, row 5: {FEW}", TWICE, NUMBERS),
    "codesearchnet": (
        "test.jsonl: cannot be read: it has no rows",
        NO_CORPUS,
        "test.jsonl, row 5: column 'code' is missing or empty (1 of 5 rows)",
        TWICE,
        "test.jsonl, row 1: column 'code' contains 25; expected text",
    ),
    "beir": (
        "test.tsv: no query has a relevant function",
        "corpus.jsonl, row 26: expected BEIR's columns _id and text",
        "corpus.jsonl, row 30: the text is blank",
        "corpus.jsonl, row 31: repeats the _id '29'",
        "corpus.jsonl, row 26: expected BEIR's columns _id and text, both strings",
    ),
    "annotations": (
        "codebase.jsonl: cannot be read: it has no rows",
        "relevance: no column for the code: the rows have url",
        "codebase, row 5: column 'code' is missing or empty",
        {"test": 5},
        "codebase, row 1: column 'code' contains 25; expected text",
    ),
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Returns a function that writes rows in a layout and loads them."""

    def write_files(files: dict, packed: bool, plain: bool) -> None:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            content = content if isinstance(content, bytes) else content.encode()
            if plain:
                path.write_bytes(content)
            if packed:  # beside a plain file, it is not read
                path.with_name(f"{path.name}.gz").write_bytes(b"damaged" if plain else gzip.compress(content))

    def run(layout: str, splits: dict, packed: bool = False, plain: bool = True) -> dict:
        if layout in FILES:
            write_files(FILES[layout](splits), packed, plain)
        if layout == "frame":
            return load_rows(pd.DataFrame(named([row for rows in splits.values() for row in rows])))
        columns = named(splits["train"])[0]
        data = {}
        for split, rows in splits.items():
            data[split] = Dataset.from_list(named(rows)) if rows else Dataset.from_dict({name: [] for name in columns})
        if layout == "saved":
            DatasetDict(data).save_to_disk(tmp_path / "saved")
            return load_rows(tmp_path / "saved")
        if layout == "hub":
            monkeypatch.setattr(hub_layout, "load_published", lambda *_: DatasetDict(data))
            monkeypatch.setattr(hub_layout, "_pushed_folder", lambda *_: None)
            return load_rows("someone/rows")
        return load_rows(tmp_path)

    return run


def sizes(splits: dict) -> dict:
    """Checks that each query's relevant code is correct, and returns the number of queries in each split."""
    for split in splits.values():
        for query, code in split.judgments.pairs():
            number = split.queries["docstring"][query].split()[-1]
            assert split.corpus["code"][code].split()[-1].lstrip("y") == number
    return {name: len(split) for name, split in splits.items()}


def expected_sizes(layout: str, sizes: dict) -> dict:
    return {"test": sizes["test"]} if layout == "annotations" else sizes


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "frame"])
def test_good_rows_are_read(read, layout):
    assert sizes(read(layout, good_rows())) == expected_sizes(layout, ALL)


def test_the_rows_of_a_data_frame_are_split(read):
    found = sizes(read("frame", good_rows()))
    assert found.keys() == ALL.keys() and sum(found.values()) == 30


@pytest.mark.parametrize("layout", [name for name in FILES if name != "parquet"])  # parquet has its own compression
@pytest.mark.parametrize("plain", [False, True], ids=["gz", "both"])
def test_files_are_read_once_plain_or_gzipped(read, layout, plain):
    assert sizes(read(layout, good_rows(), packed=True, plain=plain)) == expected_sizes(layout, ALL)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("frame", "annotations")])
def test_a_split_may_be_missing(read, layout):
    splits = good_rows()
    del splits["valid"]
    assert sizes(read(layout, splits)) == {"train": 20, "test": 5}


@pytest.mark.parametrize("layout", FILES)
def test_a_folder_is_the_same_in_python_in_the_shell_and_as_an_evaluation_set(read, tmp_path, layout):
    splits = read(layout, good_rows())
    of_shell = load_data(DataArguments(data_dir=str(tmp_path)), EncoderProfile(), needed=("test",))
    assert of_shell["test"].fingerprint() == splits["test"].fingerprint()
    sets = load_evaluation_sets(DataArguments(data_dir=str(tmp_path), eval_data_dir=str(tmp_path)), EncoderProfile())
    expected = {tmp_path.name: "test"}
    if layout == "beir":  # both of its sets are judged
        expected = {f"{tmp_path.name}-dev": "valid", f"{tmp_path.name}-test": "test"}
    assert {name: splits[split].fingerprint() for name, split in expected.items()} == {
        name: split.fingerprint() for name, split in sets.items()
    }


def test_rows_and_judged_queries_of_one_folder_are_all_read(tmp_path):
    files = annotations(good_rows()) | codesearchnet(good_rows())
    files["codebase.jsonl"] = files["test.jsonl"]
    for name in ("train.jsonl", "test.jsonl", "codebase.jsonl", "relevance.jsonl"):
        (tmp_path / name).write_text(files[name])
    splits = load_rows(tmp_path)
    sets = load_evaluation_sets(DataArguments(data_dir=str(tmp_path), eval_data_dir=str(tmp_path)), EncoderProfile())
    of_shell = load_data(DataArguments(data_dir=str(tmp_path)), EncoderProfile(), needed=("train", "test"))
    assert [*splits] == [*of_shell] == ["train", "test"]
    assert sets[f"{tmp_path.name}-test"].fingerprint() == splits["test"].fingerprint()
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).unlink()
    judged = load_rows(tmp_path)["test"]
    assert sets[f"{tmp_path.name}-relevance"].fingerprint() == judged.fingerprint() and judged.judgments.graded


@pytest.mark.parametrize("layout", EXPECTED)
@pytest.mark.parametrize("case", CHANGES)
def test_a_case_is_read_or_refused_in_one_line(read, layout, case):
    splits = good_rows()
    splits["test"] = CHANGES[case](splits["test"])
    expected = EXPECTED[layout][[*CHANGES].index(case)]
    if isinstance(expected, dict):
        assert sizes(read(layout, splits)) == expected
        return
    with refused(expected):
        read(layout, splits)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("empty file", "the data frame: no rows"),
        ("missing column", "no column for the code: the rows have question; set code_column"),
        ("blank text", "the data frame, row 30: column 'answer' is missing or empty (1 of 30 rows)"),
        ("wrong type", NUMBERS),
    ],
)
def test_a_case_of_a_data_frame_is_refused_in_one_line(read, case, words):
    change = CHANGES[case]
    splits = good_rows()
    whole = [row for rows in splits.values() for row in rows]
    with refused(words):
        read("frame", {"train": change(whole)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_several_languages_say_theirs(read, layout):
    splits = good_rows()
    spoken = {"go": 3, "java": 2}
    for rows in splits.values():
        for n, row in enumerate(rows):
            row["language"] = [*spoken][n % 5 >= spoken["go"]]
    found = read(layout, splits)
    assert {*languages_in({"test": found["test"].corpus})} == {"go", "java"}
