"""Rows from a folder, from the Hub and selected by lists of urls. Messages list every bad row."""

import json

import pytest
from datasets import Dataset, DatasetDict, Features
from refusals import refused

from soft_trainer.data.folders import SPLITS
from soft_trainer.data.layouts import codesearchnet, published
from soft_trainer.data.layouts.codesearchnet import FEATURES, load_folder, select_by_urls
from soft_trainer.data.load import load_rows, make_splits
from soft_trainer.data.row_checks import check_split
from soft_trainer.data.tokens import encoder_texts
from soft_trainer.encoders.profiles import EncoderProfile

COLUMNS = "repo path func_name original_string language code code_tokens docstring docstring_tokens url partition"


def split_of(rows: list[dict], **changes) -> Dataset:
    """Makes a `Dataset` from rows, with the columns of the first row."""
    features = {name: FEATURES[name] for name in (rows[0] if rows else FEATURES)}
    columns = {name: [(row | changes)[name] for row in rows] for name in features}
    return Dataset.from_dict(columns, features=Features(features))


def checked(tables, profile) -> None:
    """Makes splits from tables, and checks them like a run."""
    for name, split in make_splits(tables, check=False).items():
        check_split(split, name, profile)


@pytest.fixture
def data(rows) -> DatasetDict:
    """Tables that `checked` accepts. Tests introduce an error into one of them."""
    parts = {"train": rows[:8], "valid": rows[8:10], "test": rows[10:12], "codebase": rows[8:12]}
    return DatasetDict({split: split_of(part) for split, part in parts.items()})


# ---- A folder ----


@pytest.mark.parametrize("compressed", [False, True])
def test_a_folder_gives_its_rows_in_order_with_codesearchnets_columns(write_folder, rows, compressed):
    data = load_folder(write_folder(compressed))
    assert {split: len(part) for split, part in data.items()} == {"train": 8, "valid": 2, "test": 2, "codebase": 4}
    assert set(data["train"].column_names) == set(COLUMNS.split())
    assert data["test"].to_list() == rows[10:12]


def test_other_columns_are_kept_and_blank_lines_skipped(write_folder, rows):
    row = rows[0] | {"code_tokens": "def f ( )", "docstring_tokens": "sort a list", "stars": 7, "none": None}
    train = load_rows(write_folder(train=[row]))["train"]
    assert train.queries["stars"][:] == [7] and "none" not in train.queries.column_names
    assert [*encoder_texts(train.corpus, "code", EncoderProfile())] == ["def f ( )"]
    codes = ["a = '\u2028\x0c\x85'", "b = 'é😀'"]  # some programs break lines at these characters; JSON Lines does not
    lines = [json.dumps(row | {"code": code}, ensure_ascii=False) for code in codes]
    assert load_folder(write_folder(train="\n\n".join(lines) + "\n\n"))["train"]["code"][:] == codes
    lines = [json.dumps(row | {"code": code}) for code in ("whole \U0001f600", r"\ud83d", "cut \ud83d")]
    assert load_folder(write_folder(train="\n".join(lines[:2])))["train"]["code"][:] == ["whole \U0001f600", r"\ud83d"]
    with refused("train.jsonl, row 3: column 'code' contains '\\ud83d', half of a character"):
        load_folder(write_folder(train="\n".join(lines)))


def test_negatives_are_one_text_or_several(write_folder, rows):
    values = ["def f(): pass", [rows[3]["url"], "def g(x): return x"], None, []]
    train = [row | {"negatives": value} for row, value in zip(rows[:4], values, strict=True)]
    split = load_rows(write_folder(train=train))["train"]
    queries, codes = split.judgments.negatives.nonzero()
    assert [*zip(queries.tolist(), codes.tolist(), strict=True)] == [(0, 4), (1, 3), (1, 5)]
    assert split.corpus["code"][4:] == ["def f(): pass", "def g(x): return x"]
    train[1]["negatives"] = ["u", 5]
    with refused("train.jsonl, row 2: a column of negatives contains ['u', 5]; expected a function"):
        load_rows(write_folder(train=train))


def test_rows_are_memory_mapped_from_a_cache(write_folder, tmp_path):
    folder = write_folder()
    first, second = load_folder(folder), load_folder(folder)["train"]
    [file] = first["train"].cache_files
    assert [file] == second.cache_files and file["filename"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"code": "x"', ["JSON"]),
        ('["code"]', ["JSON object", "list"]),
        ('{"code_tokens": {"a": 1}}', []),
        ('{"code_tokens": ["def", null]}', []),
        ('{"code_tokens": ["def", 7]}', []),
        ('{"code_tokens": "def"}', []),
    ],
)
def test_a_broken_row_is_named_by_file_and_row(write_folder, rows, line, words):
    folder = write_folder(valid=f"{json.dumps(rows[0])}\n\n{line}\n")
    row = 3 if words else 2  # a line that is no object is named as the file has it
    words = words or ["column 'code_tokens' contains", "expected text"]
    with refused(f"{folder / 'valid.jsonl'}, row {row}: ", *words):
        load_rows(folder)


# ---- The Hub ----


THEIRS = {
    "repo": "repository_name", "path": "func_path_in_repository", "original_string": "whole_func_string",
    "code": "func_code_string", "code_tokens": "func_code_tokens", "docstring": "func_documentation_string",
    "docstring_tokens": "func_documentation_tokens", "partition": "split_name", "url": "func_code_url",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch, rows):
    """Replaces the Hub by three splits with the Hub's column names. `asked` records the requests."""

    def in_hub_columns(row, split):
        return {THEIRS.get(name, name): value for name, value in (row | {"partition": split}).items()}

    parts = {"train": rows[:8], "validation": rows[8:10], "test": [*rows[10:12], rows[9]]}
    lists = {split: [in_hub_columns(row, split) for row in part] for split, part in parts.items()}
    loaded, asked = DatasetDict({split: Dataset.from_list(part) for split, part in lists.items()}), []
    monkeypatch.setattr(published, "load_dataset", lambda *names, **given: asked.append((*names, given)) or loaded)
    monkeypatch.setattr(codesearchnet, "_pushed_folder", lambda *_: None)
    return {"asked": asked, "splits": loaded}


def test_the_hub_gives_the_same_columns_as_a_folder(hub, rows):
    splits = load_rows("code-search-net/code_search_net", language="ruby", revision="v1")
    assert hub["asked"] == [("code-search-net/code_search_net", "ruby", {"revision": "v1"})]
    corpus = splits["test"].corpus
    data = {name: split.to_pairs() for name, split in splits.items()}
    assert set(data["train"].column_names) == set(COLUMNS.split())
    assert data["train"][3] == rows[3] | {"partition": "train"}
    assert data["valid"]["docstring_tokens"][:] == [row["docstring_tokens"] for row in rows[8:10]]
    # The corpus consists of the codes of valid and test, without repeated urls.
    assert sorted(corpus["url"]) == sorted(row["url"] for row in rows[8:12])


# ---- Lists of urls ----


def write_lists(folder, **urls):
    folder.mkdir()
    for split, lines in urls.items():
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_lists_of_urls_choose_the_rows_of_every_split(data, rows, tmp_path, capsys):
    url = [row["url"] for row in rows]
    lost, gone = "https://example.org/lost", "https://example.org/gone"
    queries = {"train": [url[5], url[2], lost], "valid": [url[11]], "test": [url[8], url[9]]}
    lists = write_lists(tmp_path / "lists", **queries, codebase=[url[11], url[9], url[8], url[8], gone, lost])
    chosen = select_by_urls(make_splits(data), lists)
    assert chosen["train"].queries["docstring"][:] == [rows[5]["docstring"], rows[2]["docstring"]]
    assert chosen["valid"].queries["url"][:] == [url[11]]
    assert chosen["test"].queries["url"][:] == [url[8], url[9]]
    assert chosen["test"].corpus["url"][:] == [url[11], url[9], url[8]]
    said = capsys.readouterr().err.splitlines()
    assert any("train.txt" in line and "1 of 3" in line for line in said)
    assert any("codebase.txt" in line and "2 of 5" in line for line in said)
    assert not any("test.txt" in line for line in said)
    for name, split in chosen.items():
        check_split(split, name, EncoderProfile())


def test_a_url_may_hold_a_space_and_a_missing_list_of_urls_is_named(data, rows, tmp_path):
    url = "https://example.org/my folder/a file.py#L1"
    data["valid"] = split_of(rows[8:9], url=url)
    lists = {split: data[split]["url"][:] for split in ("train", "test")}
    folder = write_lists(tmp_path / "lists", valid=[url], codebase=[url], **lists)
    splits = make_splits(data, check=False)
    assert select_by_urls(splits, folder)["valid"].queries["url"][:] == [url]
    (folder / "codebase.txt").unlink()
    with refused(folder / "codebase.txt", "split_urls"):
        select_by_urls(splits, folder)


# ---- Unusable rows ----


def test_good_rows_pass_and_the_codebase_needs_no_query_and_training_no_url(data, rows, write_folder):
    checked(data, EncoderProfile())
    data["codebase"] = split_of(rows[8:12], docstring="", docstring_tokens=[])
    data["train"] = split_of(rows[:8], url=None)
    checked(data, EncoderProfile())
    plain = [{name: row[name] for name in ("docstring", "code", "url")} for row in rows]  # text replaces tokens
    parts = {"train": plain[:8], "valid": plain[8:10], "test": plain[10:12], "codebase": plain[8:12]}
    checked(load_folder(write_folder(**parts)), EncoderProfile())


def second(**changes):
    """Returns a function that changes the second row."""
    return lambda rows: [rows[0], rows[1] | changes, *rows[2:]]


def every(*removed, **changes):
    """Returns a function that removes and changes columns of every row."""
    return lambda rows: [{name: row[name] for name in row if name not in removed} | changes for row in rows]


GRAPHS = {"data_flow_length": 8}
NO_LANGUAGE = "no column 'language', which an encoder with data flow needs"


@pytest.mark.parametrize(
    "split, spoil, options, message",
    [
        *((split, lambda rows: [], {}, f"{split}: no rows") for split in SPLITS),
        ("train", second(docstring_tokens=[]), {}, "train, row 2: column 'docstring_tokens' is missing or empty"),
        ("train", second(code_tokens=None), {}, "train, row 2: column 'code_tokens' is missing or empty"),
        (
            "train",
            every(docstring=" \n"),
            {"query_columns": ("docstring",)},
            "train, rows 1, 2, 3, 4, 5 and 3 more: column 'docstring' is missing or empty",
        ),
        ("train", every("code", "code_tokens"), {}, "no column for the code: the rows have"),
        ("train", every("language"), GRAPHS, f"train: {NO_LANGUAGE}"),
        ("train", second(language=None), GRAPHS, "train, row 2: column 'language' is missing or empty"),
        ("test", second(url=""), {}, "test, row 2: the id, column 'url', is missing or empty"),
        ("test", every("url"), {}, "test, rows 1, 2: no function in the corpus has the url, such as 'code:"),
        (
            "test",
            second(url="elsewhere"),
            {},
            "test, row 2: no function in the corpus has the url, such as 'elsewhere'",
        ),
        ("codebase", second(code_tokens=[]), {}, "codebase, row 2: column 'code_tokens' is missing or empty"),
        ("codebase", second(url=None), {}, "codebase, row 2: the id, column 'url', is missing or empty"),
        ("codebase", lambda rows: [*rows, rows[1]], {}, "codebase, row 5 repeats the url of row 2: https://"),
    ],
)
def test_what_would_not_work_is_named_by_split_column_and_row(data, split, spoil, options, message):
    rows = spoil(data.pop(split).to_list())
    data = dict(data) if rows is None else {name: split_of(rows) if name == split else data[name] for name in SPLITS}
    with refused(message):
        checked(data, EncoderProfile(**options))
