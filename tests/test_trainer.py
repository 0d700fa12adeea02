"""The trainer: loss, steps, evaluation, and stopping."""

import copy
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize
from trainings import SameLength, losses_of
from transformers import TrainerCallback

from soft_trainer.errors import NotFiniteError, UserError
from soft_trainer.run.folder import check_named, mark_complete, newest_complete


def after_two_steps(event: str, action) -> TrainerCallback:
    """Returns a callback that calls `action(model)` in `event` when two steps are done."""

    def call(args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            action(model)

    callback = TrainerCallback()
    setattr(callback, event, call)
    return callback


@pytest.mark.slow
def test_every_parameter_moves_and_the_loss_falls(train, model):
    before = copy.deepcopy(model.state_dict())
    trainer = train(max_steps=30, learning_rate=5e-3)
    assert [n for n, p in trainer.model.named_parameters() if torch.equal(p, before[n])] == []
    logged = losses_of(trainer)
    assert sum(logged[-5:]) < 0.7 * sum(logged[:5])


@pytest.mark.slow
def test_the_log_tells_of_the_weights(train):
    trainer = train(per_device_train_batch_size=24, max_steps=1)
    entry = trainer.state.log_history[0]
    rows = torch.arange(24)
    weights = trainer.criterion.targets(rows, similarity=trainer.estimator.similarity(rows, rows).float()).weights
    negatives = weights[~torch.eye(24, dtype=torch.bool)]
    assert entry["weight_mean"] == pytest.approx(float(negatives.mean()), abs=1e-5)
    assert entry["weight_min"] == pytest.approx(float(negatives.min()), abs=1e-5)
    assert entry["weight_at_floor"] == pytest.approx(float((negatives <= 0.1).float().mean()), abs=1e-6)


@pytest.mark.slow
def test_accumulating_two_batches_is_not_one_batch_of_twice_the_size(trainer_of):
    # Negatives come from one batch: accumulation averages two losses with 7 negatives, not one loss with 15.
    logged = []
    for size, accumulated in ((8, 2), (16, 1)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        trainer = trainer_of(estimator=None, max_steps=1, seed=1, **options)
        trainer.model.eval()
        trainer.train()
        logged.append(trainer.state.log_history[0]["loss"])
    assert logged[0] == pytest.approx(torch.log(torch.tensor(8.0)).item(), rel=0.25)
    assert logged[1] > logged[0] + 0.3


def test_evaluation_equals_brute_force(trainer_of, model):
    trainer = trainer_of()
    output = trainer.predict(trainer.eval_dataset)
    batch = trainer._train_batches().__getitems__(list(range(24)))
    model.eval()
    with torch.no_grad(), trainer.running():
        q, c = (normalize(each.double()) for each in trainer.embeddings(model, batch))
    scores = q @ c.T
    expected = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    assert output.ranking.ranks.tolist() == expected.tolist()
    assert output.metrics["test_mrr"] == pytest.approx((1 / expected).mean().item(), abs=1e-6)
    assert output.metrics["test_pool_size"] == 24
    assert trainer.evaluate()["eval_mrr"] == pytest.approx(output.metrics["test_mrr"], abs=1e-9)


@pytest.mark.slow
def test_a_short_last_batch_trains_with_weights_of_one(train):
    # 24 rows in batches of 22 leave 2 rows: one negative per query, too few for alpha 1.5 and beta 0.5.
    trainer = train(per_device_train_batch_size=22, dataloader_drop_last=False, max_steps=2)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2 and entries[1]["weight_mean"] == 1.0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("similarity", "words"),
    [
        (lambda queries, codes: torch.zeros(len(queries)), r"returned shape \(8,\) for 8 queries and 8 functions"),
        (lambda queries, codes: [[0.0] * len(codes)] * len(queries), "returned list for 8 queries and 8 functions"),
        (
            lambda queries, codes: torch.where(codes[None, :] == 5, torch.nan, torch.zeros(len(queries), len(codes))),
            r"returned NaN for the rows \d+ \(query\) and 5 \(code\)",
        ),
    ],
)
def test_a_similarity_of_a_wrong_shape_or_nan_is_named_with_its_rows(train, similarity, words):
    estimator = SameLength()
    estimator.similarity = similarity
    with pytest.raises(UserError, match=f"SameLength.similarity {words}"):
        train(estimator=estimator)


def test_a_loss_that_is_not_finite_stops_the_run(trainer_of):
    def break_weights(model):
        model.embeddings.word_embeddings.weight.data.fill_(torch.nan)

    trainer = trainer_of(max_steps=6, save_strategy="steps", save_steps=1)
    trainer.add_callback(after_two_steps("on_step_end", break_weights))
    with pytest.raises(NotFiniteError, match="weights: nan by step 2, so training stops"):
        trainer.train()
    assert newest_complete(trainer.args.output_dir).endswith("checkpoint-1")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("steps", [{"eval_steps": 1, "save_steps": 1}, {}])
def test_a_last_step_that_breaks_the_weights_leaves_the_best_checkpoint(trainer_of, capsys, steps):
    options = dict.fromkeys(("eval_strategy", "save_strategy"), "steps" if steps else "epoch") | steps
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "mrr", "max_steps": -1, "num_train_epochs": 2}
    trainer = trainer_of(per_device_train_batch_size=24, **options)
    trainer.model.embeddings.word_embeddings.weight.register_hook(
        lambda gradient: gradient * (torch.inf if trainer.state.global_step == 1 else 1)
    )
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.state.best_global_step == 1
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.parameters())
    assert "step 2 made a weight NaN or infinite, so the result is" in capsys.readouterr().err


@pytest.mark.parametrize(("scale", "said"), [(65536.0, False), (0.5, True)])
def test_gradients_that_always_overflow_in_fp16_are_said(trainer_of, caplog, scale, said):
    trainer = trainer_of()
    trainer.accelerator.state._mixed_precision = "fp16"
    trainer.accelerator.scaler = SimpleNamespace(get_scale=lambda: scale)
    trainer.log({"loss": 1.0, "grad_norm": math.inf})
    assert ("fp16: the gradients overflow" in caplog.text) == said


@pytest.mark.parametrize("frequency", [1, 6])
def test_a_gradient_that_is_not_finite_leaves_no_checkpoint(trainer_of, frequency):
    trainer = trainer_of(max_steps=6, save_strategy="steps", save_steps=1, logging_steps=frequency)

    def overflow(gradient):
        return gradient * (torch.inf if trainer.state.global_step == 2 else 1)

    trainer.model.embeddings.word_embeddings.weight.register_hook(overflow)
    with pytest.raises(NotFiniteError, match="by step 3, so training stops"):
        trainer.train()
    assert newest_complete(trainer.args.output_dir).endswith("checkpoint-2")


def test_a_training_without_checkpoints_returns_no_weights_that_are_not_finite(trainer_of):
    trainer = trainer_of(max_steps=2, save_strategy="no", logging_strategy="no", max_grad_norm=0.0)
    trainer.model.embeddings.word_embeddings.weight.register_hook(
        lambda gradient: gradient * (torch.inf if trainer.state.global_step == 1 else 1)
    )
    with pytest.raises(NotFiniteError, match="weights: nan by step 2"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {},
            "8 queries and 8 functions on cpu: set gradient_cache_chunk_size=32, .* smaller per_device_train_batch_",
        ),
        ({"gradient_cache_chunk_size": 4}, ".*: set gradient_cache_chunk_size=2, which does not change the batch, or"),
    ],
)
def test_a_step_that_runs_out_of_memory_advises_what_to_set(trainer_of, monkeypatch, options, words):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer = trainer_of(**options)
    monkeypatch.setattr("soft_trainer.trainer.encode", fail)
    with pytest.raises(UserError, match=f"out of memory in a step of {words}") as error:
        trainer.train()
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_arguments_may_say_what_to_resume_from(trainer_of, capsys):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_of(**options).train()
    resumed = trainer_of(**options | {"max_steps": 3, "resume_from_checkpoint": "last"})
    resumed.train()
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [1, 2, 3]
    assert "Resuming from" in capsys.readouterr().err


def test_the_newest_checkpoint_is_not_that_of_an_earlier_run_even_in_a_copy(tmp_path):
    for name, copied in (("checkpoint-90", 1010), ("checkpoint-100", 2000), ("checkpoint-20", 1000)):
        (tmp_path / name).mkdir()
        mark_complete(tmp_path / name, {})
        os.utime(tmp_path / name, (copied, copied))
    assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-20")
    (tmp_path / "checkpoint-20" / "complete.json").write_text("{}")  # like an earlier version's marker
    assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-100")


@pytest.mark.parametrize("name", ["model", "model-00002-of-00002", "adapter_model"])
@pytest.mark.parametrize("kept", [0, 20, -1])
def test_a_checkpoint_that_lost_the_end_of_its_weights_is_not_complete(tmp_path, name, kept):
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"a": torch.zeros(9)}, tmp_path / f"checkpoint-{step}" / f"{name}.safetensors")
        mark_complete(tmp_path / f"checkpoint-{step}", {})
    assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-2")
    path = tmp_path / "checkpoint-2" / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-1")
    with pytest.raises(UserError, match="not a complete checkpoint"):
        check_named(str(path.parent))


def test_a_query_without_its_code_is_named(trainer_of, dataset):
    with pytest.raises(UserError, match="module_20.py"):
        trainer_of().predict(dataset.select([20]), dataset.select(range(10)))


def test_rows_may_be_lists_of_dicts_everywhere(trainer_of, dataset):
    rows = dataset.to_list()
    trainer = trainer_of(arguments={"train_dataset": rows})
    whole = trainer.evaluate()
    assert trainer.evaluate(rows, codebase=rows)["eval_mrr"] == whole["eval_mrr"]
    assert trainer.predict(rows, rows).metrics["test_mrr"] == whole["eval_mrr"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda trainer, rows: trainer.evaluate(codebase=rows), "eval: no queries; pass eval_dataset="),
        (lambda trainer, rows: trainer.predict(rows.select([])), "test: no rows"),
        (
            lambda trainer, rows: trainer.predict(rows.remove_columns("url")),
            "test, .*no function in the corpus has the url",
        ),
        (
            lambda trainer, rows: trainer.predict(
                rows.select_columns("url").add_column("docstring", [*range(len(rows))])
            ),
            "row 1: column 'docstring' contains 0; expected text",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_said(trainer_of, dataset, call, message):
    trainer = trainer_of(arguments={"eval_dataset": None})
    with pytest.raises(UserError, match=message):
        call(trainer, dataset)
