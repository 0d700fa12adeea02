"""Helpers with which tests make and compare trained encoders."""

import copy

import torch

from soft_trainer import BM25Estimator
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.fingerprints import plain_settings
from soft_trainer.run.reporting import warnings_of

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
