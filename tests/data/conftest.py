"""Folders of JSON lines, and a `datasets` cache that goes with the test."""

import gzip
import json

import datasets
import pytest

from soft_trainer.data.codesearchnet import SPLITS


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """Keep what is cached out of the home folder, and every test without the cache of another."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def write_folder(rows, tmp_path):
    """Writes a folder in GraphCodeBERT's layout; `changed` gives the rows of a split in place of the usual ones.

    Usual are 8 rows of train, 2 of valid, 2 of test, and the last four as codebase. A string is written as it is.
    """

    def write(compressed: bool = False, **changed):
        usual = {"train": rows[:8], "valid": rows[8:10], "test": rows[10:12], "codebase": rows[8:12]}
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        for split in SPLITS:
            content = changed.get(split, usual[split])
            if not isinstance(content, str):
                content = "".join(json.dumps(row) + "\n" for row in content)
            if compressed:
                (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
            else:
                (folder / f"{split}.jsonl").write_text(content)
        return folder

    return write
