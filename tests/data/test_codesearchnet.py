"""Rows from a folder, from the Hub and by lists of urls. The message names every bad row."""

import json

import datasets
import pytest
from datasets import Dataset, DatasetDict

from soft_trainer.data import codesearchnet
from soft_trainer.data.codesearchnet import (
    FEATURES,
    check_languages,
    check_rows,
    load_folder,
    load_hub,
    select_by_urls,
    target_rows,
)
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError

COLUMNS = "repo path func_name original_string language code code_tokens docstring docstring_tokens url partition"


def error_of(function, *arguments) -> str:
    """The message of the UserError that the call raises: one line."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def split_of(rows: list[dict], **changes) -> Dataset:
    return Dataset.from_list([row | changes for row in rows], features=FEATURES)


@pytest.fixture
def data(rows) -> DatasetDict:
    """Splits that `check_rows` accepts; a test spoils one of them."""
    parts = {"train": rows[:8], "valid": rows[8:10], "test": rows[10:12], "codebase": rows[8:12]}
    return DatasetDict({split: split_of(part) for split, part in parts.items()})


# ---- A folder ----


@pytest.mark.parametrize("compressed", [False, True])
def test_a_folder_gives_its_rows_in_order_with_codesearchnets_columns(write_folder, rows, compressed):
    data = load_folder(write_folder(compressed))
    assert {split: len(part) for split, part in data.items()} == {"train": 8, "valid": 2, "test": 2, "codebase": 4}
    assert set(data["train"].column_names) == set(COLUMNS.split())
    assert data["test"].to_list() == rows[10:12]


def test_other_columns_are_left_out_and_token_text_is_split(write_folder, rows):
    row = rows[0] | {"code_tokens": "def  f ( )", "docstring_tokens": "sort a list", "stars": 7}
    train = load_folder(write_folder(train=[row]))["train"]
    assert "stars" not in train.column_names
    assert train[0]["code_tokens"] == ["def", "f", "(", ")"]
    assert train[0]["docstring_tokens"] == ["sort", "a", "list"]


def test_negatives_are_one_text_or_several_and_the_column_is_there_only_with_values(write_folder, rows):
    values = ["def f(): pass", ["u", "def g(x): return x"], None, []]
    train = [row | {"negatives": value} for row, value in zip(rows[:4], values, strict=True)]
    data = load_folder(write_folder(train=train))
    assert data["train"]["negatives"][:] == [["def f(): pass"], values[1], None, []]
    assert "negatives" not in data["valid"].column_names
    train[1]["negatives"] = ["u", 5]
    assert "train.jsonl, row 2: negatives holds a value that is not text" in error_of(
        load_folder, write_folder(train=train)
    )


def test_blank_lines_and_odd_line_separators_inside_a_text_are_no_rows(write_folder, rows):
    codes = ["a = '\u2028\x0c\x85'", "b = 'é😀'"]
    lines = [json.dumps(row | {"code": code}, ensure_ascii=False) for row, code in zip(rows, codes, strict=False)]
    train = load_folder(write_folder(train="\n\n".join(lines) + "\n\n"))["train"]
    assert train["code"][:] == codes


def test_rows_are_memory_mapped_from_a_cache(write_folder):
    folder = write_folder()
    first, second = load_folder(folder)["train"], load_folder(folder)["train"]
    assert first.cache_files and first.cache_files == second.cache_files


def test_a_file_that_changed_is_read_again(write_folder, rows):
    assert load_folder(write_folder())["valid"][0]["url"] == rows[8]["url"]
    assert load_folder(write_folder(valid=rows[9:7:-1]))["valid"][0]["url"] == rows[9]["url"]


def test_missing_folder(tmp_path):
    message = error_of(load_folder, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert all(f"{split}.jsonl" in message for split in ("train", "valid", "test", "codebase"))


def test_other_columns(write_folder):
    message = error_of(load_folder, write_folder(train=[{"question": "sort a list", "answer": "sorted(x)"}]))
    assert "train.jsonl: row 1 has none of the columns repo, path, " in message and "rename" in message


def test_missing_file(write_folder):
    folder = write_folder()
    (folder / "valid.jsonl").unlink()
    message = error_of(load_folder, folder)
    assert str(folder) in message and "valid.jsonl" in message and "valid.jsonl.gz" in message
    (folder / "valid.csv").write_text("query,code\n")
    assert error_of(load_folder, folder).endswith("; rows are read from JSON lines, not from valid.csv")


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"code": "x"', ["JSON"]),
        ('["code"]', ["JSON object", "list"]),
        ('{"url": 7}', ["url", "int", "str"]),
        ('{"code_tokens": {"a": 1}}', ["code_tokens", "dict", "list"]),
    ],
)
def test_a_broken_row_is_named_by_file_and_row(write_folder, rows, line, words):
    folder = write_folder(valid=f"{json.dumps(rows[0])}\n\n{line}\n")
    message = error_of(load_folder, folder)
    assert f"{folder / 'valid.jsonl'}, row 3" in message
    assert all(word in message for word in words)


def test_a_token_that_is_no_text_is_named_by_file_and_row(write_folder, rows):
    folder = write_folder(train=[rows[0], rows[1] | {"code_tokens": ["def", None]}])
    assert f"{folder / 'train.jsonl'}, row 2: code_tokens" in error_of(load_folder, folder)


def test_a_file_that_is_no_text(write_folder):
    folder = write_folder()
    (folder / "test.jsonl").write_bytes(b'{"code": "\xff\xfe"}\n')
    assert str(folder / "test.jsonl") in error_of(load_folder, folder)


def test_a_gzip_file_that_ends_too_early(write_folder):
    folder = write_folder(compressed=True)
    whole = (folder / "train.jsonl.gz").read_bytes()
    (folder / "train.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert str(folder / "train.jsonl.gz") in error_of(load_folder, folder)


@pytest.mark.parametrize("damage", ["no gzip at all", "bytes flipped inside"])
def test_a_damaged_gzip_file(write_folder, damage):
    folder = write_folder(compressed=True)
    path = folder / "train.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(b"plain text\n" if damage == "no gzip at all" else whole[:40] + b"\xff" * 20 + whole[60:])
    assert str(path) in error_of(load_folder, folder)


@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_without_rows(write_folder, content, compressed):
    folder = write_folder(compressed, test=content)
    message = error_of(load_folder, folder)
    assert "test.jsonl" in message and "no rows" in message


# ---- The Hub ----


@pytest.fixture
def hub(monkeypatch, rows):
    """Stands for the Hub: three splits in its column names; `asked` is what was asked of it."""

    def in_hub_columns(row, split):
        return {
            "repository_name": row["repo"],
            "func_path_in_repository": row["path"],
            "func_name": row["func_name"],
            "whole_func_string": row["original_string"],
            "language": row["language"],
            "func_code_string": row["code"],
            "func_code_tokens": row["code_tokens"],
            "func_documentation_string": row["docstring"],
            "func_documentation_tokens": row["docstring_tokens"],
            "split_name": split,
            "func_code_url": row["url"],
        }

    parts = {"train": rows[:8], "validation": rows[8:10], "test": [*rows[10:12], rows[9]]}
    loaded = DatasetDict(
        {split: Dataset.from_list([in_hub_columns(row, split) for row in part]) for split, part in parts.items()}
    )
    asked = []
    monkeypatch.setattr(codesearchnet, "load_dataset", lambda *names, **_: asked.append(names) or loaded)
    return {"asked": asked, "splits": loaded}


def test_the_hub_gives_the_same_columns_as_a_folder(hub, rows):
    data = load_hub("code-search-net/code_search_net", "ruby")
    assert hub["asked"] == [("code-search-net/code_search_net", "ruby")]
    assert set(data["train"].column_names) == set(COLUMNS.split())
    assert data["train"][3] == rows[3] | {"partition": "train"}
    assert data["valid"]["docstring_tokens"][:] == [row["docstring_tokens"] for row in rows[8:10]]


def test_the_hubs_codebase_is_valid_and_test_without_repeated_urls(hub, rows):
    data = load_hub("code-search-net/code_search_net", "ruby")
    assert sorted(data["codebase"]["url"]) == sorted(row["url"] for row in rows[8:12])
    check_rows(data, EncoderProfile())


def test_a_hub_that_cannot_be_reached_names_the_ways_without_it(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nand more lines")

    monkeypatch.setattr(codesearchnet, "load_dataset", fail)
    message = error_of(load_hub, "code-search-net/code_search_net", "ruby")
    assert "code-search-net/code_search_net" in message and "--data_dir" in message and "--source_dir" in message


def test_a_hub_data_set_without_a_split_or_column_says_which(hub):
    del hub["splits"]["validation"]
    assert "validation" in error_of(load_hub, "someone/else", "ruby")


def test_a_hub_data_set_in_other_columns_says_which_is_missing(hub):
    for split in hub["splits"]:
        hub["splits"][split] = hub["splits"][split].remove_columns(["func_code_url"])
    assert "url" in error_of(load_hub, "someone/else", "ruby")


def test_an_unknown_language_lists_the_six():
    message = error_of(check_languages, ["ruby", "perl"])
    assert "perl" in message
    assert all(name in message for name in ("ruby", "python", "java", "javascript", "php", "go"))
    assert "'go'" in error_of(check_languages, ["go", "go"])


# ---- Lists of urls ----


def write_lists(folder, **urls):
    folder.mkdir()
    for split, lines in urls.items():
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_lists_of_urls_choose_the_rows_of_every_split(data, rows, tmp_path, capsys):
    url = [row["url"] for row in rows]
    lists = write_lists(
        tmp_path / "lists",
        train=[url[5], url[2], "https://example.org/lost"],
        valid=[url[11]],
        test=[url[8], url[9]],
        codebase=[url[11], url[9], url[8], url[8], "https://example.org/gone", "https://example.org/lost"],
    )
    chosen = select_by_urls(data, lists)
    assert chosen["train"]["docstring"][:] == [rows[5]["docstring"], rows[2]["docstring"]]
    assert chosen["valid"]["url"][:] == [url[11]]
    assert chosen["test"]["url"][:] == [url[8], url[9]]
    assert chosen["codebase"]["url"][:] == [url[11], url[9], url[8]]
    said = capsys.readouterr().err.splitlines()
    assert any("train.txt" in line and "1 of 3" in line for line in said)
    assert any("codebase.txt" in line and "2 of 5" in line for line in said)
    assert not any("test.txt" in line for line in said)
    check_rows(chosen, EncoderProfile())


def test_a_url_may_hold_a_space(data, rows, tmp_path):
    url = "https://example.org/my folder/a file.py#L1"
    data["valid"] = split_of(rows[8:9], url=url)
    lists = {split: data[split]["url"][:] for split in ("train", "test")}
    chosen = select_by_urls(data, write_lists(tmp_path / "lists", valid=[url], codebase=[url], **lists))
    assert chosen["valid"]["url"][:] == [url]


def test_a_missing_list_of_urls(data, tmp_path):
    lists = write_lists(tmp_path / "lists", train=["a"], valid=["b"], test=["c"])
    message = error_of(select_by_urls, data, lists)
    assert str(lists / "codebase.txt") in message and "--split_urls" in message


# ---- Rows that would not work ----


def test_good_rows_pass(data):
    check_rows(data, EncoderProfile())


def test_the_codebase_needs_no_query_and_training_no_url(data, rows):
    data["codebase"] = split_of(rows[8:12], docstring="", docstring_tokens=[])
    data["train"] = split_of(rows[:8], url=None)
    check_rows(data, EncoderProfile())


@pytest.mark.parametrize("split", ["train", "valid", "test", "codebase"])
def test_an_empty_split(data, split):
    data[split] = data[split].select([])
    message = error_of(check_rows, data, EncoderProfile())
    assert message.startswith(split) and "no rows" in message


@pytest.mark.parametrize(
    "split, column, value",
    [
        ("train", "docstring_tokens", []),
        ("train", "code_tokens", None),
        ("valid", "docstring_tokens", []),
        ("test", "url", ""),
        ("codebase", "code_tokens", []),
        ("codebase", "url", None),
    ],
)
def test_an_empty_value_names_split_column_and_row(data, rows, split, column, value):
    spoilt = data[split].to_list()
    spoilt[1][column] = value
    data[split] = Dataset.from_list(spoilt, features=FEATURES)
    message = error_of(check_rows, data, EncoderProfile())
    assert message.startswith(split) and column in message and message.endswith("row 2")


def test_a_text_of_white_space_is_empty(data, rows):
    data["train"] = split_of(rows[:8], docstring=" \n")
    message = error_of(check_rows, data, EncoderProfile(query_columns=("docstring",)))
    assert "train" in message and "docstring" in message


def test_many_bad_rows_are_counted_and_the_first_are_named(data, rows):
    data["train"] = split_of(rows[:8], docstring_tokens=[])
    message = error_of(check_rows, data, EncoderProfile())
    assert "rows 1, 2, 3, 4, 5 and 3 more" in message


def test_a_column_that_is_nowhere(data):
    data["train"] = data["train"].remove_columns(["code", "code_tokens"])
    message = error_of(check_rows, data, EncoderProfile())
    assert "code_tokens" in message and "--code_columns" in message


def test_texts_serve_where_a_folder_has_no_tokens(write_folder, rows):
    def plain(part):
        return [{name: row[name] for name in ("docstring", "code", "url")} for row in part]

    folder = write_folder(
        train=plain(rows[:8]), valid=plain(rows[8:10]), test=plain(rows[10:12]), codebase=plain(rows[8:12])
    )
    check_rows(load_folder(folder), EncoderProfile())


def test_a_repeated_url_in_the_codebase_names_both_rows(data, rows):
    data["codebase"] = split_of([*rows[8:12], rows[9]])
    message = error_of(check_rows, data, EncoderProfile())
    assert "codebase" in message and "row 5" in message and "row 2" in message and rows[9]["url"] in message


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_query_whose_url_is_not_in_the_codebase(data, rows, split):
    data[split] = split_of([rows[8], rows[15]])
    message = error_of(check_rows, data, EncoderProfile())
    assert message.startswith(split) and "row 2" in message and rows[15]["url"] in message


def test_queries_are_matched_with_the_corpus(data, rows):
    queries, corpus = data["valid"], data["codebase"]
    assert target_rows(queries, corpus).tolist() == [0, 1]
    assert "eval_dataset: no corpus" in error_of(target_rows, queries, None, "eval_dataset")
    for bad in ((queries.remove_columns("url"), corpus), (queries, corpus.remove_columns("url"))):
        assert "no column 'url'" in error_of(target_rows, *bad, "eval_dataset")
    message = error_of(target_rows, queries, split_of(rows[9:12]), "eval_dataset")
    assert message == f"eval_dataset: row 1 has a url that is not in the codebase ({rows[8]['url']})"
    assert "row 2 repeats the url of row 1" in error_of(target_rows, queries, split_of([rows[8]] * 2), "queries")


def test_rows_without_a_codebase_or_a_url_are_refused(data):
    whole = dict(data)
    del data["codebase"]
    assert error_of(check_rows, data, EncoderProfile()).startswith("valid: no corpus")
    whole["test"] = whole["test"].remove_columns("url")
    assert error_of(check_rows, DatasetDict(whole), EncoderProfile()).startswith("test: no column 'url'")


@pytest.mark.parametrize("split", ["train", "codebase"])
def test_code_that_is_parsed_needs_a_language(data, split):
    graphs = EncoderProfile(data_flow_length=8)
    check_rows(data, graphs)
    spoilt = data[split].to_list()
    spoilt[2]["language"] = None
    rows = Dataset.from_list(spoilt, features=FEATURES)
    assert error_of(check_rows, data | {split: rows}, graphs) == (
        f"{split}: column 'language' is missing or empty in row 3"
    )
    data[split] = data[split].remove_columns("language")
    assert f"{split}: no column 'language'" in error_of(check_rows, data, graphs)
    check_rows(data, EncoderProfile())


def test_the_cache_of_these_tests_is_not_the_users(write_folder, tmp_path):
    found = load_folder(write_folder())["train"].cache_files[0]["filename"]
    assert found.startswith(str(tmp_path)) and str(datasets.config.HF_DATASETS_CACHE).startswith(str(tmp_path))
