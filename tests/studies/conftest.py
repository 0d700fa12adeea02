"""Makes output folders of runs without training: a record, a log and ranks, as `Run` and the trainer write them."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.evaluation.ranking import Ranking, retrieval_metrics
from soft_trainer.evaluation.results import save_ranks
from soft_trainer.evaluation.retrieval import RetrievalOutput

POOL = 60


def _write_ranks(path: Path, ranks, pool: int = POOL, other: int = 0) -> None:
    """Writes a file of ranks. The positive of query q is row q of the pool. Neighbouring codes fill the other ranks.

    `other` changes the ids of that many codes at the end of the pool.
    """
    names = [*range(pool - other), *(f"other{row}" for row in range(other))]
    codes = {"url": [f"u{name}" for name in names], "code": [f"def f{name}():\n  pass" for name in names]}
    queries = {"url": codes["url"][: len(ranks)], "docstring": [f"query {row}" for row in range(len(ranks))]}
    row, position = np.arange(len(ranks))[:, None], np.arange(1, 4)
    top = np.where(position == np.array(ranks)[:, None], row, (row + position) % pool)
    ranking = Ranking(torch.tensor(np.array(ranks)), torch.from_numpy(top), torch.ones(len(ranks), 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    split = Split.from_urls(Dataset.from_dict(queries), Dataset.from_dict(codes))
    save_ranks(path, split, RetrievalOutput(ranking, {}), EncoderProfile())


def _write_run(
    outputs, name, ranks, loss=None, seed=1, language="ruby", system="trained", split="test", **changes
) -> Path:
    """Writes the output folder of a finished run below `outputs`. `changes` replaces keys of the record."""
    folder = outputs / name
    _write_ranks(folder / f"ranks-{split}-{system}.parquet", ranks)
    metrics = {**retrieval_metrics(torch.tensor(np.array(ranks)), POOL), "queries": len(ranks)}
    record = {
        "base_model": "microsoft/unixcoder-base",
        "dataset": "csn",
        "languages": [language],
        "encoder": {"name": "unixcoder-base", "profile": "unixcoder", "query_length": 128},
        "loss": loss or {"loss": "info_nce", "estimator": None},
        "training": {"functions compared per query": 64, "epochs": 10.0, "learning rate": 2e-5, "seed": seed},
        "results": {split: {system: metrics}},
    } | changes
    log = [{"step": step, "loss": 1 / step, "weight_min": 0.2, "weight_at_floor": 0.1} for step in (10, 20)]
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return folder


@pytest.fixture
def write_ranks():
    return _write_ranks


@pytest.fixture(scope="session")
def write_run():
    return _write_run


@pytest.fixture
def make_run(tmp_path):
    """Returns `_write_run` for the folder `outputs` in `tmp_path`."""
    return partial(_write_run, tmp_path / "outputs")


@pytest.fixture(scope="session")
def soft():
    """Returns a function that makes the loss settings of a record: Soft-InfoNCE with BM25, changed by keywords."""

    def loss(**changes):
        settings = {"alpha": 1.5, "beta": 0.5, "temperature": 1.0, "floor": 0.1}
        return {"loss": "soft_info_nce", "estimator": "BM25Estimator", **settings, **changes}

    return loss
