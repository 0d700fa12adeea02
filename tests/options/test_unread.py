"""A run warns about exactly those options that have no effect with the other options."""

import pytest

from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.option_spec import unread_lines
from soft_trainer.options.fields import DataArguments, EstimatorOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import resolve
from soft_trainer.options.training import SoftInfoNCETrainingArguments

# Each row: an option with a changed value, options with which it has no effect, and options with which it has one.
# tests/test_criterion.py tries the settings of the loss.
TRAINING = [
    ("cancel_ratio", 0.1, {"cancel": "top_k"}, {"cancel": "ratio"}),
    ("group_size", 2, {}, {"train_sampling_strategy": "similar"}),
    ("negative_ratio", 0.5, {"negatives_per_query": 0}, {"negatives_per_query": 1}),
    ("estimator", "initial_model", {"loss": "info_nce"}, {}),
    ("estimator", "initial_model", {"loss": "info_nce"}, {"loss": "info_nce", "train_sampling_strategy": "similar"}),
    ("bm25_idf", "lucene", {"estimator": "simcse"}, {}),
    ("bm25_idf", "robertson", {"loss": "info_nce"}, {"loss": "soft_info_nce"}),
    ("bm25_scope", "corpus", {"estimator": "none"}, {"estimator": "bm25"}),
    ("bm25_document_column", "code", {"estimator": "initial_model"}, {"estimator": "bm25"}),
]
ROWS = [
    ("dataset_name", "ann/rows", {"data_dir": "rows"}, {}),
    ("query_column", "question", {}, {"data_dir": "rows"}),
    ("code_column", "answer", {}, {"data_dir": "rows"}),
    ("id_column", "number", {}, {"data_dir": "rows"}),
    ("negatives_column", "bad", {}, {"eval_data_dir": "rows"}),
    ("group_column", "customer", {}, {"data_dir": "rows"}),
    ("test_fraction", 0.2, {"source_dir": "stdlib"}, {"data_dir": "rows"}),
    ("split_seed", 1, {}, {"data_dir": "rows"}),
    ("extra_source_dir", "tree", {}, {"source_dir": "stdlib"}),
    ("mining_keep", "short_functions", {"data_dir": "rows"}, {"source_dir": "stdlib"}),
]
ENCODER = [
    ("vocabulary_size", 500, {}, {"from_scratch": "32x1"}),
    ("model_revision", "main", {"from_scratch": "32x1"}, {}),
]


def lines_of_training(**options) -> list[str]:
    args = SoftInfoNCETrainingArguments(output_dir="unused", use_cpu=True, **options)
    return unread_lines(args, resolve(args, InitialModelEstimator()).unread | args.unread)


def lines_of_rows(**options) -> list[str]:
    data = DataArguments(**options)
    return unread_lines(data, data.unread)


def lines_of_encoder(**options) -> list[str]:
    model = ModelArguments(**options)
    return unread_lines(model, model.unread)


@pytest.mark.parametrize(
    ("lines", "rows"), [(lines_of_training, TRAINING), (lines_of_rows, ROWS), (lines_of_encoder, ENCODER)]
)
def test_an_option_without_effect_is_named(lines, rows):
    assert lines() == []
    for name, value, without, effective in rows:
        (line,) = lines(**{name: value}, **without)
        assert line.startswith(f"warning: {name}={value} has no effect: ")
        assert lines(**{name: value}, **effective) == [], name


def test_every_reason_is_tried():
    unread = DataArguments().unread | DataArguments(data_dir="rows").unread
    assert unread.keys() == {name for name, *_ in ROWS}
    unread = ModelArguments().unread | ModelArguments(from_scratch="32x1").unread
    assert unread.keys() == {name for name, *_ in ENCODER}


def test_unread_options_are_reported(trainer_of, capsys):
    trainer_of(loss="info_nce", alpha=2.0, max_steps=1).train()
    assert "warning: alpha=2.0 has no effect: neither the loss nor its weighting uses it" in capsys.readouterr().err


def test_an_encoder_for_an_estimator_that_takes_none(capsys):
    choose_estimator(EstimatorOptions(estimator="bm25", estimator_model="a"))
    assert "warning: estimator_model=a has no effect" in capsys.readouterr().err
