"""Rows from a folder, from the Hub and by lists of urls. The message names every bad row."""

import itertools
import json
import shutil

import pytest
from datasets import Dataset, DatasetDict
from refusals import refused

from soft_trainer.data import codesearchnet
from soft_trainer.data.codesearchnet import (
    FEATURES,
    SPLITS,
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
    """Returns the message of the UserError that the call raises: one line."""
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


def test_other_columns_and_blank_lines_are_left_out_and_token_text_is_split(write_folder, rows):
    row = rows[0] | {"code_tokens": "def  f ( )", "docstring_tokens": "sort a list", "stars": 7}
    train = load_folder(write_folder(train=[row]))["train"]
    assert "stars" not in train.column_names
    assert train[0]["code_tokens"] == ["def", "f", "(", ")"]
    assert train[0]["docstring_tokens"] == ["sort", "a", "list"]
    codes = ["a = '\u2028\x0c\x85'", "b = 'é😀'"]  # separators of lines to some, but not in a file of JSON lines
    lines = [json.dumps(row | {"code": code}, ensure_ascii=False) for code in codes]
    assert load_folder(write_folder(train="\n\n".join(lines) + "\n\n"))["train"]["code"][:] == codes


def test_negatives_are_one_text_or_several_and_the_column_is_there_only_with_values(write_folder, rows):
    values = ["def f(): pass", ["u", "def g(x): return x"], None, []]
    train = [row | {"negatives": value} for row, value in zip(rows[:4], values, strict=True)]
    data = load_folder(write_folder(train=train))
    assert data["train"]["negatives"][:] == [["def f(): pass"], values[1], None, []]
    assert "negatives" not in data["valid"].column_names
    train[1]["negatives"] = ["u", 5]
    with refused("train.jsonl, row 2: negatives holds a value that is not text"):
        load_folder(write_folder(train=train))


def test_rows_are_memory_mapped_from_a_cache(write_folder, rows, tmp_path):
    folder = write_folder()
    first, second = load_folder(folder), load_folder(folder)["train"]
    [file] = first["train"].cache_files
    assert [file] == second.cache_files and file["filename"].startswith(str(tmp_path))
    assert first["valid"][0]["url"] == rows[8]["url"]
    assert load_folder(write_folder(valid=rows[9:7:-1]))["valid"][0]["url"] == rows[9]["url"]


def test_missing_folders_and_files(write_folder, tmp_path):
    with refused(tmp_path / "nowhere", *(f"{split}.jsonl" for split in SPLITS)):
        load_folder(tmp_path / "nowhere")
    folder = write_folder()
    (folder / "valid.jsonl").unlink()
    with refused(folder, "valid.jsonl", "valid.jsonl.gz"):
        load_folder(folder)
    (folder / "valid.csv").write_text("query,code\n")
    with refused("; rows are read from JSON lines, not from valid.csv"):
        load_folder(folder)


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"code": "x"', ["JSON"]),
        ('["code"]', ["JSON object", "list"]),
        ('{"url": 7}', ["url", "int", "str"]),
        ('{"code_tokens": {"a": 1}}', ["code_tokens", "dict", "list"]),
        ('{"code_tokens": ["def", null]}', ["row 3: code_tokens"]),
    ],
)
def test_a_broken_row_is_named_by_file_and_row(write_folder, rows, line, words):
    folder = write_folder(valid=f"{json.dumps(rows[0])}\n\n{line}\n")
    with refused(f"{folder / 'valid.jsonl'}, row 3", *words):
        load_folder(folder)


DAMAGE = {
    "ends too early": lambda whole: whole[: len(whole) // 2],
    "no gzip at all": lambda whole: b"plain text\n",
    "bytes flipped inside": lambda whole: whole[:40] + b"\xff" * 20 + whole[60:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_gzip_file(write_folder, damage):
    path = write_folder(compressed=True) / "train.jsonl.gz"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with refused(path):
        load_folder(path.parent)


def test_a_file_without_rows_of_ours(write_folder):
    for compressed, content in itertools.product((False, True), ("", "\n\n")):
        with refused("test.jsonl", "no rows"):
            load_folder(write_folder(compressed, test=content))
        shutil.rmtree(write_folder())
    with refused("train.jsonl: row 1 has none of the columns repo, path, ", "rename"):
        load_folder(write_folder(train=[{"question": "sort a list", "answer": "sorted(x)"}]))
    folder = write_folder()
    (folder / "test.jsonl").write_bytes(b'{"code": "\xff\xfe"}\n')
    with refused(folder / "test.jsonl"):
        load_folder(folder)


# ---- The Hub ----


THEIRS = {
    "repo": "repository_name", "path": "func_path_in_repository", "original_string": "whole_func_string",
    "code": "func_code_string", "code_tokens": "func_code_tokens", "docstring": "func_documentation_string",
    "docstring_tokens": "func_documentation_tokens", "partition": "split_name", "url": "func_code_url",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch, rows):
    """Stands in for the Hub: three splits with its column names; `asked` records the requests."""

    def in_hub_columns(row, split):
        return {THEIRS.get(name, name): value for name, value in (row | {"partition": split}).items()}

    parts = {"train": rows[:8], "validation": rows[8:10], "test": [*rows[10:12], rows[9]]}
    lists = {split: [in_hub_columns(row, split) for row in part] for split, part in parts.items()}
    loaded, asked = DatasetDict({split: Dataset.from_list(part) for split, part in lists.items()}), []
    monkeypatch.setattr(codesearchnet, "load_dataset", lambda *names, **_: asked.append(names) or loaded)
    return {"asked": asked, "splits": loaded}


def test_the_hub_gives_the_same_columns_as_a_folder(hub, rows):
    data = load_hub("code-search-net/code_search_net", "ruby")
    assert hub["asked"] == [("code-search-net/code_search_net", "ruby")]
    assert set(data["train"].column_names) == set(COLUMNS.split())
    assert data["train"][3] == rows[3] | {"partition": "train"}
    assert data["valid"]["docstring_tokens"][:] == [row["docstring_tokens"] for row in rows[8:10]]
    # The codebase is valid and test, without repeated urls.
    assert sorted(data["codebase"]["url"]) == sorted(row["url"] for row in rows[8:12])
    check_rows(data, EncoderProfile())


def test_a_hub_that_cannot_be_reached_names_the_ways_without_it(monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nand more lines")

    monkeypatch.setattr(codesearchnet, "load_dataset", fail)
    with refused("code-search-net/code_search_net", "--data_dir", "--source_dir"):
        load_hub("code-search-net/code_search_net", "ruby")


def test_a_hub_data_set_without_a_split_or_column_says_which(hub):
    valid = hub["splits"].pop("validation")
    with refused("validation"):
        load_hub("someone/else", "ruby")
    for split, part in [*hub["splits"].items(), ("validation", valid)]:
        hub["splits"][split] = part.remove_columns(["func_code_url"])
    with refused("url"):
        load_hub("someone/else", "ruby")


def test_an_unknown_language_lists_the_six():
    with refused("perl", "ruby", "python", "java", "javascript", "php", "go"):
        check_languages(["ruby", "perl"])
    with refused("'go'"):
        check_languages(["go", "go"])


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


def test_a_url_may_hold_a_space_and_a_missing_list_of_urls_is_named(data, rows, tmp_path):
    url = "https://example.org/my folder/a file.py#L1"
    data["valid"] = split_of(rows[8:9], url=url)
    lists = {split: data[split]["url"][:] for split in ("train", "test")}
    folder = write_lists(tmp_path / "lists", valid=[url], codebase=[url], **lists)
    assert select_by_urls(data, folder)["valid"]["url"][:] == [url]
    (folder / "codebase.txt").unlink()
    with refused(folder / "codebase.txt", "--split_urls"):
        select_by_urls(data, folder)


# ---- Rows that would not work ----


def test_good_rows_pass_and_the_codebase_needs_no_query_and_training_no_url(data, rows, write_folder):
    check_rows(data, EncoderProfile())
    data["codebase"] = split_of(rows[8:12], docstring="", docstring_tokens=[])
    data["train"] = split_of(rows[:8], url=None)
    check_rows(data, EncoderProfile())
    plain = [{name: row[name] for name in ("docstring", "code", "url")} for row in rows]  # texts serve for tokens
    parts = {"train": plain[:8], "valid": plain[8:10], "test": plain[10:12], "codebase": plain[8:12]}
    check_rows(load_folder(write_folder(**parts)), EncoderProfile())


def second(**changes):
    """Changes the second row."""
    return lambda rows: [rows[0], rows[1] | changes, *rows[2:]]


def every(**changes):
    return lambda rows: [row | changes for row in rows]


@pytest.mark.parametrize(
    "split, spoil, words",
    [
        *((split, lambda rows: [], ["no rows"]) for split in SPLITS),
        ("train", second(docstring_tokens=[]), ["docstring_tokens", "row 2"]),
        ("train", second(code_tokens=None), ["code_tokens", "row 2"]),
        ("valid", second(docstring_tokens=[]), ["docstring_tokens", "row 2"]),
        ("test", second(url=""), ["url", "row 2"]),
        ("codebase", second(code_tokens=[]), ["code_tokens", "row 2"]),
        ("codebase", second(url=None), ["url", "row 2"]),
        ("train", every(docstring_tokens=[]), ["rows 1, 2, 3, 4, 5 and 3 more"]),
        ("codebase", lambda rows: [*rows, rows[1]], ["row 5", "row 2", "module_9.py"]),
        ("valid", second(url="elsewhere"), ["row 2", "elsewhere"]),
        ("test", second(url="elsewhere"), ["row 2", "elsewhere"]),
    ],
)
def test_a_bad_row_is_named_by_split_column_and_row(data, split, spoil, words):
    rows = spoil(data[split].to_list())
    data[split] = Dataset.from_list(rows, features=FEATURES) if rows else data[split].select([])
    message = error_of(check_rows, data, EncoderProfile())
    assert message.startswith(split) and all(word in message for word in words)


def test_columns_and_splits_that_are_missing(data, rows):
    whole = dict(data)
    profile = EncoderProfile(query_columns=("docstring",))
    with refused("train", "docstring"):
        check_rows(data | {"train": split_of(rows[:8], docstring=" \n")}, profile)
    with refused("code_tokens", "--code_columns"):
        check_rows(data | {"train": data["train"].remove_columns(["code", "code_tokens"])}, EncoderProfile())
    with refused("test: no column 'url'"):
        check_rows(data | {"test": data["test"].remove_columns("url")}, EncoderProfile())
    del whole["codebase"]
    with refused("valid: no corpus"):
        check_rows(whole, EncoderProfile())


def test_queries_are_matched_with_the_corpus(data, rows):
    queries, corpus = data["valid"], data["codebase"]
    assert target_rows(queries, corpus).tolist() == [0, 1]
    assert "eval_dataset: no corpus" in error_of(target_rows, queries, None, "eval_dataset")
    for bad in ((queries.remove_columns("url"), corpus), (queries, corpus.remove_columns("url"))):
        assert "no column 'url'" in error_of(target_rows, *bad, "eval_dataset")
    message = error_of(target_rows, queries, split_of(rows[9:12]), "eval_dataset")
    assert message == f"eval_dataset: row 1 has a url that is not in the codebase ({rows[8]['url']})"
    assert "row 2 repeats the url of row 1" in error_of(target_rows, queries, split_of([rows[8]] * 2), "queries")


@pytest.mark.parametrize("split", ["train", "codebase"])
def test_code_that_is_parsed_needs_a_language(data, split):
    graphs = EncoderProfile(data_flow_length=8)
    check_rows(data, graphs)
    spoilt = data[split].to_list()
    spoilt[2]["language"] = None
    rows = Dataset.from_list(spoilt, features=FEATURES)
    with refused(f"{split}: column 'language' is missing or empty in row 3"):
        check_rows(data | {split: rows}, graphs)
    data[split] = data[split].remove_columns("language")
    assert f"{split}: no column 'language'" in error_of(check_rows, data, graphs)
    check_rows(data, EncoderProfile())
