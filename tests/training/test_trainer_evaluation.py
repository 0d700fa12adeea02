"""Evaluation during training: evaluation rows, several sets, and features that use the metrics."""

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import refused
from safetensors.torch import load_file
from trainings import check_weights
from transformers import EarlyStoppingCallback, EvalPrediction
from transformers.trainer_utils import denumpify_detensorize

from soft_trainer import BM25Estimator, EstimatorCallback, SoftInfoNCETrainer
from soft_trainer.data import load, make_splits
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.run.record import best_step

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize("value", [[], {}, "rows.jsonl"])
def test_what_has_no_rows_is_refused(trainer_of, value):
    with pytest.raises(UserError, match="eval_dataset"):
        trainer_of(arguments={"eval_dataset": value})


def test_missing_rows_or_urls_are_found_before_the_first_step(trainer_of, dataset):
    for arguments, words in (
        ({"codebase": None, "eval_dataset": dataset.select_columns(["docstring", "url"])}, "no corpus to rank"),
        ({"codebase": dataset.select(range(10))}, "module_10.py"),
        ({"eval_dataset": {"a": dataset, "b": dataset}, "codebase": {"a": dataset}}, "no corpus for 'b'"),
        ({"train_dataset": None}, "train_dataset is missing"),
    ):
        with pytest.raises(UserError, match=words):
            trainer_of(arguments=arguments, **EVALUATED).train()


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        (["a", "b", "a"], "row 3 repeats the url of row 1: a"),
        (["a", None, "b"], "codebase, row 2: the id, column 'url', is missing or empty"),
        (["a", "", "b"], "codebase, row 2: the id, column 'url', is missing or empty"),
    ],
)
def test_a_corpus_without_one_url_a_code_is_refused(trainer_of, rows, urls, words):
    corpus = Dataset.from_list([{**row, "url": url} for row, url in zip(rows, urls, strict=False)])
    queries = corpus.select([0])
    with pytest.raises(UserError, match=words):
        trainer_of(arguments={"eval_dataset": queries, "codebase": corpus}, **EVALUATED)
    trainer = trainer_of(arguments={"eval_dataset": None})
    for use in (trainer.evaluate, trainer.predict):
        with pytest.raises(UserError, match=words):
            use(queries, codebase=corpus)


def test_a_query_without_a_relevant_function_is_refused(trainer_of, dataset):
    split = Split.from_grades(dataset.select(range(3)), dataset, [(0, 3), (1, 1)], [1.0, 2.0])
    with pytest.raises(UserError, match="row 3: no relevant function in the corpus"):
        trainer_of().predict(split)


def test_versions_of_a_code_all_answer_its_query(trainer_of, dataset):
    urls = ["one", "one", *dataset["url"][2:]]
    rows = dataset.remove_columns("url").add_column("url", urls)
    output = trainer_of().predict(Split.from_pairs(rows))
    queries, codes = (trainer_of().embed_rows(rows, side).double() for side in ("query", "code"))
    scores = queries @ codes.T
    first = min(int((scores[0] > scores[0, code]).sum()) + 1 for code in (0, 1))
    assert output.ranks[0] == first and "map" not in output.metrics


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "EarlyStoppingCallback: set eval_strategy to steps or epoch"),
        ({"plain": True, "eval_strategy": "epoch"}, "EarlyStoppingCallback: set metric_for_best_model"),
    ],
)
def test_an_early_stop_without_metrics_is_refused_before_the_estimator_is_fitted(trainer_of, capsys, options, words):
    trainer = trainer_of(**options)
    trainer.add_callback(EarlyStoppingCallback(1))
    with pytest.raises(UserError, match=words):
        trainer.train()
    assert "fitted" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("plain", [True, False])
def test_evaluation_before_the_first_step(train, plain):
    trainer = train(plain=plain, eval_on_start=True, eval_strategy="steps", eval_steps=3)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_mrr" in entry] == [0, 3]


@pytest.mark.slow
def test_several_evaluation_sets_are_measured_apart_and_their_mean_chooses(train, dataset):
    sets = {"a": dataset.select(range(6)), "b": dataset.select(range(6, 20))}
    corpora = {"a": dataset.select(range(8)), "b": dataset}
    callbacks = [EstimatorCallback(BM25Estimator()), EarlyStoppingCallback(2)]
    options = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.0}
    arguments = {"eval_dataset": sets, "codebase": corpora, "callbacks": callbacks}
    trainer = train(max_steps=6, arguments=arguments, **EVALUATED, **options)
    # With a learning rate of 0, the first evaluation stays best, and two more evaluations stop the run.
    assert trainer.state.global_step == 3 and trainer.state.best_global_step == 1
    apart = [trainer.predict(sets[key], corpora[key]).metrics["test_mrr"] for key in sets]
    metrics = trainer.evaluate()
    assert [metrics["eval_a_mrr"], metrics["eval_b_mrr"]] == pytest.approx(apart, abs=1e-12)
    assert trainer.state.best_metric == metrics["eval_mrr"] == pytest.approx(np.mean(apart), abs=1e-12)
    assert metrics["eval_a_pool_size"] == 8 and "eval_pool_size" not in metrics


@pytest.mark.slow
def test_one_of_several_evaluation_sets_can_choose(train, dataset):
    arguments = {"eval_dataset": {"a": dataset.select(range(6)), "b": dataset}}
    trainer = train(metric_for_best_model="b_recall@5", save_strategy="best", arguments=arguments, **EVALUATED)
    measured = [entry["eval_b_recall@5"] for entry in trainer.state.log_history if "eval_b_recall@5" in entry]
    assert trainer.state.best_metric == max(measured)


@pytest.mark.slow
def test_compute_metrics_gets_ranks_top_codes_and_targets(train, dataset):
    seen = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        ranks, top = prediction.predictions
        return {"worst": float(ranks.max()), "eval_hits": float((top[:, 0] == prediction.label_ids).mean())}

    arguments = {"compute_metrics": compute_metrics, "eval_dataset": dataset.select(range(5))}
    trainer = train(metric_for_best_model="worst", greater_is_better=False, arguments=arguments, **EVALUATED)
    metrics = trainer.evaluate()
    ranks, top = seen[-1].predictions
    assert ranks.shape == (5,) and top.shape == (5, 10) and seen[-1].label_ids.tolist() == list(range(5))
    assert metrics["eval_worst"] == ranks.max() and metrics["eval_hits"] == metrics["eval_recall@1"]
    assert metrics["eval_mrr"] == pytest.approx((1 / ranks).mean())
    assert len(seen) == 5 and trainer.state.best_metric is not None  # the first call tries the metric on three rows
    assert seen[0].label_ids.tolist() == [0, 1, 2]


CHOSEN = [  # an evaluation a step, a checkpoint every two steps; the step of the best one
    ([0.5, 0.8, 0.9, 0.85, 0.95, 0.7], True, 4),
    ([0.9, 0.8, 0.7, 0.6, 0.5, 0.8], True, 2),
    ([0.1, 0.5, 0.1, 0.4, 0.1, 0.3], False, 6),
]


@pytest.mark.parametrize(("values", "greater", "best"), CHOSEN)
@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_best_saved_checkpoint_is_kept_and_loaded(trainer_of, values, greater, best, resumed):
    def made(steps):
        arguments = {"compute_metrics": lambda _: {"quality": values[trainer.state.global_step - 1]}}
        options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
        options |= {"metric_for_best_model": "quality", "greater_is_better": greater, "max_steps": steps}
        return trainer_of(arguments=arguments, **options, **EVALUATED)

    if resumed:
        trainer = made(4)
        trainer.train()
    trainer = made(6)
    trainer.train("last" if resumed else None)
    (kept,) = Path(trainer.args.output_dir).glob("checkpoint-*")
    assert kept.name == f"checkpoint-{best}" and best_step(trainer) == best
    check_weights(trainer.model.state_dict(), load_file(kept / "model.safetensors"))
    assert trainer.state.best_metric == values[best - 1]
    record = trainer.record()
    if not resumed:  # otherwise, the earlier process has the other metrics of that step
        assert record["results"]["eval"]["trained"]["quality"] == values[best - 1]
    assert record["training"]["step of the saved weights"] == best


SCALARS = {
    "int64": lambda ranks: (ranks == 1).sum(),
    "float32": lambda ranks: np.float32(0.5),
    "bool": lambda ranks: (ranks == 1).any(),
    "tensor": lambda ranks: torch.tensor(0.25),
    "tensor of one": lambda ranks: torch.tensor([3]),
    "nested": lambda ranks: {"a": np.float64(1.5), "b": [np.int8(2)]},
    "number": lambda ranks: 7,
}


@pytest.mark.slow
def test_scalars_of_numpy_and_torch_are_numbers_in_the_log(train, dataset):
    arguments = {"compute_metrics": lambda p: {name: make(p.predictions[0]) for name, make in SCALARS.items()}}
    trainer = train(arguments=arguments, save_strategy="epoch", **EVALUATED)
    metrics = trainer.evaluate()
    ranks = trainer.predict(dataset).ranks.numpy()
    theirs = denumpify_detensorize({name: make(ranks) for name, make in SCALARS.items()})
    assert {name: metrics[f"eval_{name}"] for name in SCALARS} == theirs
    stored = json.loads((Path(trainer.args.output_dir) / "checkpoint-3" / "trainer_state.json").read_text())
    assert {type(stored["log_history"][-1][f"eval_{name}"]) for name in ("int64", "tensor of one", "number")} == {int}


def own(prediction):
    return {"own": 1.0}


def nothing(prediction):
    return {}


def of_all(prediction):
    return {"own": float(prediction.label_ids.sum()) / (len(prediction.label_ids) > 3)}  # fails on three rows


@pytest.mark.parametrize(
    ("name", "compute", "sets", "message"),
    [
        ("onw", own, 1, "metric_for_best_model='onw': this metric is not measured; did you mean 'own'"),
        ("eval_f1", nothing, 1, "metric_for_best_model='eval_f1': this metric is not measured"),
        ("b_onw", own, 2, "metric_for_best_model='b_onw': this metric is not measured; did you mean"),
        ("a_own", own, 2, None),
        ("own", own, 2, None),
        ("own", lambda _: {"eval_own": 1.0}, 1, None),
        ("recall@5", nothing, 2, None),
        ("own", of_all, 1, None),
    ],
)
def test_a_metric_that_is_not_computed_is_refused_before_training(trainer_of, dataset, name, compute, sets, message):
    arguments = {"compute_metrics": compute, "eval_dataset": dict.fromkeys("ab", dataset) if sets == 2 else dataset}
    trainer = trainer_of(estimator=None, metric_for_best_model=name, max_steps=1, arguments=arguments, **EVALUATED)
    with refused(message) if message else contextlib.nullcontext():
        trainer._prepare_training()


@pytest.mark.slow
def test_a_schedule_that_watches_a_metric_steps_on_it(train):
    settings = {"mode": "max", "patience": 0, "eps": 0.0}
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": settings}
    trainer = train(learning_rate=1e-9, max_steps=4, **options, **EVALUATED)
    # At this learning rate nothing is learned, so every evaluation after the first lowers the rate.
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.5 * rates[0]


@pytest.mark.slow
def test_an_optimizer_with_two_sets_of_weights_is_asked_for_those_of_evaluation(train, model):
    class TwoSets(torch.optim.SGD):
        modes = []

        def train(self):
            self.modes.append("train")

        def eval(self):
            self.modes.append("eval")

    for cached in (None, 4):
        optimizer = TwoSets(model.parameters(), lr=1e-3)
        arguments = {"optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))}
        trainer = train(max_steps=1, gradient_cache_chunk_size=cached, arguments=arguments)
        assert TwoSets.modes[-1] == "train"
        trainer.evaluate()
        assert TwoSets.modes[-1] == "eval"


def test_an_unplaced_model_is_placed_for_the_time_of_an_evaluation(trainer_of, monkeypatch):
    # FSDP and DeepSpeed move the model when training begins. "meta" plays the role of the GPU.
    trainer, devices = trainer_of(), []
    monkeypatch.setattr(type(trainer.args), "device", torch.device("meta"))
    monkeypatch.setattr(type(trainer.model), "to", lambda model, device: devices.append(str(device)))
    monkeypatch.setattr(trainer.args, "main_process_first", lambda **_: contextlib.nullcontext())
    embedded = trainer.embed_rows(trainer.eval_dataset.queries, "query")
    assert devices == ["meta", "cpu"] and embedded.shape == (24, 32)


@pytest.fixture
def encoded(monkeypatch):
    """Lists the side and the number of rows of each call of `embed_rows`."""
    calls = []
    embed = SoftInfoNCETrainer.embed_rows

    def counting(trainer, rows, side):
        calls.append((side, len(rows)))
        return embed(trainer, rows, side)

    monkeypatch.setattr(SoftInfoNCETrainer, "embed_rows", counting)
    return calls


@pytest.mark.parametrize(
    ("corpora", "sizes"),
    [
        (lambda rows: rows, [24]),
        (lambda rows: {"a": rows, "b": rows}, [24]),
        (lambda rows: {"a": rows, "b": Dataset.from_list(rows.to_list())}, [24]),  # equal rows in another object
        (lambda rows: {"a": rows, "b": rows.select(range(20))}, [24, 20]),
        (lambda rows: {"a": rows, "b": rows.select(range(23, -1, -1))}, [24, 24]),
    ],
    ids=["one corpus", "a dict", "equal rows", "fewer rows", "another order"],
)
def test_sets_with_one_corpus_encode_it_once(trainer_of, dataset, encoded, corpora, sizes):
    sets = {"a": dataset.select(range(6)), "b": dataset.select(range(6, 20))}
    codebase = corpora(dataset)
    found = trainer_of(arguments={"eval_dataset": sets, "codebase": codebase}).evaluate()
    assert [size for side, size in encoded if side == "code"] == sizes
    assert [size for side, size in encoded if side == "query"] == [6, 14]
    for key, queries in sets.items():
        corpus = codebase[key] if isinstance(codebase, dict) else codebase
        alone = trainer_of(arguments={"eval_dataset": queries, "codebase": corpus}).evaluate()
        assert found[f"eval_{key}_mrr"] == alone["eval_mrr"]


def test_a_split_is_checked_once(trainer_of, dataset, monkeypatch):
    checked = []
    check = load.check_split

    def counting(split, *options, **named):
        checked.append(split)
        check(split, *options, **named)

    for module in (load, make_splits):
        monkeypatch.setattr(module, "check_split", counting)
    split = Split.from_pairs(dataset)
    trainer = trainer_of(arguments={"eval_dataset": {"a": split}, "codebase": None})
    assert len(checked) == 2  # with the rows for training
    trainer.evaluate()
    trainer.evaluate({"b": split})
    trainer.predict(split)
    assert len(checked) == 2
    trainer.predict(dataclasses.replace(split, corpus=dataset))
    assert len(checked) == 3, "a changed copy is checked"
