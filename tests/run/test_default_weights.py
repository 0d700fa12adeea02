"""Soft-InfoNCE with BM25's weights is what a trainer does unless something else is chosen."""

import pytest
from datasets import Dataset
from refusals import refused
from transformers import TrainingArguments

from soft_trainer import (
    BM25Estimator,
    EstimatorCallback,
    ScoresEstimator,
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
)
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator


class OwnStep(SoftInfoNCETrainer):
    def compute_loss(self, model, batch, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, batch, return_outputs)


class OwnScores(SoftInfoNCETrainer):
    def block_loss(self, queries, codes, batch, block):
        return super().block_loss(queries, codes, batch, block)


@pytest.fixture
def made(model, tokenizer, profile, dataset, tmp_path, monkeypatch):
    """Returns a function that makes a trainer of an encoder from scratch, or of the one that is named."""
    monkeypatch.chdir(tmp_path)

    def make(name=None, kind=SoftInfoNCETrainer, args=None, rows=dataset, **arguments):
        if name is None:
            arguments |= {"model": model, "processing_class": tokenizer, "encoder": profile}
        else:
            arguments["model"] = name
        if args is not None:
            plain = args.pop("plain", False)
            options = {"use_cpu": True, "per_device_train_batch_size": 8} | args
            args = (TrainingArguments if plain else SoftInfoNCETrainingArguments)("out", **options)
        return kind(args=args, train_dataset=rows, **arguments)

    return make


PLAIN = {"plain": True}
SMALL = {"per_device_train_batch_size": 4}
WEIGHTS, NONE = ("soft_info_nce", BM25Estimator), ("info_nce", None)
WAYS = {
    "no arguments": ({"name": "base"}, WEIGHTS),
    "our arguments": ({"args": {}}, WEIGHTS),
    "plain arguments": ({"args": PLAIN}, WEIGHTS),
    "base": ({"name": "base", "args": {}}, WEIGHTS),
    "base with plain arguments": ({"name": "base", "args": PLAIN}, WEIGHTS),
    "an estimator among the callbacks": ({"args": PLAIN, "callbacks": [BM25Estimator()]}, WEIGHTS),
    "Eq. 4's least batch": ({"args": PLAIN | {"per_device_train_batch_size": 5}}, WEIGHTS),
    "another estimator": ({"args": {"estimator": "initial_model"}}, ("soft_info_nce", InitialModelEstimator)),
    "no estimator": ({"args": {"estimator": "none"}}, NONE),
    "InfoNCE": ({"args": {"loss": "info_nce"}}, NONE),
    "a small batch": ({"args": SMALL}, NONE),
    "a small batch with plain arguments": ({"args": PLAIN | SMALL}, NONE),
    "weights that fit a small batch": ({"args": SMALL | {"alpha": 0.5}}, WEIGHTS),
    "an own step": ({"kind": OwnStep, "args": PLAIN}, NONE),
    "own scores": ({"kind": OwnScores, "args": {}}, NONE),
    "an own step with weights": ({"kind": OwnStep, "args": {}, "callbacks": [BM25Estimator()]}, WEIGHTS),
    "a negative that the estimator finds": (
        {"kind": OwnStep, "args": {"negatives_per_query": 1}},
        ("info_nce", BM25Estimator),
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_table_before_training_says_which_loss(made, name, capsys):
    given, (loss, estimator) = WAYS[name]
    trainer = made(**{key: dict(value) if key == "args" else value for key, value in given.items()})
    assert trainer.criterion.loss == loss
    assert estimator is None if trainer.estimator is None else type(trainer.estimator) is estimator
    trainer._prepare_training()
    said = capsys.readouterr().err
    (row,) = [line for line in said.splitlines() if line.startswith("| loss ")]
    assert (f" {loss}, no weights " if loss == "info_nce" else f" {loss} ") in row
    assert ("| estimator " in said) == (estimator is not None)
    explained = loss == "info_nce" and name not in ("no estimator", "InfoNCE")
    assert said.count("loss=info_nce: ") == explained


def test_another_estimator_replaces_the_default_but_not_one_that_was_chosen(made, dataset):
    for args in (PLAIN, {}):
        trainer = made(args=dict(args))
        trainer.add_callback(InitialModelEstimator(cache_dir=None))
        assert type(trainer.estimator) is InitialModelEstimator
        assert sum(hasattr(each, "estimator") for each in trainer.callback_handler.callbacks) == 1
        with refused("only one estimator is allowed"):
            trainer.add_callback(BM25Estimator())
    trainer.remove_callback(EstimatorCallback)
    trainer.resolve()
    assert trainer.estimator is None and trainer.criterion.loss == "info_nce"
    with refused("only one estimator is allowed"):
        made(args={"estimator": "bm25"}).add_callback(BM25Estimator())
    with refused("only one estimator is allowed"):
        made(callbacks=[BM25Estimator(), BM25Estimator()])
    rows = dataset.add_column("negatives", ["def f(): pass"] * 24).add_column("scores", [[1.0, 0.5]] * 24)
    assert type(made(args=dict(PLAIN), rows=rows, callbacks=[ScoresEstimator()]).estimator) is ScoresEstimator


@pytest.mark.parametrize("args", [PLAIN, {}], ids=["plain", "ours"])
def test_an_evaluation_alone_has_no_estimator_and_is_measured_and_described(made, dataset, args):
    trainer = made(args=dict(args), rows=None, eval_dataset=dataset)
    assert trainer.estimator is None
    assert trainer.measure().results["eval"]["untrained"]["mrr"] > 0
    assert trainer.create_model_card().is_file()  # nothing was saved before


@pytest.mark.slow
def test_a_run_begun_with_infonce_is_continued_with_infonce(made):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "report_to": "none", "disable_tqdm": True}
    made(args=options | {"loss": "info_nce"}).train()
    with refused("checkpoint-2: loss was info_nce, is now the default: set loss=info_nce; the criterion's alpha was"):
        made(args=dict(options)).train(resume_from_checkpoint="last")
    made(args=options | {"loss": "info_nce", "max_steps": 3}).train(resume_from_checkpoint="last")


@pytest.mark.slow
@pytest.mark.parametrize("given", ["pairs", "a last batch of one", "negatives", "stream"])
def test_every_kind_of_rows_trains_with_the_default(made, dataset, given):
    options = {"report_to": "none", "disable_tqdm": True, "num_train_epochs": 1, "per_device_train_batch_size": 8}
    rows = {
        "pairs": dataset,
        "a last batch of one": dataset.select(range(17)),
        "negatives": dataset.add_column("negatives", ["def f(): pass"] * 24),
        "stream": Dataset.from_list(dataset.to_list()).to_iterable_dataset(),
    }[given]
    trainer = made("base", args=options | {"dataloader_drop_last": False}, rows=rows)
    trainer.train()
    assert trainer.criterion.loss == "soft_info_nce" and trainer.state.log_history[-1]["train_loss"] > 0
