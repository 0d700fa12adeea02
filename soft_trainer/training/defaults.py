"""Chooses the options and the estimator that depend on the encoder, for training from Python."""

from __future__ import annotations

from transformers import PreTrainedModel

from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.options.conditions import reads_estimator
from soft_trainer.options.defaults import apply_defaults
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments


def default_estimators(
    args: SoftInfoNCETrainingArguments, profile: EncoderProfile, model: PreTrainedModel, estimator=None
) -> list:
    """Sets the options that depend on the encoder, as on the command line, and returns the default estimator.

    Args:
        args: the training arguments, which are changed in place. Plain `TrainingArguments` are left as they are.
        model: the encoder before training. One without a name, which a configuration made, starts from scratch.
        estimator: the estimator among the trainer's callbacks, or None.

    Returns:
        A list with the estimator. It is empty for plain `TrainingArguments`, for the command line, if there is
        an estimator already, or if no option reads one.

    Raises:
        UserError: there is a teacher, and another estimator.
    """
    if not isinstance(args, SoftInfoNCETrainingArguments) or hasattr(args, "given"):  # the command line has chosen
        return []
    data_args = DataArguments()
    other = None
    if estimator is not None:
        other = type(estimator).__name__
    if args.teacher is not None and getattr(estimator, "model_name_or_path", None) == args.teacher:
        other = None
    apply_defaults(data_args, args, profile, model.config._name_or_path or None, estimator=other)
    if estimator is not None or "estimator" in args.named or not reads_estimator(args):
        return []
    return [choose_estimator(data_args, profile.query_columns)]
