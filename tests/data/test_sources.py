"""The rows that a run asked for: which source, which rows of it, and that bad ones are refused."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from soft_trainer.arguments import DataArguments
from soft_trainer.data import codesearchnet, sources
from soft_trainer.data.sources import load_data
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError

FUNCTION = '''
def {verb}_{noun}(text, size):
    """{Verb} the {noun} of a long text and return how many there were."""
    found = [{noun} for {noun} in text.split("{noun}") if len({noun}) > size]
    {verb} = sum(len({noun}) for {noun} in found)
    return {verb} / max(len(found), 1)
'''
VERBS = ("count", "merge", "parse", "hash")


def load(tmp_path, profile=None, **arguments):
    return load_data(DataArguments(**arguments), profile or EncoderProfile(), tmp_path / "mined")


def source_tree(folder, nouns):
    """A Python tree of one module for each noun, with four documented functions each."""
    folder.mkdir()
    for noun in nouns:
        functions = [FUNCTION.format(verb=verb, Verb=verb.title(), noun=noun) for verb in VERBS]
        (folder / f"{noun}.py").write_text("\n".join(functions))
    return str(folder)


def test_a_folder(data_dir, tmp_path):
    data = load(tmp_path, language="python", data_dir=str(data_dir))
    assert {split: len(rows) for split, rows in data.items()} == {"train": 16, "valid": 4, "test": 4, "codebase": 24}


def test_several_languages_are_joined_and_every_row_says_its_own(data_dir, tmp_path):
    def of(language):
        rows = [json.loads(line) for line in (data_dir / "codebase.jsonl").read_text().splitlines()]
        return [row | {"url": f"{language}/{row['url']}", "language": "unknown"} for row in rows]

    for language in ("go", "ruby"):
        splits = {"train": of(language)[:6], "valid": of(language)[:2], "test": of(language)[2:4]}
        for split, rows in (splits | {"codebase": of(language)[:8]}).items():
            path = tmp_path / language / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(tmp_path, language="ruby, go", data_dir=str(tmp_path / "{language}"))
    assert data["train"]["language"][:] == ["ruby"] * 6 + ["go"] * 6
    assert data["codebase"]["language"][:] == ["ruby"] * 8 + ["go"] * 8
    with pytest.raises(UserError, match="write {language}"):
        load(tmp_path, language="ruby,go", data_dir=str(tmp_path / "go"))


def test_the_hub_without_a_folder(data_dir, tmp_path, monkeypatch):
    asked = []
    hub = codesearchnet.load_folder(data_dir)
    monkeypatch.setattr(sources, "load_hub", lambda *names: asked.append(names) or hub)
    data = load(tmp_path, language="go")
    assert asked == [("code-search-net/code_search_net", "go")]
    assert len(data["train"]) == 16


def test_max_train_rows_takes_the_first_of_training_only(data_dir, rows, tmp_path):
    data = load(tmp_path, data_dir=str(data_dir), max_train_rows=3)
    assert data["train"]["url"][:] == [row["url"] for row in rows[:3]]
    assert len(data["codebase"]) == 24
    assert len(load(tmp_path, data_dir=str(data_dir), max_train_rows=1000)["train"]) == 16


def test_split_urls_choose_from_a_folder(data_dir, rows, tmp_path):
    url = [row["url"] for row in rows]
    lists = {"train": url[2:4], "valid": url[0:1], "test": url[20:21], "codebase": [*url[0:2], url[20]]}
    for split, urls in lists.items():
        (tmp_path / f"{split}.txt").write_text("\n".join(urls))
    data = load(tmp_path, data_dir=str(data_dir), split_urls=str(tmp_path))
    assert {split: part["url"][:] for split, part in data.items()} == lists


def test_a_source_tree_is_mined_into_four_checked_splits(tmp_path):
    source = source_tree(tmp_path / "source", ["lines", "words", "pages", "notes", "books"])
    data = load(tmp_path, language="python", source_dir=source)
    assert all(len(data[split]) for split in ("train", "valid", "test", "codebase"))
    modules = [set(data[split]["path"]) for split in ("train", "valid", "test")]
    assert not modules[0] & modules[1] and not modules[0] & modules[2] and not modules[1] & modules[2]
    assert set(data["test"]["url"]) <= set(data["codebase"]["url"])


def test_a_source_tree_is_mined_once(tmp_path, monkeypatch):
    source = source_tree(tmp_path / "source", ["lines", "words", "pages", "notes", "books"])
    first = load(tmp_path, language="python", source_dir=source)
    monkeypatch.setattr("soft_trainer.mining.tree.mine_to", lambda *_, **__: pytest.fail("mined again"))
    assert load(tmp_path, language="python", source_dir=source)["train"]["url"][:] == first["train"]["url"][:]


def test_an_edited_source_tree_is_mined_again(tmp_path, monkeypatch):
    source = source_tree(tmp_path / "source", ["lines", "words", "pages", "notes", "books"])
    load(tmp_path, language="python", source_dir=source)
    (Path(source) / "site-packages").mkdir()
    (Path(source) / "site-packages" / "other.py").write_text("x = 1\n")
    with monkeypatch.context() as patch:
        patch.setattr("soft_trainer.mining.tree.mine_to", lambda *_, **__: pytest.fail("mined again"))
        load(tmp_path, language="python", source_dir=source)
    module = Path(source) / "lines.py"
    module.write_text(module.read_text().replace("def count_lines", "def tally_lines"))
    names = {
        row["func_name"] for split in load(tmp_path, language="python", source_dir=source).values() for row in split
    }
    assert "tally_lines" in names
    assert "count_lines" not in names


def test_another_source_tree_is_not_taken_for_the_first(tmp_path):
    first = source_tree(tmp_path / "first", ["lines", "words", "pages", "notes", "books"])
    second = source_tree(tmp_path / "second", ["tunes", "songs", "notes", "chord", "drums"])
    load(tmp_path, language="python", source_dir=first)
    paths = set(load(tmp_path, language="python", source_dir=second)["train"]["path"])
    assert paths and not paths & {"lines.py", "words.py", "pages.py", "books.py"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"language": "perl"}, ["perl", "ruby, python, java, javascript, php, go"]),
        ({"data_dir": "a", "source_dir": "b"}, ["data_dir", "source_dir"]),
        ({"data_dir": "nowhere"}, ["nowhere"]),
        ({"source_dir": "nowhere", "language": "python"}, ["nowhere"]),
    ],
)
def test_what_cannot_be_had_is_one_line(tmp_path, arguments, words):
    with pytest.raises(UserError) as caught:
        load(tmp_path, **arguments)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words)


def test_rows_are_checked(data_dir, rows, tmp_path):
    folder = shutil.copytree(data_dir, tmp_path / "copy")
    (folder / "codebase.jsonl").write_text((data_dir / "test.jsonl").read_text())
    with pytest.raises(UserError, match="valid: rows 1, 2, 3, 4 have a url that is not in the codebase"):
        load(tmp_path, data_dir=str(folder))


def test_the_standard_library_is_that_of_the_running_python(tmp_path, monkeypatch):
    import json

    mined = []

    def mine_to(source, language, *_, **__):
        mined.append((source, language))
        raise UserError("far enough")

    monkeypatch.setattr("soft_trainer.mining.tree.mine_to", mine_to)
    with pytest.raises(UserError, match="far enough"):
        load(tmp_path, language="python", source_dir="stdlib")
    [(source, language)] = mined
    assert json.__file__.startswith(str(source)) and language == "python"


def test_filters_drop_rows_and_say_how_many(tmp_path, write_folder, rows, capsys):
    bad = {**rows[3], "docstring": "see http://example.org", "docstring_tokens": ["see", "http://example.org", "now"]}
    folder = write_folder(train=[*rows[:3], bad], valid=rows[8:10], test=rows[10:12], codebase=rows[8:12])
    arguments = DataArguments(language="python", data_dir=str(folder), filters="links, short_functions")
    with pytest.raises(UserError, match="train: no rows"):
        load_data(arguments, EncoderProfile(), tmp_path)  # every function here has one line
    kept = load_data(dataclasses.replace(arguments, filters="links"), EncoderProfile(), tmp_path)
    assert kept["train"]["url"][:] == [row["url"] for row in rows[:3]] and len(kept["codebase"]) == 4
    assert "| links" in capsys.readouterr().err
    with pytest.raises(UserError, match="no such rule"):
        load_data(dataclasses.replace(arguments, filters="spelling"), EncoderProfile(), tmp_path)


def needed(training, **arguments):
    args = SimpleNamespace(
        **({"do_train": True, "do_eval": True, "do_predict": True, "eval_strategy": "no"} | training)
    )
    return sources.needed_splits(DataArguments(**arguments), args)


def test_what_a_run_cannot_do_without():
    human = {"eval_data_dir": "cosqa"}
    assert needed({}) == ("train", "valid", "test", "codebase")
    assert needed({"do_train": False, "do_eval": False}) == ("test", "codebase")
    assert needed({}, **human) == ("train",)
    assert needed({"eval_strategy": "epoch"}, **human) == ("train", "valid", "codebase")
    assert needed({"do_train": False}, **human) == ()


def test_what_is_not_needed_may_be_absent_but_queries_need_a_pool(data_dir, tmp_path):
    folder = tmp_path / "part"
    folder.mkdir()
    shutil.copy(data_dir / "train.jsonl", folder)
    arguments = DataArguments(language="python", data_dir=str(folder))
    assert list(load_data(arguments, EncoderProfile(), tmp_path, needed=("train",))) == ["train"]
    with pytest.raises(UserError, match="neither test.jsonl"):
        load_data(arguments, EncoderProfile(), tmp_path, needed=("train", "test", "codebase"))
    shutil.copy(data_dir / "test.jsonl", folder)
    with pytest.raises(UserError, match="test without a pool: codebase.jsonl"):
        load_data(arguments, EncoderProfile(), tmp_path, needed=("train",))
    with pytest.raises(UserError, match="no rows of train, valid, test, codebase: name a folder"):
        load(tmp_path, dataset_name="none")
