"""The rows of a run: languages, selection, and error messages for unusable rows."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from refusals import refused
from tables import tables_of
from trees import source_tree

from soft_trainer import load_rows
from soft_trainer.cli.__main__ import run_command
from soft_trainer.data import load as loading
from soft_trainer.data.languages import languages_in
from soft_trainer.data.row_checks import check_split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.options.fields import DataArguments
from soft_trainer.run.fingerprint import splits_hash
from soft_trainer.shell import rows as run_rows
from soft_trainer.shell.rows import choose_language, load_data
from soft_trainer.shell.sources import check_sources


def load(profile=None, **arguments):
    return tables_of(load_data(DataArguments(**arguments), profile or EncoderProfile()))


def folders(tmp_path, data_dir, **sizes):
    """Makes a folder of rows for each language, with this many training rows. Returns the path with `{language}`."""
    rows = [json.loads(line) for line in (data_dir / "codebase.jsonl").read_text().splitlines()]
    for language, size in sizes.items():
        own = [row | {"url": f"{language}/{row['url']}", "language": "unknown"} for row in rows]
        (tmp_path / language).mkdir()
        for split, part in {"train": own[:size], "valid": own[:2], "test": own[2:4], "codebase": own[:8]}.items():
            (tmp_path / language / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return str(tmp_path / "{language}")


@pytest.mark.slow
def test_several_languages_are_joined_and_max_train_rows_takes_the_first_of_each(data_dir, rows, tmp_path):
    sizes = {"ruby": 6, "go": 3, "php": 8}
    options = {"language": "ruby, go,php", "data_dir": folders(tmp_path, data_dir, **sizes)}
    data = load(**options)
    assert data["train"]["language"][:] == ["ruby"] * 6 + ["go"] * 3 + ["php"] * 8
    assert data["codebase"]["language"][:] == ["ruby"] * 8 + ["go"] * 8 + ["php"] * 8
    own = {language: [row["url"] for row in data["train"] if row["language"] == language] for language in sizes}
    train = load(**options, max_train_rows=5)["train"]
    assert train["url"][:] == sum([urls[:5] for urls in own.values()], [])
    (tmp_path / "java").mkdir()
    for split in ("train", "valid"):
        pd.DataFrame({"query": [f"{split} x"], "code": [f"{split} y"]}).to_csv(tmp_path / "java" / f"{split}.csv")
    with refused("test: no rows in java, but each language is measured separately"):
        load(**options | {"language": "ruby,java"})
    with refused("several languages need {language}"):
        load(language="ruby,go", data_dir=str(tmp_path / "go"))
    data = load(language="python", data_dir=str(data_dir), max_train_rows=3)
    assert data["train"]["url"][:] == [row["url"] for row in rows[:3]]
    assert [len(data[split]) for split in ("valid", "test", "codebase")] == [4, 4, 24]


def without(rows, *columns):
    return [{name: value for name, value in row.items() if name not in columns} for row in rows]


def test_any_language_will_do_where_nothing_is_parsed(write_folder, rows):
    folder = write_folder(**{split: without(rows[8:12], "language") for split in ("train", "valid", "test")})
    data = load(language="rust", data_dir=str(folder))
    assert len(data["train"]) == 4 and "language" not in data["train"].column_names


KNOWN = "supports only ruby, python, java, javascript, php, go"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"data_dir": "here", "data_flow_length": 8}, f"language='rust': data flow {KNOWN}"),
        ({"source_dir": "here", "language": "perl"}, f"language='perl': mining {KNOWN}, c, rust"),
        ({}, f"language='rust': CodeSearchNet {KNOWN}"),
        ({"data_dir": "here", "language": "rust,rust"}, "language='rust': list each language once"),
        ({"data_dir": "here", "language": "rust,"}, "language='': list each language once"),
        ({"dataset_name": "none"}, "no rows of train, valid, test, codebase: set data_dir to a folder"),
        ({"data_dir": "a", "source_dir": "b", "language": "go"}, "data_dir and source_dir: set only one of them"),
    ],
)
def test_what_cannot_be_had_is_one_line(arguments, words):
    arguments = {"language": "rust"} | arguments
    profile = EncoderProfile(data_flow_length=arguments.pop("data_flow_length", 0))
    with refused(words):
        load(profile, **arguments)


def test_rows_without_a_language_are_in_the_one_that_was_given(write_folder, rows):
    parts = {"train": rows[:8], "valid": rows[8:10], "test": rows[10:12], "codebase": rows[8:12]}
    folder = write_folder(**{split: without(part, "language") for split, part in parts.items()})
    graphs = EncoderProfile(data_flow_length=8)
    data = load(graphs, language="python", data_dir=str(folder))
    assert {language for split in data.values() for language in split["language"]} == {"python"}
    with pytest.raises(UserError, match="train: no column 'language'.*set language"):
        check_split(load_rows(folder)["train"], "train", graphs)


def test_training_rows_need_no_url(write_folder, rows):
    folder = write_folder(train=without(rows[:8], "url"))
    data = load(language="python", data_dir=str(folder), max_train_rows=5)
    assert len(data["train"]) == 5 and data["train"]["url"][0].startswith("code:")


def test_split_urls_choose_from_a_folder(data_dir, rows, tmp_path):
    url = [row["url"] for row in rows]
    lists = {"train": url[2:4], "valid": url[0:1], "test": url[20:21], "codebase": [*url[0:2], url[20]]}
    for split, urls in lists.items():
        (tmp_path / f"{split}.txt").write_text("\n".join(urls))
    data = load(data_dir=str(data_dir), split_urls=str(tmp_path))
    assert {split: part["url"][:] for split, part in data.items()} == lists


def test_the_language_is_that_of_the_rows_or_of_the_source_files(tmp_path, write_folder, rows):
    source = source_tree(tmp_path / "source", NOUNS)
    Path(source, "page.js").write_text("const x = 1;\n")
    arguments = DataArguments(source_dir=source)
    assert arguments.languages == []
    choose_language(arguments)
    assert arguments.languages == ["python"]
    load(source_dir=source)
    for columns, names in (((), ["python"]), (("language",), ["python"]), (("language", "path"), [])):
        parts = dict.fromkeys(("train", "valid", "test", "codebase"), without(rows[:4], *columns))
        arguments = {"data_dir": str(write_folder(**parts))}
        assert DataArguments(**arguments).languages == []
        assert languages_in(load(**arguments)) == names
    assert DataArguments().language == "ruby" and DataArguments(dataset_name="USER/ROWS").language is None
    with refused("rows/{language}: set language, which replaces {language}"):
        load(data_dir="rows/{language}")


NOUNS = ["lines", "words", "pages", "notes", "books"]


def test_a_source_tree_is_mined_into_four_checked_splits_and_again_only_if_it_is_edited(tmp_path, monkeypatch):
    source = Path(source_tree(tmp_path / "source", NOUNS))
    arguments = {"language": "python", "source_dir": str(source)}
    data = load(**arguments)
    assert min(map(len, data.values())) > 0 and set(data["test"]["url"]) <= set(data["codebase"]["url"])
    modules = [set(data[split]["path"]) for split in ("train", "valid", "test")]
    assert not modules[0] & modules[1] and not modules[0] & modules[2] and not modules[1] & modules[2]
    (source / "site-packages").mkdir()
    (source / "site-packages" / "other.py").write_text("x = 1\n")
    with monkeypatch.context() as patch:
        patch.setattr("soft_trainer.mining.tree.mine_to", lambda *_, **__: pytest.fail("mined again"))
        assert load(**arguments)["train"]["url"][:] == data["train"]["url"][:]
    module = source / "lines.py"
    module.write_text(module.read_text().replace("def count_lines", "def tally_lines"))
    names = {row["func_name"] for split in load(**arguments).values() for row in split}
    assert "tally_lines" in names and "count_lines" not in names
    other = source_tree(tmp_path / "other", ["tunes", "songs", "notes", "chord", "drums"])
    paths = set(load(language="python", source_dir=other)["train"]["path"])
    assert paths and not paths & {"lines.py", "words.py", "pages.py", "books.py"}


def test_the_rows_of_a_tree_are_compared_and_not_its_files(tmp_path):
    module = Path(source_tree(tmp_path / "source", NOUNS), "lines.py")

    def now():
        arguments = DataArguments(language="python", source_dir=str(module.parent))
        return splits_hash(load_data(arguments, EncoderProfile()))

    before = now()
    module.write_text(module.read_text() + "\n# the end\n")
    assert now() == before
    module.write_text(module.read_text().replace("def count_lines", "def tally_lines"))
    assert now() != before


def test_the_options_reach_the_mining_and_stdlib_is_that_of_the_running_python(monkeypatch):
    def mine(*arguments, **options):
        raise UserError(f"asked for {arguments[:2]}, {options}")

    monkeypatch.setattr("soft_trainer.mining.tree.mine_to", mine)
    with refused(Path(json.__file__).parents[1], "'keep': ['tests', 'links']"):
        load(language="python", source_dir="stdlib", mining_keep="tests,links")


@pytest.mark.parametrize(
    "training, eval_data_dir, needed",
    [
        ({}, None, ("train", "test", "codebase")),
        ({"do_predict": False}, None, ("train", "valid", "codebase")),
        ({"do_train": False, "do_eval": False}, None, ("test", "codebase")),
        ({}, "cosqa", ("train",)),
        ({"eval_strategy": "epoch"}, "cosqa", ("train", "valid", "codebase")),
        ({"do_train": False}, "cosqa", ()),
    ],
)
def test_what_a_run_cannot_do_without(training, eval_data_dir, needed):
    usual = {"do_train": True, "do_eval": True, "do_predict": True, "eval_strategy": "no"}
    arguments = DataArguments(eval_data_dir=eval_data_dir)
    assert run_rows.needed_splits(arguments, SimpleNamespace(**usual | training)) == needed


@pytest.mark.parametrize("rows", [np.array(["x", "y"]), iter([{"code": "x"}])])
def test_only_a_data_set_or_a_list_of_dicts_are_rows(rows):
    with refused("rows: expected a datasets.Dataset, a data frame or a list of dicts", f"not {type(rows).__name__}"):
        loading.as_rows(rows, "rows")
    with refused("rows: there are no rows"):
        loading.as_rows([], "rows")
    with refused("rows, row 2: expected a dict, not str"):
        loading.as_rows([{"code": "x"}, "x"], "rows")
    with refused("rows=pairs.csv: expected rows, not a name; load them with load_rows"):
        loading.as_rows("pairs.csv", "rows")


def test_a_folder_of_rows_may_have_a_comma_in_its_name(tmp_path):
    (tmp_path / "a,b").mkdir()
    check_sources(DataArguments(data_dir=str(tmp_path / "a,b"), language="ruby"))
    with refused(f"eval_data_dir={tmp_path / 'a'}: no such folder"):
        check_sources(DataArguments(data_dir=".", eval_data_dir=str(tmp_path / "a,b"), language="ruby"))


def test_what_is_not_needed_may_be_absent_but_queries_need_a_pool(data_dir, tmp_path):
    folder = tmp_path / "part"
    folder.mkdir()
    shutil.copy(data_dir / "train.jsonl", folder)
    arguments = DataArguments(language="python", data_dir=str(folder))
    assert list(load_data(arguments, EncoderProfile(), needed=("train",))) == ["train"]
    split = load_data(arguments, EncoderProfile(), needed=("train", "test", "codebase"))
    assert sum(len(split[name]) for name in ("train", "valid", "test")) == 16 and min(map(len, split.values())) > 0
    shutil.copy(data_dir / "test.jsonl", folder)
    made = load_data(arguments, EncoderProfile(), needed=("train",))
    assert made["test"].corpus["url"][:] == made["test"].queries["url"][:]
    (folder / "test.jsonl").write_text('{"docstring": "x", "url": "u"}')
    with pytest.raises(UserError, match="test.jsonl: these queries have no corpus .*codebase.jsonl in the folder"):
        load_data(arguments, EncoderProfile(), needed=("train",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source_dir", "nowhere"], "source_dir=nowhere: no such folder"),
        (["--source_dir", ".", "--language", "pyhton"], "mining supports only ruby"),
        (["--data_dir", "no/such/rows"], "data_dir=no/such/rows: no such folder or file"),
        (["--data_dir", ".", "--eval_data_dir", "no/such/set"], "eval_data_dir=no/such/set: no such folder or file"),
    ],
)
@pytest.mark.parametrize("command", [["train", "--model_name_or_path"], ["evaluate"]])
def test_a_local_mistake_is_told_before_the_hub_is_asked(command, words, message, monkeypatch):
    monkeypatch.setattr("soft_trainer.shell.building.resolve_profile", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(UserError, match=message):
        run_command([*command, "USER/NAME", *words])
