"""Options and arguments of `transformers.Trainer` work as in `Trainer`, also in combination."""

import copy
import dataclasses
import itertools
import json
import math
import signal

import numpy as np
import optuna
import pytest
import torch
from datasets import Dataset
from refusals import refused
from trainings import batches_of, check_weights, losses_of, still, warned
from transformers import EarlyStoppingCallback, TrainerCallback

from soft_trainer import BM25Estimator, EstimatorCallback
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.options.fields import STRATEGIES
from soft_trainer.run.preflight import check_own_collator

# ---- Batches ----


TEXT = [0, 1, 2, 3, 4, 5] * 2 + [6, 7, 8, 9, 10, 11] * 2  # which of 12 texts each of 24 rows has
LANGUAGE = ["go", "ruby", "ruby"] * 8


def apart(batches: list[list[int]]) -> bool:
    """Returns True if the ranges of the batches' values do not overlap."""
    ranges = sorted((min(batch), max(batch)) for batch in batches)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


# strategy -> what is true of its batches of eight, given the number of tokens in each row, and false of the others'
STRATEGY_SHOWS = {
    "sequential": lambda batches, lengths: sum(batches, []) == list(range(24)),
    "no_duplicates": lambda batches, lengths: all(len({TEXT[row] for row in batch}) == 8 for batch in batches),
    "group_by_length": lambda batches, lengths: apart([lengths[batch].tolist() for batch in batches]),
    "one_language": lambda batches, lengths: all(len({LANGUAGE[row] for row in batch}) == 1 for batch in batches),
    "similar": lambda batches, lengths: all(len({TEXT[row] for row in batch}) == 4 for batch in batches),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_its_batches(trainer_of, rows, strategy):
    twins = []
    for number, (text, language) in enumerate(zip(TEXT, LANGUAGE, strict=True)):
        twins.append(rows[text] | {"url": str(number), "language": language})
    options = {"group_size": 2} if strategy == "similar" else {}
    trainer = trainer_of(
        train_sampling_strategy=strategy, arguments={"train_dataset": Dataset.from_list(twins)}, **options
    )
    batches = []
    step = trainer.training_step

    def recorded(model, inputs, items=None):
        batches.append(inputs.rows.tolist())
        return step(model, inputs, items)

    trainer.training_step = recorded
    trainer.train()
    assert len(losses_of(trainer)) == 3 and all(map(math.isfinite, losses_of(trainer)))
    rows_used = sum(batches, [])
    assert [len(batch) for batch in batches] == [8, 8, 8] and len(set(rows_used)) == 24
    lengths = trainer._train_batches().lengths()
    shown = {name for name, shows in STRATEGY_SHOWS.items() if shows(batches, lengths)}
    assert shown == {strategy} - {"random"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("false_negatives", "name"),
    [("mask", "false_negatives_masked"), ("positives", "extra_positives"), ("ignore", None)],
)
def test_the_log_counts_false_negatives_by_what_happens_to_them(train, rows, false_negatives, name):
    twins = Dataset.from_list([row | {"url": f"{row['url']}-{copy}"} for row in rows[:4] for copy in (1, 2)])
    trainer = train(false_negatives=false_negatives, alpha=1.0, arguments={"train_dataset": twins})
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    counts = {
        key: [entry[key] for entry in logged if key in entry] for key in ("false_negatives_masked", "extra_positives")
    }
    assert counts == {key: [8, 16, 24] if key == name else [] for key in counts}  # each row has one twin


def test_the_default_metric_of_plain_arguments_is_named_with_what_to_set(trainer_of):
    options = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with refused('metric_for_best_model="loss": there is no eval_loss', 'set metric_for_best_model="mrr"'):
        trainer_of(plain=True, **options)
    trainer_of(**options)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [True, False])
def test_columns_of_a_pair_are_kept(train, columns):
    assert len(losses_of(train(plain=True, remove_unused_columns=columns))) == 3


def test_the_seed_of_the_data_decides_the_batches(trainer_of):
    def order(**options):
        return [batch.rows.tolist() for batch in batches_of(trainer_of(estimator=None, **options))]

    assert order(seed=1, data_seed=7) == order(seed=2, data_seed=7) != order(seed=1)


@pytest.mark.parametrize("plain", [True, False])
def test_a_batch_size_that_is_set_after_the_constructor_is_used(trainer_of, plain):
    trainer = trainer_of(plain=plain, max_steps=1)
    trainer.args.per_device_train_batch_size = 6
    trainer.train()
    assert {len(batch.rows) for batch in batches_of(trainer)} == {6}
    assert trainer.plan.global_batch_size == 6 and trainer.state.train_batch_size == 6


@pytest.mark.parametrize("plain", [True, False])
def test_numbers_of_numpy_are_saved_with_a_checkpoint(trainer_of, plain, tmp_path):
    numbers = {"per_device_train_batch_size": 8, "max_steps": 1, "save_steps": 1, "logging_steps": 1, "seed": 3}
    numbers = {name: np.int64(value) for name, value in numbers.items()}
    trainer = trainer_of(plain=plain, save_strategy="steps", learning_rate=np.float32(0.5), **numbers)
    trainer.train()
    state = json.loads((tmp_path / "out/checkpoint-1/trainer_state.json").read_text())
    assert (state["train_batch_size"], state["save_steps"], trainer.args.learning_rate) == (8, 1, 0.5)


@pytest.mark.slow
def test_persistent_data_workers_change_no_weight(trainer_of, model, tmp_path):
    options = {
        "num_train_epochs": 3,
        "max_steps": -1,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 9,
    }
    options |= {"dataloader_num_workers": 1, "learning_rate": 1e-2}
    start = copy.deepcopy(model)
    weights = []
    for persistent, checkpoint in ((False, None), (True, None), (True, 2), (True, 6)):  # an epoch has three steps
        arguments = {"model": copy.deepcopy(start)}
        trainer = trainer_of(**options, dataloader_persistent_workers=persistent, arguments=arguments)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / "out" / f"checkpoint-{checkpoint}"))
        weights.append(trainer.model.state_dict())
    for each in weights[1:]:
        check_weights(each, weights[0])


@pytest.mark.slow
def test_a_batch_that_does_not_fit_in_memory_is_made_smaller(trainer_of, monkeypatch):
    trainer = trainer_of(per_device_train_batch_size=12, auto_find_batch_size=True)
    step, sizes = trainer.training_step, []

    def short_of_memory(model, inputs, num_items_in_batch=None):
        sizes.append(len(inputs.rows))
        if len(inputs.rows) > 10:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return step(model, inputs, num_items_in_batch)

    monkeypatch.setattr(trainer, "training_step", short_of_memory)
    before = signal.getsignal(signal.SIGTERM)
    trainer.train()
    assert sizes == [12, 10, 10, 10] and trainer.plan.global_batch_size == 10
    assert trainer.state.global_step == 3 and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_batch_that_became_too_small_for_the_weights_is_refused(trainer_of, monkeypatch):
    trainer = trainer_of(per_device_train_batch_size=6, auto_find_batch_size=True)

    def out_of_memory(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(trainer, "training_step", out_of_memory)
    with pytest.raises(UserError, match="the smallest N that works is 5"):
        trainer.train()


# ---- Loss and weights ----


@pytest.mark.parametrize("options", [{"logging_strategy": "epoch"}, {"logging_first_step": True, "logging_steps": 50}])
def test_weights_are_logged_whenever_a_loss_is(train, options):
    logged = [entry for entry in train(**options).state.log_history if "loss" in entry]
    assert logged and all("weight_min" in entry for entry in logged)


# ---- Model and options ----


@pytest.mark.slow
def test_a_model_is_made_anew_for_every_training(trainer_of, model):
    made = []

    def model_init():
        made.append(copy.deepcopy(model))
        return made[-1]

    trainer = trainer_of(arguments={"model": None, "model_init": model_init}, learning_rate=1e-2)
    weights = []
    for _ in range(2):
        trainer.train()
        assert trainer.model is made[-1]
        weights.append(trainer.model.state_dict())
    assert len(made) == 3
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.slow
def test_a_search_of_hyperparameters_trains_each_trial_with_its_own_values(trainer_of, model, tmp_path):
    taken = []

    class Recorder(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            rows, sampler = len(next(iter(train_dataloader)).rows), train_dataloader.batch_sampler
            negatives = train_dataloader.dataset.hard_negatives.number
            taken.append((sampler.similar["group_size"], rows, negatives, trainer.plan.criterion.alpha))

    arguments = {"model": None, "model_init": lambda trial: copy.deepcopy(model)}
    arguments |= {"callbacks": [EstimatorCallback(BM25Estimator()), Recorder()]}
    options = {"train_sampling_strategy": "similar", "negatives_per_query": 1, "save_strategy": "steps"}
    trainer = trainer_of(arguments=arguments, max_steps=1, save_steps=1, **options)

    def space(trial) -> dict:
        size = trial.suggest_int("group_size", 2, 6, step=2)
        values = {"per_device_train_batch_size": 2 * size, "negatives_per_query": size // 2, "alpha": 0.1 * size}
        return {"group_size": size, **values}

    sampler = optuna.samplers.GridSampler({"group_size": [2, 4, 6]}, seed=0)
    best = trainer.hyperparameter_search(space, n_trials=3, sampler=sampler)
    assert sorted(taken) == [(size, 2 * size, size // 2, pytest.approx(0.1 * size)) for size in (2, 4, 6)]
    assert 0 < best.objective <= 1 and best.hyperparameters["group_size"] in (2, 4, 6)
    assert len(list((tmp_path / "out").glob("run-*/checkpoint-1/model.safetensors"))) == 3


@pytest.mark.slow
def test_each_trial_weighs_by_its_own_initial_model(trainer_of, model):
    made = []

    def model_init(trial):
        made.append(copy.deepcopy(model))
        return made[-1]

    trainer = trainer_of(estimator=InitialModelEstimator(), arguments={"model": None, "model_init": model_init})
    encoders, bind = [], trainer.estimator.bind
    trainer.estimator.bind = lambda encoder: (encoders.append(encoder.model), bind(encoder))
    trainer.hyperparameter_search(lambda trial: {"alpha": trial.suggest_float("alpha", 0, 1)}, n_trials=2)
    assert [encoder is own for encoder, own in zip(encoders, made[1:], strict=True)] == [True, True]


def test_options_may_change_after_the_constructor(trainer_of):
    trainer = trainer_of(max_steps=1, logging_steps=1)
    trainer.args.alpha, trainer.args.gather_negatives = 0.0, False
    trainer.train()
    assert {entry["weight_min"] for entry in trainer.state.log_history if "loss" in entry} == {1.0}


@pytest.mark.parametrize(
    ("name", "value"), [("alpha", -1.0), ("learning_rate", math.nan), ("label_smoothing_factor", 0.1)]
)
def test_an_option_that_becomes_wrong_after_the_constructor_is_refused(trainer_of, name, value):
    trainer = trainer_of()
    setattr(trainer.args, name, value)
    with pytest.raises(UserError, match=name):
        trainer.train()


def test_a_collator_that_is_set_after_the_constructor_is_used_again(trainer_of, tokenizer):
    # The trainer makes the collator from the current options.
    trainer = trainer_of()
    trainer.args.gradient_cache_chunk_size = 3
    batch = batches_of(trainer)[0]
    assert max(len(inputs["borders"]) - 1 for inputs in batch.passes) == 3


STORED = "warning: the trained weights are stored in {}, so small updates are lost"
# what is unusual -> arguments of `trainer_of`, the model's number format, changes of the profile, the only warning
WARNINGS = {
    "nothing": ({}, torch.float32, {}, None),
    "plain arguments": ({"plain": True}, torch.float32, {}, None),
    "a model in bfloat16": ({"estimator": None}, torch.bfloat16, {}, STORED.format("bfloat16")),
    "a model in float16": ({"estimator": None}, torch.float16, {}, STORED.format("float16")),
    "cosines without a scale": (
        {},
        torch.float32,
        {"score_scale": 1.0},
        "warning: unscaled cosines differ too little",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_is_unusual_is_named(trainer_of, model, profile, name):
    options, dtype, changes, expected = WARNINGS[name]
    arguments = {"model": model.to(dtype), "encoder": profile.replace(**changes)}
    trainer = trainer_of(arguments=arguments, **options)
    assert trainer.precision == str(dtype).removeprefix("torch.")
    found = warned(trainer)
    if expected is None:
        assert found == []
    else:
        [line] = found
        assert line.startswith(expected)


@pytest.mark.slow
def test_activation_checkpointing_changes_no_gradient(train, model):
    weights = [
        train(max_steps=1, learning_rate=1e-3, arguments={"model": still(model)}, **options).model.state_dict()
        for options in ({}, {"activation_checkpointing": True}, {"gradient_checkpointing": True})
    ]
    for other in weights[1:]:
        check_weights(other, weights[0], atol=1e-6)


BF16 = {"bf16": True}
CACHED = {"gradient_cache_chunk_size": 8}
PADDED = {"packing": "false"}
NOISE = {"neftune_noise_alpha": 5.0}
COMPILED = PADDED | {"torch_compile": True, "torch_compile_backend": "eager"}
# name -> options of two trainings, a tolerance within which their losses are equal, and one within which they are not
NEAR = {
    "bfloat16": ({}, BF16, {"rel": 0.1}, {"abs": 0.0}),
    "bfloat16 with gradient caching": ({}, BF16 | CACHED, {"rel": 0.1}, {"abs": 0.0}),
    "a compiled model": (PADDED, COMPILED, {"abs": 1e-3}, None),
    "noise on embeddings": (PADDED, PADDED | NOISE, {"abs": math.inf}, {"abs": 1e-4}),
    "the same noise in both passes of gradient caching": (
        PADDED | NOISE,
        PADDED | NOISE | CACHED,
        {"abs": 1e-4},
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR)
def test_losses_are_near(train, _model, name):
    *both, near, far = NEAR[name]
    # A copy each time: accelerate prepares a model once.
    losses = [losses_of(train(arguments={"model": copy.deepcopy(_model)}, **options)) for options in both]
    assert losses[1] == pytest.approx(losses[0], **near)
    if far is not None:
        assert losses[1] != pytest.approx(losses[0], **far)


def test_an_optimizer_of_ones_own(train):
    trainer = train(
        arguments={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.5})}, max_steps=1
    )
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.slow
def test_training_resumes_from_no_weights_alone(trainer_of, capsys):
    trainer_of(save_strategy="steps", save_steps=2, save_only_model=True).train()
    assert "checkpoint-2: saved without the optimizer (save_only_model)" in capsys.readouterr().err
    trainer = trainer_of(save_strategy="steps", save_steps=2)
    with pytest.raises(UserError, match="not a complete checkpoint with the optimizer's state"):
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")


@pytest.mark.slow
def test_early_stopping_resumes_where_it_was(trainer_of, tmp_path):
    """Stops a run within an epoch, and resumes it before the stop and where it stopped."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 8}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "mrr", "save_total_limit": 9}
    ended = []
    for checkpoint in (None, "checkpoint-3", "checkpoint-4"):
        # With a learning rate of 0, the first evaluation stays best, and three more evaluations stop the run.
        callbacks = [EstimatorCallback(BM25Estimator()), EarlyStoppingCallback(3)]
        trainer = trainer_of(learning_rate=0.0, arguments={"callbacks": callbacks}, **options)
        output = trainer.train(checkpoint and str(tmp_path / "out" / checkpoint))
        trainer.save_state()
        state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
        final = state.pop("log_history")[-1]
        ended.append((output.training_loss, final["train_loss"], final["step"], state, trainer.state.best_global_step))
        assert trainer.state.global_step == 4
    assert ended[0] == ended[1] == ended[2]


# ---- Users' estimators ----


def test_a_split_of_several_codes_and_queries_trains(trainer_of, dataset):
    queries = dataset.remove_columns(["code", "code_tokens", "original_string"]).select(range(12))
    corpus = dataset.remove_columns(["docstring", "docstring_tokens"])
    pairs = np.array([*((row, row) for row in range(12)), (0, 12), (1, 0), (2, 13)])
    split = Split.from_grades(queries, corpus, pairs, np.ones(len(pairs)))
    trainer = trainer_of(
        arguments={"train_dataset": split}, per_device_train_batch_size=15, false_negatives="positives", max_steps=1
    )
    assert trainer.train_split is split and len(trainer.train_dataset) == 15
    trainer.train()
    assert trainer.state.global_step > 0


def test_an_own_collator_is_refused_with_several_processes(trainer_of):
    trainer = trainer_of()
    plan = dataclasses.replace(trainer.plan, processes=2)
    with refused("data_collator: a custom collator works in one process, not in 2"):
        check_own_collator(plan, {}, trainer.model)


def test_an_own_collator_makes_the_inputs_of_both_sides(trainer_of):
    def collate(features: list[dict]) -> dict:
        sides = {}
        for side in ("query", "code"):
            ids = [torch.tensor(feature[f"{side}_ids"]) for feature in features]
            ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=1)
            sides[side] = {"input_ids": ids, "attention_mask": (ids != 1).long()}
        return sides

    losses = []
    for arguments in ({}, {"data_collator": collate}):
        trainer = trainer_of(arguments=arguments, estimator=None)
        trainer.model.eval()
        with trainer.running():
            losses.append(trainer.compute_loss(trainer.model, batches_of(trainer)[0]).item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
