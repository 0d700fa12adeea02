"""Training with scores that came with the rows: loss and gradient against a plain loop, and against an encoder."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from refusals import refused
from trainings import batches_of, fitted, gradients, still

from soft_trainer.encoders.encoding import encode, pad, score
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


def plain_loss(trainer, batch, rows: list[dict]) -> torch.Tensor:
    """Computes the loss of a batch by the formulas, one query and one function at a time."""
    options = trainer.criterion
    tokens = trainer._train_batches().tokens
    sides = []
    for side, numbers in {"query": batch.query_rows, "code": batch.code_rows}.items():
        inputs = pad([tokens[side][int(row)] for row in numbers], trainer.processing_class.pad_token_id)
        sides.append(encode(trainer.model, trainer.encoder, inputs))
    scores = score(trainer.encoder, *sides)
    texts = trainer.train_split.corpus["code"][:]
    text_of = {row["url"]: row["code"] for row in rows}
    total = 0.0
    for i, query in enumerate(batch.query_rows.tolist()):
        known = {}
        named = [rows[query]["code"], *(text_of.get(each, each) for each in rows[query]["negatives"])]
        for text, value in zip(named, rows[query]["scores"], strict=True):
            if value is not None:
                known[text] = value
        columns = [texts[int(code)] for code in batch.code_rows]
        own = int(batch.targets.positives[i])
        others = []
        if batch.targets.extra_positives is not None:
            others = [j for j in range(len(columns)) if batch.targets.extra_positives[i, j]]
        negatives = {j for j in range(len(columns)) if j != own and j not in others}
        if batch.targets.negatives is not None:
            negatives = {j for j in negatives if batch.targets.negatives[i, j]}
        compared = sorted((known[columns[j]], j) for j in negatives if columns[j] in known)
        positive = known.get(rows[query]["code"], math.inf)
        weights = dict.fromkeys(negatives, 1.0)
        if options.loss == "soft_info_nce" and options.weighting == "positive_aware":
            for value, j in compared:
                lead = positive - options.margin - value
                weights[j] = min(1.0, 2 / (1 + math.exp(-lead / options.temperature)))
        elif options.loss == "soft_info_nce" and len(compared) > options.alpha / options.beta:
            whole = sum(math.exp(value / options.temperature) for value, _ in compared)
            for value, j in compared:
                share = math.exp(value / options.temperature) / whole
                weight = (options.beta - options.alpha * share) / (options.beta - options.alpha / len(compared))
                weights[j] = max(options.floor, weight)
        losses = []
        for right in [own, *others]:
            terms = [scores[i, right].exp(), *(weights[j] * scores[i, j].exp() for j in negatives)]
            losses.append(sum(terms).log() - scores[i, right])
        total += sum(losses) / len(losses)
        if options.distill_weight and len(compared) > 1:
            whole = sum(math.exp(value / options.distill_temperature) for value, _ in compared)
            log_whole = sum(scores[i, j].exp() for _, j in compared).log()
            for value, j in compared:
                share = math.exp(value / options.distill_temperature) / whole
                total += options.distill_weight * share * (math.log(share) - (scores[i, j] - log_whole))
    return total / len(batch.query_rows)


@pytest.mark.parametrize(
    "passes", ["packed", *(pytest.param(each, marks=pytest.mark.slow) for each in ("padded", "cached"))]
)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_against_a_plain_loop(make, scored, name, passes):
    options = CASES[name] | {"padded": {"packing": "false"}, "cached": {"gradient_cache_chunk_size": 3}}.get(
        passes, {}
    )
    trainer = make(scored, **options)
    with trainer.running():
        batch = batches_of(trainer)[0]
        assert batch.targets.estimated is None or int(batch.targets.estimated.sum()) > 20
        loss, found = gradients(trainer, batch)
    plain = make(scored, **CASES[name])
    plain.model.load_state_dict(trainer.model.state_dict())
    expected = plain_loss(fitted(plain), batch, scored)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6) and loss > 0.1
    for parameter, gradient in found.items():
        known = dict(plain.model.named_parameters())[parameter].grad
        torch.testing.assert_close(
            gradient, torch.zeros_like(gradient) if known is None else known, atol=1e-6, rtol=1e-5
        )


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
