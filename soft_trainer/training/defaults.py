"""Chooses the options and the estimator that depend on the encoder, for training from Python."""

from __future__ import annotations

from transformers import PreTrainedModel

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.registry import make_estimator
from soft_trainer.options.conditions import reads_estimator
from soft_trainer.options.defaults import apply_default_recipe
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments


def apply_default_options(
    args: SoftInfoNCETrainingArguments, profile: EncoderProfile, model: PreTrainedModel
) -> list[Estimator]:
    """Sets the options that depend on the encoder, and returns the default estimator.

    The options and the estimator are the same as on the command line.

    Args:
        args: the training arguments, which are changed in place. Plain `TrainingArguments` are left as they are.
        model: the encoder before training.

    Returns:
        A list with the estimator. It is empty for plain `TrainingArguments`, if `estimator` was given, or if no
        option reads an estimator.
    """
    if not isinstance(args, SoftInfoNCETrainingArguments) or "estimator" in args.named or not reads_estimator(args):
        return []
    data_args = DataArguments()
    apply_default_recipe(data_args, args, profile, model.config._name_or_path)
    return [make_estimator(data_args.estimator, data_args.estimator_model, column=profile.query_columns[0])]
