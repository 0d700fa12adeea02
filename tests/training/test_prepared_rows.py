"""Training with batches of similar rows, with several relevant codes, and with other losses."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from trainings import OWN, batches_of, bm25, check_weights, fitted, initial
from transformers import TrainerCallback

from soft_trainer import BM25Estimator
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import SimCSEEstimator

SIMILAR = {"train_sampling_strategy": "similar", "group_size": 4}
AWARE = {"weighting": "positive_aware"}


@pytest.fixture(scope="module")
def topics(rows):
    """48 rows: six rows on each of eight topics. The queries of a topic share a word."""
    return Dataset.from_list(
        [
            rows[0]
            | {
                "url": f"https://example.org/{topic}/{number}",
                "docstring": f"topic{topic} about {number} {topic * 6 + number}",
                "docstring_tokens": [f"topic{topic}", f"about{number}", str(topic * 6 + number)],
                "code": f"def f{topic}_{number}(): return {topic}",
                "code_tokens": ["def", f"f{topic}_{number}", "return", str(topic)],
            }
            for topic in range(8)
            for number in range(6)
        ]
    )


# ---- Clustered batches ----


def test_clustered_batches_hold_whole_topics_and_every_row_once_an_epoch(make_trainer, topics):
    options = {"train_sampling_strategy": "similar", "group_size": 6, "per_device_train_batch_size": 12}

    def trainer():
        return fitted(make_trainer(BM25Estimator(), topics, **options))

    first = trainer()
    epochs = [[batch.rows for batch in batches_of(first, epoch)] for epoch in range(2)]
    for batches in epochs:
        assert sorted(np.concatenate(batches)) == list(range(48))
        assert [len(set(rows // 6)) for rows in batches] == [2, 2, 2, 2]
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(epochs[1], [batch.rows for batch in batches_of(trainer(), 1)])


# ---- The step ----


def test_distilling_from_the_initial_model_adds_nothing_before_the_first_step(make_trainer, exact_model):
    values = []
    for options in ({}, {"distill_weight": 1.0}, {"distill_weight": 1.0, "distill_temperature": 2.0}):
        trainer = make_trainer(initial(), model=exact_model, **AWARE, **options, **SIMILAR)
        batch = batches_of(trainer)[0]
        with torch.no_grad(), trainer.running():
            values.append(trainer.compute_loss(trainer.model, batch).item())
    assert values[1] == pytest.approx(values[0], abs=1e-6)
    assert values[2] > values[0] + 1e-3


# ---- Resume ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [OWN, SIMILAR, OWN | SIMILAR | {"dataloader_num_workers": 1}],
    ids=["own", "similar", "both-workers"],
)
def test_resumed_in_the_second_epoch_to_the_bit(make_trainer, options, tmp_path):
    options = options | {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4, "save_total_limit": None}
    options |= AWARE | {"learning_rate": 5e-3}
    checkpoint = str(tmp_path / "out" / "checkpoint-4")
    whole, resumed = (make_trainer(initial(), **options) for _ in range(2))
    whole.train()
    assert whole.state.global_step == 9
    resumed.train(resume_from_checkpoint=checkpoint)
    check_weights(resumed.model.state_dict(), whole.model.state_dict())
    for name in ("_queries", "_codes"):
        assert np.array_equal(getattr(whole.estimator, name), getattr(resumed.estimator, name))
    trained = whole.estimator.similarity(range(24), range(24))
    whole.estimator.fit(whole.train_split)
    assert not torch.allclose(trained, whole.estimator.similarity(range(24), range(24)), atol=0.1)
    with pytest.raises(UserError, match="resume with a new trainer"):
        whole.train(resume_from_checkpoint=checkpoint)


class PreparesAgain(TrainerCallback):
    """A callback that, after the last step, asks the trainer for its batches again, as `auto_find_batch_size` does."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.scores = []

    def on_train_end(self, args, state, control, **kwargs):
        self.scores.append(self.trainer.estimator.similarity(range(24), range(24)))
        self.trainer.get_train_dataloader()
        self.scores.append(self.trainer.estimator.similarity(range(24), range(24)))


@pytest.mark.slow
def test_the_initial_model_is_read_once_a_training_also_if_it_starts_again(make_trainer):
    trainer = make_trainer(initial(), num_train_epochs=1, learning_rate=0.1)
    again = PreparesAgain(trainer)
    trainer.add_callback(again)
    trainer.train()
    scores, after = again.scores
    assert torch.equal(after, scores)
    trainer.train()
    assert not torch.allclose(trainer.estimator.similarity(range(24), range(24)), scores, atol=0.1)


# ---- User errors in Python; tests/test_bad_inputs.py covers the command line ----


@pytest.mark.parametrize(
    "estimator, options, says",
    [
        (lambda: SimCSEEstimator("x"), AWARE, "SimCSEEstimator does not compare"),
        (None, {"distill_weight": 1.0}, "distill_weight=1.0 needs an estimator"),
        (None, SIMILAR, "train_sampling_strategy=similar: needs an estimator"),
        (None, OWN, "use an estimator that finds similar"),
        (bm25, OWN | {"collator": lambda features: features}, "data_collator: a custom collator reads only pairs"),
    ],
)
def test_what_cannot_work_is_refused_by_the_constructor(make_trainer, estimator, options, says):
    with pytest.raises(UserError, match=says):
        make_trainer(estimator and estimator(), **options)
