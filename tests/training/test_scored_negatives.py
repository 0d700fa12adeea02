"""Training with scores that came with the rows: loss and gradient against a plain loop, and against an encoder."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import refused
from trainings import batches_of, check_plain, fitted, still

from soft_trainer.estimators.scores import ScoresEstimator

AWARE = {"loss": "soft_info_nce", "weighting": "positive_aware", "margin": 0.1, "temperature": 0.5}
LINEAR = {"loss": "soft_info_nce", "weighting": "linear", "alpha": 1.3, "beta": 0.7, "temperature": 0.5, "floor": 0.2}
KL = {"loss": "info_nce", "distill_weight": 0.7, "distill_temperature": 0.4}
CASES = {
    "weights": AWARE,
    "Eq. 4": LINEAR,
    "KL": KL,
    "both": AWARE | {"distill_weight": 0.7, "distill_temperature": 0.4},
    "several positives": AWARE | KL | {"loss": "soft_info_nce", "false_negatives": "positives"},
    "cancellation": KL | {"cancel": "ratio", "cancel_ratio": 0.5},
    "top k": LINEAR | {"cancel": "top_k", "cancel_k": 2},
}


@pytest.fixture
def scored(rows) -> list[dict]:
    """24 rows with four hard negatives each, and scores of most of them. Two rows have the same query."""
    generator = np.random.default_rng(0)
    made = []
    for number, row in enumerate(rows):
        negatives = [
            rows[(number + 3) % 24]["url"],
            "def f(): pass",
            f"def g{number}(): pass",
            f"def h{number}(): pass",
        ]
        scores = [None if generator.random() < 0.2 else float(generator.normal()) for _ in range(5)]
        made.append(row | {"negatives": negatives, "scores": scores})
    made[1] |= {"docstring_tokens": made[0]["docstring_tokens"], "docstring": made[0]["docstring"]}
    return made


@pytest.fixture
def make(trainer_of, _model):
    """Returns a function that makes a float64 trainer without dropout."""

    def trainer(rows: list[dict], estimator=None, **options):
        arguments = {"model": still(_model), "train_dataset": Dataset.from_list(rows)}
        settings = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}
        return trainer_of(estimator=estimator or ScoresEstimator(), arguments=arguments, **settings | options)

    return trainer


@pytest.mark.parametrize(
    "passes", ["packed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("padded", "cached"))]
)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_against_a_plain_loop(make, scored, name, passes):
    options = {"packed": {}, "padded": {"packing": "false"}, "cached": {"gradient_cache_chunk_size": 3}}[passes]
    trainer = fitted(make(scored, **CASES[name], **options))
    batch = batches_of(trainer)[0]
    # The estimator knows the scores of a row's function and of its negatives, by their texts.
    texts = trainer.train_split.corpus["code"][:]
    text_of = {row["url"]: row["code"] for row in scored}
    expected = torch.full((8, len(batch.code_rows)), torch.nan)
    for query, row in enumerate(scored[each] for each in batch.query_rows):
        named = [row["code"], *(text_of.get(each, each) for each in row["negatives"])]
        known = dict(zip(named, row["scores"], strict=True))
        for column, code in enumerate(batch.code_rows):
            if known.get(texts[code]) is not None:
                expected[query, column] = known[texts[code]]
    found = trainer.estimator.similarity(batch.query_rows, batch.code_rows)
    torch.testing.assert_close(found.float(), expected, equal_nan=True)
    assert int((~expected.isnan()).sum()) > 20
    check_plain(trainer, batch)


def test_data_workers_send_unknown_scores(make, scored):
    losses = []
    for workers in (0, 1):
        trainer = make(scored, **AWARE, dataloader_num_workers=workers)
        with torch.no_grad(), trainer.running():
            losses.append([float(trainer.compute_loss(trainer.model.eval(), batch)) for batch in batches_of(trainer)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"scores": None}, {}, "estimator=scores: the rows have no scores of hard negatives"),
        ({}, {"negatives_per_query": 0}, "set negatives_per_query above 0"),
        ({}, {"loss": "bce"}, "loss=bce compares all functions of a batch, but ScoresEstimator knows"),
        ({}, {"loss": "kl_regularization"}, "loss=kl_regularization compares all functions"),
        ({}, {"train_sampling_strategy": "similar"}, "ScoresEstimator cannot find similar rows"),
    ],
)
def test_what_scores_cannot_do_is_refused(make, scored, changes, options, message):
    with refused(message):
        make([row | changes for row in scored], **options)
