"""CodeSearchNet as the Hub serves it: Parquet files and a card with configurations, or a loading script."""

import io
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from refusals import refused
from server import WRITE_TOKEN

from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.any_rows import load_rows
from soft_trainer.data.codesearchnet import HUB_COLUMNS, load_hub
from soft_trainer.data.published import PARQUET_BRANCH, load_published
from soft_trainer.encoders.loading import load_encoder

NAME = "code-search-net/code_search_net"
SCRIPT = {"code_search_net.py": b"raise SystemExit", "README.md": b"---\nlicense: other\n---\n"}
BRANCH = "{config}/{split}/0000.parquet"
MAIN = "{config}/{split}-00000-of-00001.parquet"


@pytest.fixture
def published(here, rows, monkeypatch):
    """Publishes files as CodeSearchNet on the loopback Hub, and lets `datasets` read from there."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", here.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here.home / "datasets")
    theirs = {ours: column for column, ours in HUB_COLUMNS.items()}
    parts = {"train": rows[:16], "validation": rows[16:20], "test": rows[20:]}

    def parquet(split: str) -> bytes:
        table = [{theirs.get(name, name): value for name, value in row.items()} for row in parts[split]]
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([row | {"language": "ruby", "split_name": split} for row in table]), file)
        return file.getvalue()

    def publish(files: dict[str, bytes], branch: str | None = None, layout: str | None = None, configs=("ruby",)):
        """Commits files, and with a `layout` the Parquet files of every split of `configs`."""
        if layout:
            names = {
                (config, split): layout.format(config=config, split=split) for config in configs for split in parts
            }
            files = files | {name: parquet(split) for (_, split), name in names.items()}
        api = HfApi(here.url, token=WRITE_TOKEN)
        api.create_repo(NAME, repo_type="dataset", exist_ok=True)
        commit = [CommitOperationAdd(name, content) for name, content in files.items()]
        if branch:
            api.create_branch(NAME, branch=branch, repo_type="dataset")
            # The Hub's own branch shares no file with main.
            copied = {*api.list_repo_files(NAME, repo_type="dataset")} - files.keys() - {".gitattributes"}
            commit += [CommitOperationDelete(name) for name in copied]
        api.create_commit(NAME, commit, commit_message="Data", repo_type="dataset", revision=branch)

    return publish


def card(*configs: str) -> dict[str, bytes]:
    """Returns a card that names the files of each configuration and split, as `push_to_hub` writes it."""
    splits = ("train", "validation", "test")
    files = {config: [{"split": split, "path": f"{config}/{split}-*"} for split in splits] for config in configs}
    header = {"configs": [{"config_name": config, "data_files": parts} for config, parts in files.items()]}
    return {"README.md": f"---\n{yaml.safe_dump(header)}---\n".encode()}


def check_rows(data) -> None:
    """Checks that the splits are those that were published, in our columns."""
    assert {split: len(part) for split, part in data.items()} == {"train": 16, "valid": 4, "test": 4, "codebase": 8}
    assert data["train"]["docstring"][0] == "sort a list with quick sort"
    assert set(data["test"]["language"]) == {"ruby"}


@pytest.mark.slow
def test_configurations_on_main(published):
    published(card("go", "ruby"), layout=MAIN, configs=("go", "ruby"))
    check_rows(load_hub(NAME, "ruby"))


@pytest.mark.slow
def test_a_loading_script_is_read_from_the_branch(published, here):
    published(SCRIPT)
    published({}, PARQUET_BRANCH, BRANCH, ("default", "ruby"))
    check_rows(load_hub(NAME, "ruby"))
    assert len(load_rows(NAME)["train"]) == 16  # without a configuration
    with refused(f"{NAME} (php) cannot be read from the Hub", "--data_dir"):
        load_hub(NAME, "php")
    here.stop()
    check_rows(load_hub(NAME, "ruby"))  # from the cache


@pytest.mark.slow
def test_a_configuration_that_main_lacks_is_read_from_the_branch(published):
    published(card("go"), layout=MAIN, configs=("go",))
    published({}, PARQUET_BRANCH, BRANCH)
    check_rows(load_hub(NAME, "ruby"))


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
def test_every_failure_is_one_line_that_names_data_dir(published, files, words):
    if files is not None:
        published(files)
    with refused(f"{NAME} (ruby) cannot be read from the Hub", words, "--data_dir"):
        load_published(NAME, "ruby")


@pytest.mark.slow
@pytest.mark.parametrize("script", [False, True], ids=["main", "branch"])
def test_language_ruby_from_the_download_to_the_saved_encoder(published, hub, tmp_path, script):
    if script:
        published(SCRIPT)
        published({}, PARQUET_BRANCH, BRANCH)
    else:
        published(card("ruby"), layout=MAIN)
    options = {"num_train_epochs": 1, "save_strategy": "no"}
    run = hub.train(WRITE_TOKEN, language="ruby", output_dir=tmp_path / "out", **options)
    assert run.returncode == 0 and "allow_patterns" not in run.stderr, run.stderr
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["dataset"] == NAME and record["languages"] == ["ruby"]
    assert record["results"]["test"]["trained"]["pool_size"] == 8
    card_text = (tmp_path / "out/README.md").read_text()
    assert f"datasets:\n- {NAME}\n" in card_text and "finds functions (ruby)" in card_text
    assert load_encoder(tmp_path / "out", device="cpu").encode_queries(["sort a list"]).shape == (1, 32)


def test_no_hub_is_one_line_of_the_command(here, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", here.url)
    monkeypatch.chdir(tmp_path)
    here.stop()
    with refused(f"{NAME} (ruby) cannot be read from the Hub", "--data_dir"):
        run_command(["train", "--from_scratch", "32x1", "--use_cpu", "true"])
    assert not Path("outputs").exists()
