"""Helpers with which tests make and compare trained encoders."""

import copy

import pytest
import torch

from soft_trainer import BM25Estimator
from soft_trainer.encoders.encoding import encode, pad, score
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.run.reporting import warnings_of
from soft_trainer.system.fingerprints import plain_settings

OWN = {"negatives_per_query": 2, "negative_ratio": 10.0}


def still(model):
    """Returns a copy of an encoder in float64 and without dropout, so that different computations agree."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def losses_of(trainer) -> list[float]:
    """Returns the losses that a trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_weights(found, expected, atol: float = 0.0) -> None:
    """Compares weights by name, bit for bit unless there is a tolerance."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=0, msg=name)


def bm25():
    """Makes a BM25 estimator that compares queries with codes."""
    return BM25Estimator(document_column="code_tokens")


def initial():
    """Makes an estimator that uses the encoder before training."""
    return InitialModelEstimator(cache_dir=None)


def fitted(trainer):
    """Prepares a trainer as at the start of training, and returns it."""
    trainer.prepare_rows()
    return trainer


def fingerprint_of(trainer):
    """Returns the run fingerprint of a trainer whose estimator has not been fitted."""
    trainer._merging.keep(resumed=False)
    return plain_settings(trainer.fingerprint())


def warned(trainer) -> list[str]:
    """Returns the warnings about a trainer's settings."""
    return warnings_of(trainer)


def gradients(trainer, batch) -> tuple[float, dict]:
    """Runs a training step without the optimizer. Returns the loss and the gradients."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    with trainer.running():
        loss = trainer.training_step(trainer.model, batch)
    return float(loss), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def batches_of(trainer, epoch: int = 0) -> list:
    """Returns a trainer's batches of one epoch, as a step uses them."""
    loader = trainer.get_train_dataloader()
    loader.set_epoch(epoch)
    return [trainer.weighed(batch) for batch in loader]


class SameLength:
    """A user's estimator: queries of similar length are similar."""

    def fit(self, split):
        self.lengths = torch.tensor([float(len(tokens)) for tokens in split.queries["docstring_tokens"]])

    def similarity(self, query_rows, code_rows):
        return -(self.lengths[query_rows][:, None] - self.lengths[code_rows][None, :]).abs()


def known_positives(trainer, batch) -> torch.Tensor:
    """Returns which columns answer a query, by the texts of the pairs, except the query's positive. Tensor[B, N]."""
    tokens = trainer._train_batches().tokens
    answers = {}
    for query, code in trainer.train_split.judgments.pairs():
        answers.setdefault(tuple(tokens["query"][query]), set()).add(tuple(tokens["code"][code]))
    known = [
        [tuple(tokens["code"][code]) in answers[tuple(tokens["query"][query])] for code in batch.code_rows]
        for query in batch.query_rows
    ]
    return torch.tensor(known).scatter(1, batch.targets.positives[:, None], False)


def plain_loss(trainer, batch) -> torch.Tensor:
    """Computes the loss of a batch by the formulas, one query at a time. Similarities that are NaN are unknown."""
    tokens = trainer._train_batches().tokens
    sides = []
    for side, numbers in {"query": batch.query_rows, "code": batch.code_rows}.items():
        inputs = pad([tokens[side][int(row)] for row in numbers], trainer.processing_class.pad_token_id)
        sides.append(encode(trainer.model, trainer.encoder, inputs))
    scores = score(trainer.encoder, *sides)
    known = known_positives(trainer, batch)
    options = trainer.criterion
    similarity = torch.full_like(scores, torch.nan)
    if options.needs_similarity:
        similarity = trainer.estimator.similarity(batch.query_rows, batch.code_rows).to(scores)
    total = 0.0
    for query, own in enumerate(batch.targets.positives.tolist()):
        line = similarity[query]
        right = torch.inf if line[own].isnan() else line[own]
        others = [column for column in range(len(line)) if column != own and not known[query, column]]
        compared = sorted((column for column in others if not line[column].isnan()), key=lambda column: line[column])
        cancelled = []
        if options.cancel == "top_k":
            cancelled = compared[-options.cancel_k :]
        elif options.cancel == "ratio":
            cancelled = [each for each in compared if line[each] > right - (1 - options.cancel_ratio) * abs(right)]
        others = [column for column in others if column not in cancelled]
        compared = [column for column in compared if column not in cancelled]
        weights = torch.ones_like(line)
        near = line[compared]
        if options.uses_weights and options.weighting == "positive_aware":
            weights[compared] = (2 * ((right - options.margin - near) / options.temperature).sigmoid()).clamp_max(1)
        elif options.uses_weights and len(compared) > options.alpha / options.beta:
            share = (near / options.temperature).softmax(0)
            linear = (options.beta - options.alpha * share) / (options.beta - options.alpha / len(compared))
            weights[compared] = linear.clamp_min(options.floor)
        positives = [own]
        if trainer.plan.options.false_negatives == "positives":
            positives += known[query].nonzero()[:, 0].tolist()
        terms = scores[query, others] + weights[others].log()
        of_positives = [
            torch.cat([scores[query, [each]], terms]).logsumexp(0) - scores[query, each] for each in positives
        ]
        total += sum(of_positives) / len(positives)
        if options.distill_weight and len(compared) > 1:
            shares = (near / options.distill_temperature).softmax(0)
            total += options.distill_weight * (shares * (shares.log() - scores[query, compared].log_softmax(0))).sum()
    return total / len(scores)


def check_plain(trainer, batch) -> None:
    """Compares the loss and gradients of a step with `plain_loss`."""
    loss, found = gradients(trainer, batch)
    trainer.model.zero_grad()
    expected = plain_loss(trainer, batch)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6) and loss > 0.1
    for parameter, gradient in trainer.model.named_parameters():
        if gradient.grad is not None:
            torch.testing.assert_close(found[parameter], gradient.grad, atol=1e-8, rtol=1e-6)
