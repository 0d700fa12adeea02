"""Options and an estimator are resolved into a training plan, or refused in one line with the reason."""

import dataclasses

import pytest
import torch
from refusals import refused

from soft_trainer import BM25Estimator
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.options.fields import SoftInfoNCEOptions
from soft_trainer.options.resolve import resolve, resolve_loss
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.system import distributed


def args_of(tmp_path, **options) -> SoftInfoNCETrainingArguments:
    return SoftInfoNCETrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)


@pytest.mark.parametrize(
    ("device", "cores", "options", "workers"),
    [
        ("cpu", 16, {}, 0),
        ("cuda", 1, {}, 1),
        ("cuda", 4, {}, 3),
        ("cuda", 64, {}, 8),
        ("cuda", 64, {"dataloader_num_workers": 2}, 2),
        ("cuda", 64, {"dataloader_num_workers": 0}, 0),
    ],
)
def test_data_workers_come_from_the_cores_of_a_process(tmp_path, monkeypatch, device, cores, options, workers):
    monkeypatch.setattr(SoftInfoNCETrainingArguments, "device", torch.device(device))
    monkeypatch.setattr(distributed, "cores", lambda: cores)
    args = args_of(tmp_path, **options)
    assert args.dataloader_num_workers == workers
    assert args.ddp_timeout == 3 * 3600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "infonce"}, "kl_regularization, or module:name; did you mean 'info_nce'?"),
        ({"alpha": "2"}, "alpha='2': expected a number, not text"),
        ({"temperature": 0}, "temperature=0: must be above 0"),
        ({"weighting": "positive_aware", "loss": "bce"}, "loss=bce uses no weights; set loss=soft_info_nce"),
    ],
)
def test_a_loss_that_cannot_be_made(options, message):
    with pytest.raises(UserError) as error:
        resolve_loss(SoftInfoNCEOptions(**options), BM25Estimator())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "estimator", "expected"),
    [
        ({}, None, {"loss": "info_nce"}),
        ({}, BM25Estimator(), {"loss": "soft_info_nce", "alpha": 1.5, "beta": 0.5, "temperature": 1.0}),
        ({"alpha": 0.5}, BM25Estimator(), {"alpha": 0.5, "beta": 0.5}),
        ({}, object(), {"alpha": 1.0, "beta": 1.0, "temperature": 1.0, "margin": 0.0}),
        ({"weighting": "positive_aware"}, Estimator(), {"margin": 0.0, "temperature": 1.0}),
        ({"weighting": "positive_aware", "temperature": 0.0}, Estimator(), {"temperature": 0.0}),
    ],
)
def test_what_is_left_open_is_the_estimators(options, estimator, expected):
    loss = dataclasses.asdict(resolve_loss(SoftInfoNCEOptions(**options), estimator))
    assert {name: loss[name] for name in expected} == expected


def test_a_plan_is_a_snapshot_of_the_options(tmp_path):
    options = {"matryoshka_dims": "8,32", "group_size": 4, "train_sampling_strategy": "similar"}
    args = args_of(tmp_path, per_device_train_batch_size=32, **options)
    plan = resolve(args, InitialModelEstimator())
    assert (plan.dims, plan.train_sampling_strategy) == ((32, 8), "similar")
    assert (plan.global_batch_size, plan.gathers) == (32, False)
    args.group_size = 2
    assert plan.options.group_size == 4 and plan != resolve(args, InitialModelEstimator())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.train_sampling_strategy = "random"


def test_settings_without_an_effect_are_not_named(tmp_path):
    args = args_of(tmp_path, kl_weight=2.0, cancel="top_k", group_size=4, negatives_per_query=2)
    plan = resolve(args, BM25Estimator())
    expected = {"loss": "soft_info_nce", "alpha": 1.5, "beta": 0.5, "temperature": 1.0, "floor": 0.1}
    assert plan.criterion.effective == expected | {"cancel": "top_k", "cancel_k": 3}
    assert plan.effective_batches == {"negatives_per_query": 2, "negative_ratio": 0.95}


def test_a_loss_without_negatives_promises_no_masks(tmp_path):
    """A loss without the parameter `negatives` can neither cancel nor mask, and the plan reports this."""
    with refused("cancel=top_k: loss=own_losses:info_nce has no argument `negatives`"):
        resolve(args_of(tmp_path, loss="own_losses:info_nce", cancel="top_k"), BM25Estimator())
    plan = resolve(args_of(tmp_path, loss="own_losses:info_nce"))
    assert plan.effective_batches["false_negatives"] == "not masked (`info_nce` takes no negatives)"
    assert not plan.masks_false_negatives and resolve(args_of(tmp_path)).masks_false_negatives


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save_steps": 20}, "save_steps=20: has no effect with save_strategy=epoch"),
        ({"eval_steps": 20}, "eval_steps=20: has no effect with eval_strategy=no"),
    ],
)
def test_what_would_be_ignored_or_fail_late_is_refused(tmp_path, options, words):
    with refused(words):
        resolve(args_of(tmp_path, **options))
