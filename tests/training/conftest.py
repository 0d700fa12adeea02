import copy

import pytest
from trainings import still


@pytest.fixture(scope="module")
def exact_model(_model):
    """The tiny encoder in float64, without dropout."""
    return still(_model)


@pytest.fixture
def make_trainer(trainer_of, _model, dataset):
    """Returns a function that makes a trainer for whole epochs, without evaluation."""

    def make(estimator=None, rows=None, model=None, collator=None, **options):
        arguments = {"train_dataset": dataset if rows is None else rows, "eval_dataset": None, "codebase": None}
        arguments |= {"model": copy.deepcopy(_model if model is None else model), "data_collator": collator}
        return trainer_of(estimator=estimator, arguments=arguments, **{"max_steps": -1} | options)

    return make
