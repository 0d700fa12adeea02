"""A folder of rows on the Hub, as the Hub's client uploads it, is read as a data set."""

import json

import pytest
from huggingface_hub import HfApi
from refusals import refused
from server import READ_TOKEN, WRITE_TOKEN
from tables import tables_of

from soft_trainer.data.layouts.codesearchnet import load_folder, load_hub
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.options.fields import DataArguments
from soft_trainer.shell.rows import load_data
from soft_trainer.system.files import write_rows

REPO = "ann/rows"
pytestmark = pytest.mark.usefixtures("own_cache")


def same_rows(left, right) -> bool:
    return {split: rows.to_list() for split, rows in left.items()} == {s: rows.to_list() for s, rows in right.items()}


def upload(folder, private=True):
    api = HfApi(token=WRITE_TOKEN)
    api.create_repo(REPO, repo_type="dataset", private=private, exist_ok=True)
    api.upload_folder(repo_id=REPO, repo_type="dataset", folder_path=folder)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_folder_of_rows_is_read_by_name_with_a_token(here, data_dir, tmp_path, monkeypatch, compressed):
    data = load_folder(data_dir)
    if compressed:
        write_rows(data, tmp_path / "rows")
    upload(tmp_path / "rows" if compressed else data_dir)
    named = DataArguments(language="python", dataset_name=REPO)
    with refused("HF_TOKEN"):
        load_hub(REPO, "python")
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    assert same_rows(tables_of(load_data(named, EncoderProfile())), data)
    assert named.rows_name == REPO
    with refused("ann/rows: train has no rows in go, only in python"):
        load_hub(REPO, "go")


@pytest.mark.slow
def test_a_run_trains_on_rows_of_the_hub(train, data_dir):
    upload(data_dir, private=False)
    options = {"max_steps": 1, "save_strategy": "no", "model_card": True}
    assert train(**options, dataset_name=REPO, data_dir=None) == (0, "")
    statistics = json.loads((train.folder / "run.json").read_text())["statistics"]
    assert {split: table["rows"] for split, table in statistics.items()} == {
        "train": 16, "valid": 4, "test": 4, "codebase": 24
    }  # fmt: skip
    assert "datasets:\n- ann/rows\n" in (train.folder / "README.md").read_text()
    assert train.sources_of(WRITE_TOKEN) == []
