"""A run warns about exactly those options that have no effect with the other options."""

import pytest

from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.options.fields import DataArguments, EstimatorOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.option_spec import Values, option_specs, unread_options
from soft_trainer.options.resolve import resolve
from soft_trainer.options.training import SoftInfoNCETrainingArguments

# Each row: an option with a changed value, options with which it has no effect, and options with which it has one.
TRAINING = [
    ("alpha", 2.0, {"loss": "info_nce"}, {}),
    ("beta", 2.0, {"weighting": "positive_aware"}, {}),
    ("floor", 0.2, {"loss": "bce"}, {}),
    ("margin", 0.2, {}, {"weighting": "positive_aware"}),
    ("temperature", 2.0, {"loss": "info_nce"}, {"loss": "bce"}),
    ("infonce_weight", 2.0, {}, {"loss": "kl_regularization"}),
    ("kl_weight", 2.0, {"loss": "bce"}, {"loss": "kl_regularization"}),
    ("cancel_k", 1, {}, {"cancel": "top_k"}),
    ("cancel_ratio", 0.1, {"cancel": "top_k"}, {"cancel": "ratio"}),
    ("distill_temperature", 2.0, {}, {"distill_weight": 1.0}),
    ("group_size", 2, {}, {"strategy": "similar"}),
    ("negative_ratio", 0.5, {}, {"negatives_per_query": 1}),
    ("estimator", "initial_model", {"loss": "info_nce"}, {}),
    ("estimator", "initial_model", {"loss": "info_nce"}, {"loss": "info_nce", "strategy": "similar"}),
    ("bm25_idf", "lucene", {"estimator": "simcse"}, {}),
    ("bm25_scope", "corpus", {"estimator": "none"}, {"estimator": "bm25"}),
    ("bm25_document_column", "code", {"estimator": "initial_model"}, {"estimator": "bm25"}),
]
COMMAND = [
    ("dataset_name", "ann/rows", {"data_dir": "rows"}, {}),
    ("query_column", "question", {}, {"data_dir": "rows"}),
    ("code_column", "answer", {}, {"data_dir": "rows"}),
    ("id_column", "number", {}, {"data_dir": "rows"}),
    ("negatives_column", "bad", {}, {"data_dir": "rows"}),
    ("group_column", "customer", {}, {"data_dir": "rows"}),
    ("test_fraction", 0.2, {}, {"data_dir": "rows"}),
    ("split_seed", 1, {}, {"data_dir": "rows"}),
    ("extra_source_dir", "tree", {}, {"source_dir": "stdlib"}),
    ("mining_keep", "short_functions", {}, {"source_dir": "stdlib"}),
    ("vocabulary_size", 500, {}, {"from_scratch": "32x1"}),
    ("model_revision", "main", {"from_scratch": "32x1"}, {}),
]


def training_lines(strategy="random", **options) -> list[str]:
    args = SoftInfoNCETrainingArguments(output_dir="unused", use_cpu=True, train_sampling_strategy=strategy, **options)
    return resolve(args, InitialModelEstimator()).unread(args)


def command_lines(**options) -> list[str]:
    kinds = (DataArguments, ModelArguments, SoftInfoNCETrainingArguments)
    parts = [{name: value for name, value in options.items() if name in kind.__dataclass_fields__} for kind in kinds]
    data, model = DataArguments(**parts[0]), ModelArguments(**parts[1])
    args = SoftInfoNCETrainingArguments(output_dir="unused", use_cpu=True, **parts[2])
    return unread_options([data, model], Values(data, model, args))


@pytest.mark.parametrize(
    ("lines", "name", "value", "without", "effective"),
    [(training_lines, *case) for case in TRAINING] + [(command_lines, *case) for case in COMMAND],
)
def test_an_option_without_effect_is_named(lines, name, value, without, effective):
    (line,) = lines(**{name: value}, **without)
    assert line.startswith(f"warning: {name}={value} has no effect: ")
    assert lines(**{name: value}, **effective) == []


def test_every_condition_is_tried_and_defaults_are_silent():
    kinds = (DataArguments, ModelArguments, SoftInfoNCETrainingArguments)
    names = {name for kind in kinds for name, declared in option_specs(kind).items() if declared.applies_if}
    assert {name for name, *_ in TRAINING + COMMAND} == names
    assert training_lines() == command_lines() == training_lines(estimator="none", loss="info_nce") == []


def test_a_training_says_so(trainer_of, capsys):
    trainer_of(loss="info_nce", alpha=2.0, max_steps=1).train()
    assert "warning: alpha=2.0 has no effect: neither the loss nor its weighting uses it" in capsys.readouterr().err


def test_an_encoder_for_an_estimator_that_takes_none(capsys):
    choose_estimator(EstimatorOptions(estimator="bm25", estimator_model="a"))
    assert "warning: estimator_model=a has no effect" in capsys.readouterr().err
