"""A step needs no float64 on a device without it, and never waits for a GPU around the loss.

A tensor on "meta" has no values, so everything that would wait for a value raises an error.
"""

import dataclasses

import pytest
import torch
from devices import AppleModule, on_apple, on_gpu, without_autocast
from test_criterion import EXTRA_POSITIVES, POSITIVES

from soft_trainer import BM25Estimator, EstimatorCallback
from soft_trainer.criterion import LOSSES, Criterion, PositiveRows
from soft_trainer.encoders.static_torch import static_model
from soft_trainer.estimators import frozen_encoder
from soft_trainer.evaluation.ranking import rank_codes
from soft_trainer.training import gradient_cache


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def targets_of(criterion: Criterion):
    """Makes targets with two positives for some queries, and their counts on the host."""
    targets = criterion.targets(POSITIVES, None, EXTRA_POSITIVES, random(*EXTRA_POSITIVES.shape, seed=1))
    known = EXTRA_POSITIVES.scatter(1, POSITIVES[:, None], True).sum(1).numpy()
    return dataclasses.replace(targets, positive_counts=known)


@pytest.mark.parametrize("loss", LOSSES)
def test_several_positives_are_expanded_equally_with_and_without_waiting(loss):
    criterion = Criterion(loss, alpha=0.5)
    targets = targets_of(criterion)
    scores = random(*EXTRA_POSITIVES.shape)
    for moved in (on_gpu, on_apple):
        elsewhere = criterion(moved(scores), targets.mapped(moved))
        torch.testing.assert_close(elsewhere.cpu(), criterion(scores, targets), atol=0, rtol=0)
        rows = [PositiveRows(each) for each in (targets, targets.mapped(moved))]
        assert rows[0].queries.tolist() == rows[1].queries.tolist()
    for part in (slice(None), slice(1, 3)):
        meta = targets.mapped(lambda tensor: tensor.to("meta"))[part]
        criterion(scores[part].to("meta"), meta)  # an error if the host waits


def test_a_whole_step_of_a_static_encoder_waits_for_nothing(trainer_of, tokenizer, profile, monkeypatch):
    model = static_model(tokenizer, 32)
    options = {"false_negatives": "positives", "alpha": 0.5}
    trainer = trainer_of(arguments={"model": model, "encoder": profile.replace(pooling="pooler")}, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    monkeypatch.setattr(type(trainer.args), "device", torch.device("meta"))
    without_autocast(monkeypatch)
    trainer.model.to("meta").train()
    inputs = trainer.weighed(batch)
    assert inputs.targets.weights.device.type == "meta"
    trainer.compute_loss(trainer.model, inputs).backward()


def test_statistics_of_weights_need_no_float64_on_the_device():
    criterion = Criterion(alpha=0.5)
    similarity, scores = random(6, 6), random(6, 6, seed=1)
    found = []
    for moved in (lambda tensor: tensor, on_apple):
        callback = EstimatorCallback(BM25Estimator())
        targets = criterion.targets(torch.arange(6), similarity=similarity)
        callback.observe(targets.mapped(moved), moved(scores), 0.1)
        found.append(callback.statistics())
    assert found[0] == found[1] and found[0]["weight_mean"] > 0


def test_ranks_are_computed_where_float64_exists():
    queries, codes, targets = random(5, 8), random(9, 8, seed=1), torch.arange(5)
    expected = rank_codes(queries, codes, targets)
    found = rank_codes(on_apple(queries), on_apple(codes), targets)
    assert torch.equal(found.ranks, expected.ranks) and torch.equal(found.top_indices, expected.top_indices)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_dropout_is_replayed_on_every_device(monkeypatch, device):
    module = AppleModule()
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)

    def draw():
        return torch.rand(3).tolist() + torch.rand(3, generator=module.generator).tolist() * (device == "mps")

    state = gradient_cache.RandomState(torch.device(device))
    first, second = draw(), draw()
    with state.again():
        assert draw() == first
    with state.again():
        assert draw() == first
    assert draw() not in (first, second)


@pytest.mark.parametrize(
    ("device", "supported", "expected"),
    [
        ("cpu", True, "bf16"),
        ("cpu", False, "float32"),
        ("cuda", True, "bf16"),
        ("cuda", False, "fp16"),
        ("mps", True, "bf16"),
    ],
)
def test_a_frozen_encoder_runs_in_the_precision_that_its_device_has(monkeypatch, device, supported, expected):
    def is_bf16_supported(including_emulation=True):
        return supported or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": supported}, raising=False)
    assert frozen_encoder.frozen_precision(torch.device(device)) == expected


def test_the_initial_model_is_placed_for_the_time_of_encoding(trainer_of, monkeypatch):
    # FSDP and DeepSpeed move the model when training begins. "meta" plays the role of the GPU.
    trainer = trainer_of(estimator=frozen_encoder.InitialModelEstimator(cache_dir=None))
    events = []
    monkeypatch.setattr(frozen_encoder.distributed, "device", lambda: torch.device("meta"))
    without_autocast(monkeypatch)
    monkeypatch.setattr(type(trainer.model), "to", lambda model, device: events.append(str(device)))

    def embed(encoder, tokens, *_):
        events.append("encoded")
        return torch.ones(len(tokens), 32)

    monkeypatch.setattr(frozen_encoder, "embed_sharded", embed)
    trainer.estimator.fit(trainer.train_split)
    assert events == ["meta", "encoded", "cpu"] * 2
