"""A run's rows are written, pushed and read again as a data set."""

import json

import datasets
import pytest
from huggingface_hub import DatasetCard, HfApi
from refusals import refused
from server import READ_TOKEN, WRITE_TOKEN

from soft_trainer.cli.__main__ import run_command
from soft_trainer.data.layouts.codesearchnet import load_folder, load_hub
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.hub.dataset import pushed_tables, write_data
from soft_trainer.hub.push import Repository
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.rows import load_data

REPO = "ann/rows"
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def arguments(data_dir):
    return DataArguments(language="python", data_dir=str(data_dir), push_data_to_hub=REPO, filters="length")


def same_rows(left, right) -> bool:
    return {split: rows.to_list() for split, rows in left.items()} == {s: rows.to_list() for s, rows in right.items()}


@pytest.mark.slow
def test_splits_of_an_earlier_push_are_deleted_and_nothing_else(here, arguments, data_dir, tmp_path):
    data, folder = load_folder(data_dir), tmp_path / "pushed_rows"
    Repository(REPO, WRITE_TOKEN, repo_type="dataset").push(write_data(data, arguments, folder))
    (tmp_path / "notes.md").write_text("by hand")
    HfApi(token=WRITE_TOKEN).upload_file(
        path_or_fileobj=tmp_path / "notes.md", path_in_repo="notes.md", repo_id=REPO, repo_type="dataset"
    )
    fewer = datasets.DatasetDict({split: data[split] for split in ("test", "codebase")})
    Repository(REPO, WRITE_TOKEN, repo_type="dataset").push(write_data(fewer, arguments, folder))
    assert list(load_hub(REPO, "python")) == ["test", "codebase"]
    names = {*HfApi(token=WRITE_TOKEN).list_repo_files(REPO, repo_type="dataset")} - {".gitattributes"}
    assert names == {"README.md", "notes.md", "test.jsonl.gz", "codebase.jsonl.gz"}
    other = tmp_path / "other"  # a folder that no run has written leaves the rest of the data set alone
    write_data(datasets.DatasetDict(train=data["train"]), arguments, other)
    Repository(REPO, WRITE_TOKEN, repo_type="dataset").push(other)
    assert list(load_hub(REPO, "python")) == ["train", "test", "codebase"]


def test_the_card_describes_the_rows(arguments, data_dir, tmp_path):
    card = DatasetCard.load(write_data(load_folder(data_dir), arguments, tmp_path / "rows") / "README.md")
    assert card.data.language == ["code"] and {"python", "code-search"} <= set(card.data.tags)
    splits = [part["split"] for part in card.data.configs[0]["data_files"]]
    assert splits == ["train", "validation", "test", "codebase"]
    for words in (
        "| train    |     16 |",
        "| codebase |     24 |",
        "1 repositories or packages; the largest: someone/something (16)",
        "Filters: length",
        "docstring_tokens",
        "keeps the licence",
        "--dataset_name ann/rows --language python",
    ):
        assert words in card.text, words
    assert str(data_dir) not in card.content and "negatives" not in card.content


@pytest.mark.parametrize("compressed", [True, False], ids=["as pushed by a run", "a folder pushed as it is"])
def test_a_data_set_of_ours_by_name_is_read_with_a_token(here, arguments, data_dir, tmp_path, monkeypatch, compressed):
    data = load_folder(data_dir)
    folder = write_data(data, arguments, tmp_path / "rows") if compressed else data_dir
    Repository(REPO, WRITE_TOKEN, private=True, repo_type="dataset").push(folder)
    named = DataArguments(language="python", dataset_name=REPO)
    with refused("HF_TOKEN"):
        load_hub(REPO, "python")
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    assert same_rows(pushed_tables(load_data(named, EncoderProfile())), data)
    assert named.rows_name == REPO
    with refused("ann/rows: train has no rows in go, only in python"):
        load_hub(REPO, "go")


@pytest.mark.slow
def test_a_run_pushes_its_rows_and_another_trains_on_them(train, data_dir):
    options = {"max_steps": 1, "save_strategy": "no", "model_card": True}
    assert train(**options, push_data_to_hub=REPO, max_train_rows=12, hub_private_repo=True) == (0, "")
    assert "datasets:\n- ann/rows\n" in (train.folder / "README.md").read_text()
    (train.folder / "README.md").unlink()
    assert train(**options, dataset_name=REPO, data_dir=None, overwrite=True) == (0, "")
    statistics = json.loads((train.folder / "run.json").read_text())["statistics"]
    assert {split: table["rows"] for split, table in statistics.items()} == {
        "train": 12, "valid": 4, "test": 4, "codebase": 24
    }  # fmt: skip
    assert "datasets:\n- ann/rows\n" in (train.folder / "README.md").read_text()
    assert train.sources_of(WRITE_TOKEN) == []


@pytest.mark.slow
def test_rows_that_cannot_be_pushed_stop_the_run_and_are_pushed_later(train):
    train.hub.fault(commit=-1)
    code, error = train(push_data_to_hub=REPO)
    command = f"soft-trainer push {train.folder / 'pushed_rows'} {REPO} --repo_type dataset"
    assert code == 2 and error.endswith(command) and not list(train.folder.rglob("*.safetensors"))
    train.hub.fault(commit=0)
    assert run_command(command.split()[1:]) == 0
    assert len(load_hub(REPO, "python")["train"]) == 16
