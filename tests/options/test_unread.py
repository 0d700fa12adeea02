"""A run warns about exactly those options that have no effect with the other options."""

from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.options.fields import EstimatorOptions
from soft_trainer.options.resolve import resolve
from soft_trainer.options.spec import unread_lines
from soft_trainer.options.training import SoftInfoNCETrainingArguments

# Each row: an option with a changed value, options with which it has no effect, and options with which it has one.
# tests/test_criterion.py tries the settings of the loss.
TRAINING = [
    ("cancel_ratio", 0.1, {"cancel": "top_k"}, {"cancel": "ratio"}),
    ("group_size", 2, {}, {"train_sampling_strategy": "similar"}),
    ("negative_ratio", 0.5, {"negatives_per_query": 0}, {"negatives_per_query": 1}),
]


def lines_of_training(**options) -> list[str]:
    args = SoftInfoNCETrainingArguments(output_dir="unused", use_cpu=True, **options)
    return unread_lines(args, resolve(args, InitialModelEstimator()).unread)


def test_an_option_without_effect_is_named():
    assert lines_of_training() == []
    for name, value, without, effective in TRAINING:
        (line,) = lines_of_training(**{name: value}, **without)
        assert line.startswith(f"warning: {name}={value} has no effect: ")
        assert lines_of_training(**{name: value}, **effective) == [], name


def test_unread_options_are_reported(trainer_of, capsys):
    trainer_of(loss="info_nce", alpha=2.0, max_steps=1).train()
    assert "warning: alpha=2.0 has no effect: neither the loss nor its weighting uses it" in capsys.readouterr().err


def test_an_encoder_for_an_estimator_that_takes_none(capsys):
    choose_estimator(EstimatorOptions(estimator="bm25", estimator_model="a"))
    assert "warning: estimator_model=a has no effect" in capsys.readouterr().err
