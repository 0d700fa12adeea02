"""CodeSearchNet is read from the Hub in each of the forms in which the Hub has served it."""

from pathlib import Path

import pytest
from codesearchnet import NAME, ON_BRANCH, ON_MAIN, SCRIPT, card, parquet_files, publish
from refusals import refused

from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.layouts.codesearchnet import load_hub
from soft_trainer.data.layouts.published import PARQUET_BRANCH, load_published
from soft_trainer.data.load import load_rows
from soft_trainer.hub import files as hub_files


@pytest.fixture
def parts(rows):
    return rows[:16], rows[16:20], rows[20:]


def check_rows() -> None:
    """Checks that CodeSearchNet on the loopback Hub has the published splits, with the package's columns."""
    splits = load_rows(NAME, language="ruby")
    assert {name: len(split) for name, split in splits.items()} == {"train": 16, "valid": 4, "test": 4}
    assert splits["train"].queries["docstring"][0] == "sort a list with quick sort"
    assert set(splits["test"].queries["language"]) == {"ruby"} and len(splits["test"].corpus) == 8


@pytest.mark.slow
def test_configurations_on_main(here, parts):
    publish(here.url, card("go", "ruby") | parquet_files(parts, ON_MAIN, "go", "ruby"))
    check_rows()


@pytest.mark.slow
def test_a_loading_script_is_read_from_the_branch(here, parts):
    publish(here.url, SCRIPT)
    publish(here.url, parquet_files(parts, ON_BRANCH, "default", "ruby"), PARQUET_BRANCH)
    check_rows()
    assert len(load_rows(NAME)["train"]) == 16  # without a configuration
    with refused(f"{NAME} (php) cannot be read from the Hub", "data_dir"):
        load_hub(NAME, "php")
    here.stop()
    check_rows()  # from the cache


@pytest.mark.slow
def test_a_configuration_that_main_lacks_is_read_from_the_branch(here, parts):
    publish(here.url, card("go") | parquet_files(parts, ON_MAIN, "go"))
    publish(here.url, parquet_files(parts, ON_BRANCH, "ruby"), PARQUET_BRANCH)
    check_rows()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "words"),
    [
        (SCRIPT, "Dataset scripts are no longer supported"),
        (card("go"), ""),
        ({"README.md": b"---\nconfigs: [\n---\n"}, ""),
        ({"README.md": b"---\nconfigs: 3\n---\n"}, ""),
        ({"ruby/train-0.parquet": b"no parquet"} | card("ruby"), ""),
        ({}, "doesn't contain any data files"),
        (None, "doesn't exist on the Hub"),
    ],
    ids=["script", "no file", "no yaml", "wrong yaml", "no parquet", "empty", "none"],
)
def test_every_failure_is_one_line_that_names_data_dir(here, files, words):
    if files is not None:
        publish(here.url, files)
    with refused(f"{NAME} (ruby) cannot be read from the Hub", words, "data_dir"):
        load_published(NAME, "ruby")


def test_no_hub_is_one_line_of_the_command(here, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    here.stop()
    hub_files._no_answer.cache_clear()  # an earlier test may have found the Hub at this address less than a minute ago
    with refused(f"{NAME} (ruby)", "cannot be reached", "data_dir=FOLDER"):
        run_command(["train", "--from_scratch", "32x1", "--use_cpu", "true"])
    assert not Path("outputs").exists()
