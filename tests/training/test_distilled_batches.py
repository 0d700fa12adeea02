"""Distillation over all pairs of sides, in the trainer."""

import copy

import pytest
import torch
from datasets import Dataset
from refusals import refused
from torch.nn.functional import normalize
from trainings import batches_of, bm25, check_weights, gradients, initial

from soft_trainer.data.tokens import SIDES

ALL = {"distill_weight": 0.7, "distill_pairs": "all"}


@pytest.mark.parametrize("in_workers", [True, False])
def test_the_trainer_compares_the_pairs_of_a_batch(make_trainer, rows, exact_model, in_workers):
    estimator = initial()
    estimator.in_workers = in_workers
    twins = Dataset.from_list([*rows[:9], *(row | {"url": f"{row['url']}-twin"} for row in rows[:3])])
    trainer = make_trainer(estimator, twins, exact_model, per_device_train_batch_size=12, **ALL)
    [batch] = batches_of(trainer)
    assert (batch.loss_inputs is not None) == in_workers
    assert batch.pairs.targets.sum() == 12 * 11 - 6 and not batch.pairs.targets.diagonal().any()
    torch.testing.assert_close(batch.pairs.targets, batch.pairs.targets.T)
    # A teacher that differs from the encoder: the embeddings of its queries and codes change places.
    estimator._queries, estimator._codes = estimator._codes, estimator._queries
    [batch] = batches_of(trainer)
    with torch.no_grad():
        queries, codes = (trainer.embeddings(trainer.model, getattr(batch, side)) for side in SIDES)
        value = trainer.batch_loss(queries, codes, batch).item()
        unit_queries, unit_codes = normalize(queries), normalize(codes)
        comparisons = batch.pairs.compare(
            lambda q, c: 20 * q @ c.T, unit_queries, unit_codes, batch.pairs.similarity(estimator).double()
        )
        similarity = estimator.similarity(batch.query_rows, batch.code_rows).double()
        given = 20 * unit_queries @ unit_codes.T, batch.positives, similarity, batch.negatives
        expected = trainer.objective(*given, comparisons=comparisons).item()
    assert value == pytest.approx(expected, abs=1e-5)
    query_code = make_trainer(estimator, twins, exact_model, per_device_train_batch_size=12, distill_weight=0.7)
    assert abs(query_code.objective(*given).item() - expected) > 1e-3


@pytest.mark.parametrize("options", [{}, {"duplicates": "positives"}, {"negatives_per_query": 1, "negative_ratio": 9}])
def test_gradient_caching_changes_nothing(make_trainer, rows, exact_model, options):
    results = []
    for chunk in (None, 3):
        cached = {"per_device_train_batch_size": 12, "gradient_cache_chunk_size": chunk}
        twins = Dataset.from_list([*rows[:9], *(row | {"url": f"{row['url']}-twin"} for row in rows[:3])])
        trainer = make_trainer(initial(), twins, exact_model, **cached, **options, **ALL, distill_temperature=3.0)
        [batch] = batches_of(trainer)
        results.append(gradients(trainer, batch))
    (plain, expected), (cached, found) = results
    assert cached == pytest.approx(plain, abs=1e-10)
    check_weights(found, expected, atol=1e-10)


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(trainer_of, model, tmp_path):
    options = ALL | {"max_steps": 8, "save_strategy": "steps", "save_steps": 5, "num_train_epochs": 3}
    trainers = []
    for _ in range(2):
        arguments = {"model": copy.deepcopy(model), "callbacks": [initial()]}
        trainers.append(trainer_of(arguments=arguments, distill_temperature=3.0, **options))
    whole, resumed = trainers
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    check_weights(resumed.model.state_dict(), whole.model.state_dict())


def test_an_estimator_without_the_other_similarities_is_refused(make_trainer):
    with refused("distill_pairs=all: BM25Estimator does not compare queries with queries"):
        make_trainer(bm25(), **ALL)
