"""A line names the options that have no effect given the other options, and no others."""

import pytest

from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.options.declared import Values, declared_options, unread_options
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.resolve import resolve
from soft_trainer.options.training import SoftInfoNCETrainingArguments

SIMILAR = {"group_size": 2, "random_share": 0.5, "nearest_apart": 1, "equal_texts_apart": True, "neighbours": 4}
SIMILAR |= {"similar_by": "bm25"}
NEGATIVES = {"negatives_meet": "all", "negative_candidates": 9, "negative_ranks": "1,5", "negative_max_score": 1.0}
NEGATIVES |= {"negative_margin": 1.0, "negative_ratio": 0.5, "negative_temperature": 1.0}
# An option with a value that is not its default, options that give it no effect, and others that give it one.
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
    ("order_loss_scale", 2.0, {}, {"order_loss_weight": 1.0}),
    ("distill_temperature", 2.0, {}, {"distill_weight": 1.0}),
    *((name, value, {}, {"strategy": "similar"}) for name, value in SIMILAR.items()),
    *((name, value, {}, {"negatives_per_query": 1}) for name, value in NEGATIVES.items()),
    ("guard_tolerance", 0.02, {}, {"guard": True}),
]
COMMAND = [
    ("estimator", "initial_model", {"loss": "info_nce"}, {}),
    ("estimator", "initial_model", {"loss": "info_nce"}, {"loss": "info_nce", "train_sampling_strategy": "similar"}),
    ("bm25_idf", "lucene", {"estimator": "simcse"}, {}),
    ("bm25_scope", "corpus", {"estimator": "none"}, {"estimator": "bm25+simcse"}),
    ("bm25_document_column", "code", {"estimator": "initial_model"}, {"estimator": "bm25"}),
    ("mixture_shares", "1,2", {}, {"estimator": "bm25+initial_model"}),
    ("mixture_temperatures", "1,2", {}, {"estimator": "bm25+initial_model"}),
    ("query_column", "question", {}, {"data_dir": "rows"}),
    ("code_column", "answer", {}, {"data_dir": "rows"}),
    ("extra_source_dir", "tree", {}, {"source_dir": "stdlib"}),
    ("max_functions", 3, {}, {"history": "repository"}),
    ("body", True, {}, {"history": "repository"}),
    ("mining_keep", "short_functions", {}, {"source_dir": "stdlib"}),
    ("vocabulary_size", 500, {}, {"from_scratch": "32x1"}),
    ("model_revision", "main", {"from_scratch": "32x1"}, {}),
]


def training_lines(strategy="random", guard=False, **options) -> list[str]:
    args = SoftInfoNCETrainingArguments(output_dir="unused", use_cpu=True, train_sampling_strategy=strategy, **options)
    return resolve(args, InitialModelEstimator()).unread(args, guard)


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
    names = {name for kind in kinds for name, declared in declared_options(kind).items() if declared.read_if}
    assert {name for name, *_ in TRAINING + COMMAND} == names
    assert training_lines() == command_lines() == command_lines(estimator="none", loss="info_nce") == []


def test_a_training_says_so(trainer_of, capsys):
    trainer_of(loss="info_nce", alpha=2.0, max_steps=1).train()
    assert "warning: alpha=2.0 has no effect: only loss=soft_info_nce" in capsys.readouterr().err


def test_more_encoders_than_estimators_take(model, tokenizer, tmp_path, capsys):
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    arguments = DataArguments(estimator="trained_model", estimator_model=f"{tmp_path},{tmp_path}")
    with pytest.raises(UserError, match="2 encoders, but estimator=trained_model takes 1"):
        choose_estimator(arguments)
    choose_estimator(DataArguments(estimator="bm25", estimator_model="a"))
    assert "warning: estimator_model=a has no effect" in capsys.readouterr().err
