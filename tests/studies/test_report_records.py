"""The report and the comparison read the folder that a real run leaves."""

import json

import numpy as np
import pytest
import torch
from datasets import DatasetDict

from soft_trainer import EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.evaluation.results import load_ranks
from soft_trainer.hub.model_card import write_model_card
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.record import Run
from soft_trainer.studies.compare import Pairing
from soft_trainer.studies.report.pictures import pictures
from soft_trainer.studies.report.report import make_report, sections


@pytest.fixture
def run(model, tokenizer, profile, dataset, tmp_path):
    """Two steps of the tiny encoder on twenty rows, measured before and after."""
    data = DatasetDict(train=dataset.select(range(20)), test=dataset.select(range(20, 24)), codebase=dataset)
    args = SoftInfoNCETrainingArguments(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=10, num_train_epochs=1, logging_steps=1,
        save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True, seed=7,
        do_train=True, do_predict=True, cancel="top_k", cancel_k=1,
    )  # fmt: skip
    trainer = SoftInfoNCETrainer(
        model=model, args=args, train_dataset=data["train"], codebase=dataset, processing_class=tokenizer,
        encoder=profile, callbacks=[EstimatorCallback(BM25Estimator())],
    )  # fmt: skip
    made = Run(trainer, data, ModelArguments(model_name_or_path="a/tiny"), DataArguments(data_dir="some/rows"), {})
    made.measure("untrained")
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    made.measure("trained")
    made.finish()
    return tmp_path / "run"


def test_a_run_s_folder_is_reported(run):
    record = json.loads((run / "run.json").read_text())
    assert record["encoder"] | {"name": "tiny", "code_length": 32, "score_function": "cosine"} == record["encoder"]
    assert record["loss"] | {"loss": "soft_info_nce", "alpha": 1.5, "cancel": "top_k", "cancel_k": 1} == record["loss"]
    assert record["estimator"] == {"name": "bm25", "estimator_model": None}
    assert record["training"]["seconds a step"] == pytest.approx(record["training"]["train runtime, s"] / 2, abs=0.05)
    report = make_report([run])
    rows = [(cell.system, cell.cancel, cell.estimator) for cell in report.main_cells]
    assert rows == [("untrained", "", ""), ("trained", "top_k 1", "bm25")]
    assert [section.name for section in sections(report)] == ["results", "data", "runs", "left-out"]
    titles = [picture.title for (group,) in [pictures(report.main_cells).values()] for picture in group]
    assert titles[0] == "Training loss" and any(title.startswith("Weights") for title in titles)
    assert write_model_card(run, record) and "seconds a step" in (run / "README.md").read_text()


def test_its_ranks_show_their_texts(run, rows):
    ranked = load_ranks(run / "ranks-test-trained.parquet")
    assert ranked.pool_size == 24 and ranked.query(0) == rows[20]["docstring"]
    codes = {row["url"]: row["code"] for row in rows}
    assert ranked.rows["code"].to_pylist() == [codes[url] for url in ranked.urls]
    for row, urls in enumerate(ranked.rows["top_urls"].to_pylist()):
        assert ranked.top(row) == [(url == ranked.urls[row], codes[url]) for url in urls[:3]]
    assert len(Pairing([ranked], [load_ranks(run / "ranks-test-untrained.parquet")]).differences) == 4


def test_the_histogram_counts_the_negatives_alone():
    callback = EstimatorCallback(BM25Estimator())
    weights = torch.tensor([[1.0, 0.1, 0.9, 0.0], [1.3, 1.0, 0.1, 0.5]])
    callback.observe(weights, 0.1, torch.zeros(2, 4), torch.tensor([0, 1]))
    assert callback.histogram is None and callback.statistics()["weight_at_floor"] == pytest.approx(2 / 5)
    counts, edges = (np.array(callback.histogram[name]) for name in ("counts", "edges"))
    negatives = np.histogram([0.1, 0.9, 1.3, 0.1, 0.5], edges)[0]
    assert counts.tolist() == negatives.tolist() and edges[0] == 0 and edges[-1] == pytest.approx(1.3)
