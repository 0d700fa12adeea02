"""Reading the row files in a folder: each row is read exactly once."""

import gzip
import json

import pytest
from refusals import refused

from soft_trainer.data.folders import list_files
from soft_trainer.data.layouts.tables import row_files
from soft_trainer.data.load import load_rows

LINES = "".join(json.dumps({"query": f"q{n}", "code": f"c{n}"}) + "\n" for n in range(10))


def write(folder, *names):
    for name in names:
        content = LINES.encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


@pytest.mark.parametrize(
    "names", [("train.csv", "train.parquet"), ("dev.csv", "valid.csv"), ("rows.csv", "rows.jsonl")]
)
def test_two_files_of_the_same_rows_are_refused(tmp_path, names):
    write(tmp_path, *names)
    with refused(f"{names[0]} and {names[1]} both contain rows of"):
        row_files(list_files(tmp_path))


def test_shards_and_files_of_different_names_are_read_together(tmp_path):
    write(tmp_path, "train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
    assert len(row_files(list_files(tmp_path))["train"]) == 2
    other = tmp_path / "other"
    other.mkdir()
    assert len(row_files(list_files(write(other, "a.csv", "b.csv")))["train"]) == 2


# ---- CSV files ----

HEADER = "query,code\n"
ROW = 'sorts "names" in place,"sorted(names, key=str)"\n'
TEN = "".join(f'adds {n},"f(x, {n})"\n' for n in range(10))
CSV_FILES = {
    "a third field": (
        'prints,"print(x)",a.py\n',
        "line 13: 3 instead of 2 fields (query, code); put a field",
    ),
    "a comma without quotes": ("prints,print(x, y)\n", "line 13: 3 instead of 2 fields"),
    "row names of R": ('"12","prints","print(x)"\n', "write the file with row.names=FALSE"),
    "a missing field": (
        "prints\n",
        "line 13: 1 instead of 2 fields (query, code); each row needs",
    ),
    "quotes escaped with a backslash": ('greets,"print(\\"hi\\")"\n', "line 13: ',' expected after '\"'; put a field"),
    "a quote that is never closed": ('greets,"print(\nx\n', "line 13: unexpected end of data"),
    "other backslashes": ('splits,"text.split(\'\\n\', 1)"\nmatches,\\d+\\"\n', None),
    "doubled quotes": ('greets,"print(""hi"")"\n', None),
    "a long field": ('adds,"' + "x += 1\n" * 30_000 + '"\n', None),
    "blank lines": ("\n\nprints,print(x)\n", None),
}


@pytest.mark.parametrize(("rows", "message"), CSV_FILES.values(), ids=CSV_FILES)
@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_every_row_of_a_csv_file_has_the_fields_of_the_header(tmp_path, rows, message, ending):
    path = tmp_path / f"rows{ending}"
    content = (HEADER + TEN + ROW + rows).encode()
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    if message is not None:
        with refused(f"{path}, ", message):
            load_rows(path)
        return
    splits = load_rows(path)
    codes = {code for split in splits.values() for code in split.corpus["code"]}
    assert {"sorted(names, key=str)", "f(x, 3)"} <= codes and not {"a.py", None} & codes


@pytest.mark.parametrize(
    ("name", "row", "where"),
    [
        ("rows.jsonl", '{"query": "x", "code": "y", "code": "z"}\n', ", row 11: "),
        ("rows.jsonl.gz", '{"query": "x", "code": "y", "code": "y"}\n', ", row 11: "),
        ("train.ndjson", '{"query": "x", "code": "y", "more": {"code": 1, "code": 2}}\n', ", row 11: "),
        ("rows.json", '[{"query": "x", "code": "y", "code": "z"}]', ": "),
    ],
)
def test_a_row_of_json_with_two_values_of_one_name_is_refused(tmp_path, name, row, where):
    content = (row if name == "rows.json" else LINES + row).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with refused(f"{tmp_path / name}{where}not valid JSON (two values are called 'code'"):
        load_rows(tmp_path)


# ---- Encodings ----


@pytest.mark.parametrize("name", ["rows.csv.gz", "rows.jsonl.gz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:40],
        lambda packed: packed[:20] + b"x" * 9 + packed[29:],
        lambda packed: b"plain text\n",
        lambda packed: gzip.compress(b"\n\n"),
    ],
)
def test_an_archive_that_is_damaged_or_has_no_rows_is_named(tmp_path, name, damage):
    rows = HEADER + TEN if "csv" in name else LINES
    (tmp_path / name).write_bytes(damage(gzip.compress(rows.encode())))
    with refused(f"{tmp_path / name}: cannot be read"):
        load_rows(tmp_path / name)


ACCENTS = {
    "rows.csv": (HEADER + TEN + "écrit,print(x)\n", "line 12"),
    "rows.jsonl": (LINES + '{"query": "écrit", "code": "print(x)"}\n', "row 11"),
    "train.jsonl": ('{"docstring": "écrit", "code": "print(x)"}\n', "row 1"),
    "rows.json": ('[\n{"query": "écrit", "code": "print(x)"}]\n', "line 2"),
}


@pytest.mark.parametrize("name", ACCENTS)
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_named_with_the_row(tmp_path, name, encoding):
    text, where = ACCENTS[name]
    if encoding == "utf-16":
        where = f"{where.split()[0]} 1"  # it begins with a byte order mark
    (tmp_path / name).write_text(text, encoding=encoding)
    with refused(f"{tmp_path / name}, {where}: cannot be read in UTF-8", "save it as UTF-8"):
        load_rows(tmp_path)
