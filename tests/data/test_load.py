"""Loading rows as users have them: any format, column names, splits and urls, and unusable rows."""

import gzip
import json

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Value
from refusals import refused
from tables import tables_of

from soft_trainer.data.load import load_rows
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.evaluation_sets import load_evaluation_sets
from soft_trainer.shell.rows import load_data

SIZE = 40


def tables(splits):
    """Returns the pairs of each split, and the corpus."""
    found = {name: split.to_pairs() for name, split in splits.items()}
    return found | {"codebase": splits.get("test", splits["train"]).corpus}


@pytest.fixture
def pairs():
    numbers = range(SIZE)
    answers = [f"def f(x): return x + {n}" for n in numbers]
    return Dataset.from_dict({"question": [f"adds {n} to x" for n in numbers], "answer": answers})


def write(rows: Dataset, path):
    """Writes rows in the format of the path's extension, or as a saved data set without an extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    {
        ".jsonl": rows.to_json,
        ".gz": lambda path: rows.to_json(path, compression="gzip"),
        ".csv": rows.to_csv,
        ".parquet": rows.to_parquet,
        "": rows.save_to_disk,
    }[path.suffix](str(path))
    return path


def load(source, **arguments):
    options = DataArguments(data_dir=str(source), language="python", **arguments)
    return tables_of(load_data(options, EncoderProfile()))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.parquet", "saved", "folder/a.csv"])
def test_every_format_is_read_split_and_ranked(pairs, tmp_path, name, capsys):
    path = write(pairs, tmp_path / name)
    data = load(path.parent if "/" in name else path)
    assert {split: len(rows) for split, rows in data.items()} == {"train": 32, "valid": 4, "test": 4, "codebase": 8}
    queries = [text for split in ("train", "valid", "test") for text in data[split]["docstring"]]
    assert sorted(queries) == sorted(pairs["question"])
    said = capsys.readouterr().err
    assert "reading queries from column 'question' and functions from 'answer'" in said and "split at random" in said


def test_a_path_may_hold_signs_of_a_pattern(pairs, tmp_path):
    path = write(pairs, tmp_path / "rows [v2] *" / "a.csv")
    for source in (path, path.parent):
        assert len(load(source)["train"]) == 32


def test_rows_without_a_text_are_named_or_skipped(pairs, tmp_path, capsys):
    rows = pairs.to_list()
    rows[3]["question"], rows[5]["answer"], rows[7]["answer"] = None, "  ", ""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = f"{path}, row 4: column 'question' is missing or empty (1 of 40 rows); fill in or drop these rows"
    for read in (load, load_rows):
        with refused(said):
            read(path)
    data = load(path, drop_unusable=True)
    assert sum(len(data[split]) for split in ("train", "valid", "test")) == SIZE - 3
    assert "dropped as unusable" in capsys.readouterr().err


def test_an_error_names_file_line_and_column_as_they_stand_in_the_file(pairs, tmp_path):
    rows = pairs.to_list()
    rows[2]["question"] = "two\n\nlines"
    rows[30]["answer"] = rows[35]["answer"] = " "
    broken = pd.DataFrame(rows)
    broken.to_csv(tmp_path / "a.csv", index=False)
    with refused(f"{tmp_path}/a.csv, rows 31, 36: column 'answer' is missing or empty (2 of 40 rows)"):
        load_rows(tmp_path / "a.csv")
    plain = tmp_path / "plain"
    plain.mkdir()
    broken.to_csv(plain / "b.csv", index=False)
    (plain / "a.csv").write_text("question,answer\n\nx,y\nv,w\n")
    with refused(f"{plain}, rows 33, 38: column 'answer' is missing or empty (2 of 42 rows)"):  # of both files
        load_rows(plain)
    (plain / "a.csv").write_text("question,answer\n")
    with refused(f"{plain}/a.csv: cannot be read: it has no rows"):
        load_rows(plain)


def test_an_evaluation_set_is_all_rows(pairs, tmp_path):
    path = write(pairs, tmp_path / "people.csv")
    (one,) = load_evaluation_sets(DataArguments(eval_data_dir=str(path)), EncoderProfile()).values()
    assert one.judgments.relevant.shape == (SIZE, SIZE)
    folder = write(pairs.select(range(10)), tmp_path / "own" / "train.csv").parent
    write(pairs.select_columns(["answer"]).rename_column("answer", "code"), folder / "codebase.csv")
    (one,) = load_evaluation_sets(DataArguments(eval_data_dir=str(folder)), EncoderProfile()).values()
    assert one.judgments.relevant.shape == (10, SIZE)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("a.csv", "q,c\nx,y\n", {}, "a.csv: no column for the query: the rows have q, c"),
        ("a.csv", "q,c\nx,y\n", {"query_column": "no"}, "query_column=no: no such column; the rows have q, c"),
        ("a.csv", "query,code\nx,y\n", {"query_column": "qurey"}, "the rows have query, code; did you mean 'query'?"),
        ("a.jsonl", '{"query": "x"\n', {}, "a.jsonl, row 1: not valid JSON ("),
        ("a.csv", "query;code\nx;f(a, b)\n", {}, "columns must be separated by commas, not by ';'"),
        ("a.csv", "query,code\nx,y\nz,a\n", {}, "a.csv: 2 rows (2 distinct) are too few to split"),
        ("folder/readme.md", "text", {}, "folder: no rows; expected JSON Lines, CSV, TSV or Parquet"),
        (None, None, {}, "no such folder or file, and not a name on the Hub"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, arguments, message):
    path = tmp_path / (name or "nothing")
    if name:
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    with refused(message):
        load(path.parent if name and "/" in name else path, **arguments)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train.jsonl", "tset.jsonl"), "tset.jsonl: not the name of a split; did you mean test.jsonl?"),
        (("trian.jsonl.gz", "test.jsonl"), "trian.jsonl.gz: not the name of a split; did you mean train.jsonl.gz?"),
        (("train.jsonl", "test.jsonl", "tests.jsonl", "notes.jsonl"), None),
        (("rest.jsonl", "best.jsonl"), None),  # no file is named after a split
    ],
)
def test_a_misspelt_split_is_refused_if_that_split_is_missing(tmp_path, names, message):
    for number, name in enumerate(names):
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt") as file:
            for row in range(30):
                file.write(json.dumps({"query": f"q{number} {row}", "code": f"c{number} {row}"}) + "\n")
    if message is None:
        load_rows(tmp_path)
    else:
        with refused(message):
            load_rows(tmp_path)


def test_the_keys_of_a_dict_are_splits():
    rows = [{"query": f"q{row}", "code": f"c{row}"} for row in range(30)]
    with refused("'trian' is not the name of a split; did you mean 'train'?"):
        load_rows({"trian": rows, "test": rows})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train", "training"), "'train' and 'training' stand for the same split: keep one of them"),
        (("valid", "dev", "train"), "'valid' and 'dev' stand for the same split"),
        (("train", "tset"), "'tset' is not the name of a split; did you mean 'test'?"),
        (("train", "Test"), None),
        (("train", "extra"), None),
    ],
)
def test_the_names_of_a_saved_data_set(tmp_path, names, message):
    saved = DatasetDict()
    for number, name in enumerate(names):
        rows = [{"query": f"q{number} {row}", "code": f"c{number} {row}"} for row in range(30)]
        saved[name] = Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved")
    if message is None:
        assert ("valid" in load_rows(tmp_path / "saved")) == (names[1] == "extra")
        return
    with refused(message):
        load_rows(tmp_path / "saved")


def test_an_empty_cell_of_a_csv_file_may_come_from_a_quote(tmp_path):
    path = tmp_path / "rows.csv"
    rows = [(f"adds {n}", f"x + {n}") for n in range(9)]
    pd.DataFrame([*rows, ("", "x + 1")], columns=["query", "code"]).to_csv(path, index=False)
    with refused("row 10: column 'query' is missing or empty", "unusually long row, look for an unbalanced quote"):
        load_rows(path)


def in_classes(pairs) -> Dataset:
    """Returns the pairs with the columns `language` and `label` as numbers with names."""
    languages = ["python", "ruby"] * (SIZE // 2)
    rows = pairs.add_column("language", languages, feature=Value("string")).add_column("label", [1] * SIZE)
    return rows.cast_column("language", ClassLabel(names=["ruby", "python"])).cast_column("label", ClassLabel(2))


@pytest.mark.parametrize("kind", ["a data set", "saved", "rows.parquet"])
def test_classes_are_read_as_names(pairs, tmp_path, kind):
    rows = source = in_classes(pairs)
    if kind == "saved":
        source = tmp_path / "saved"
        rows.save_to_disk(source)
    elif kind != "a data set":
        source = tmp_path / kind
        rows.to_parquet(source)
    assert {*load_rows(source)["train"].corpus["language"]} == {"python", "ruby"}
    splits = load_rows(source, language="python")
    assert {language for split in splits.values() for language in split.corpus["language"]} == {"python"}
    assert sum(map(len, splits.values())) == SIZE // 2
    with refused("train has no rows in go, only in python, ruby; set language"):
        load_rows(source, language="go")


HALF = "\ud83d"  # the first half of a character outside the Basic Multilingual Plane


@pytest.mark.parametrize("kind", ["list", "dict", "rows.jsonl"])
@pytest.mark.parametrize("column", ["code", "code_tokens"])
def test_half_a_character_is_named_with_its_row_and_column(tmp_path, kind, column):
    value = HALF if column == "code" else ["x", HALF]
    rows = [{"query": f"adds {n}", "code": f"x + {n}", "code_tokens": ["x"]} for n in range(9)]
    rows[3][column] = value
    source = {"list": rows, "dict": {"train": rows}}.get(kind, tmp_path / kind)
    if kind == "rows.jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with refused(f"row 4: column '{column}' contains '\\ud83d'"):
        load_rows(source)
