"""Creates estimators by name, such as "bm25", and the default estimator of a trainer."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

from transformers import PreTrainedModel

from soft_trainer.choices import ESTIMATORS
from soft_trainer.data.array_cache import DEFAULT_FOLDER
from soft_trainer.encoders.adapters import has_adapter
from soft_trainer.encoders.hub_files import split_revision
from soft_trainer.encoders.loading import load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, is_cross_encoder, resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.scores import CrossEncoderEstimator
from soft_trainer.options.conditions import reads_estimator
from soft_trainer.options.defaults import apply_defaults, train_without_teacher
from soft_trainer.options.fields import DataArguments
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.references import import_reference
from soft_trainer.terminal import print_on_main

PAPER_MODEL = "sentence-transformers/msmarco-distilbert-dot-v5"  # the paper's SimCSE estimator starts from it


# The estimators whose encoder `--estimator_model` selects, with their default encoders.
DEFAULT_MODELS: dict[str, str | None] = {"trained_model": None, "simcse": PAPER_MODEL}


def choose_estimator(
    arguments: DataArguments, query_columns: Sequence[str] = ("docstring_tokens",), trust_remote_code: bool = False
):
    """Creates the estimator that `--estimator` selects: a key of `choices.ESTIMATORS`, or a class as `module:Class`.

    Args:
        query_columns: the columns of the queries. BM25 reads the first one.
        trust_remote_code: whether to run code that comes with the encoder of `--estimator_model`.

    Returns:
        The estimator, or None if the option is "none".

    Raises:
        UserError: the name is unknown, the module or class cannot be imported, or the encoder cannot be loaded.
    """
    name = arguments.estimator or "none"
    model = arguments.estimator_model
    if ":" in name:
        estimator = _users_own(name)
    else:
        estimator = _known(name, arguments, query_columns, trust_remote_code)
    if model and name not in DEFAULT_MODELS:
        print_on_main(f"warning: estimator_model={model} has no effect, because estimator={name} takes no model")
    return estimator


def estimator_of_run(
    data_args: DataArguments,
    args: SoftInfoNCETrainingArguments,
    profile: EncoderProfile,
    trust_remote_code: bool = False,
):
    """Creates a run's estimator like `choose_estimator`.

    If the default teacher, which the encoder's profile names, cannot be loaded, this prints the reason and changes the
    options: the encoder is trained without it.
    """
    try:
        return choose_estimator(data_args, profile.query_columns, trust_remote_code)
    except UserError as error:
        if args.teacher is None or args.teacher != profile.teacher or "teacher" in args.named:
            raise
        print_on_main(f"This encoder trains without its teacher, which cannot be loaded: {error}")
        train_without_teacher(data_args, args)
        return choose_estimator(data_args, profile.query_columns, trust_remote_code)


def _known(
    name: str, arguments: DataArguments, query_columns: Sequence[str], trust_remote_code: bool
) -> Estimator | None:
    """Creates a built-in estimator, a key of `choices.ESTIMATORS`, with the options in `arguments`."""
    if ESTIMATORS[name] is None:
        return None
    estimator_class = pkgutil.resolve_name(f"soft_trainer.estimators.{ESTIMATORS[name]}")
    folder = arguments.estimator_cache_dir or DEFAULT_FOLDER
    if folder == "none":
        folder = None
    options = {"cache_dir": folder}
    if name == "bm25":
        options |= {"column": query_columns[0], "document_column": arguments.bm25_document_column}
        options |= {"idf": arguments.bm25_idf, "scope": arguments.bm25_scope}
    if name in DEFAULT_MODELS:
        model = arguments.estimator_model or DEFAULT_MODELS[name]
        if model is None:
            raise UserError(f"estimator={name}: set estimator_model to a folder or a Hub name")
        base, revision = split_revision(model)
        options |= {"model_name_or_path": model, "trust_remote_code": trust_remote_code}
        if name == "trained_model" and is_cross_encoder(base, revision):
            return CrossEncoderEstimator(**options)
        # Raise an error for a missing encoder now rather than when the estimator is fitted.
        load_tokenizer(base, resolve_profile(base, revision=revision), revision, trust_remote_code)
    return estimator_class(**options)


def _users_own(name: str):
    """Imports a user's estimator class, `module:Class`, and calls it without arguments.

    Raises:
        UserError: the class cannot be imported or called, or lacks `fit` or `similarity`.
    """
    own_class = import_reference("estimator", name)
    try:
        estimator = own_class()
    except (TypeError, ValueError, OSError) as error:
        raise UserError(f"estimator={name!r}: {error}") from error
    for method in ("fit", "similarity"):
        if not callable(getattr(estimator, method, None)):
            raise UserError(
                f"estimator={name!r}: the class has no method {method}; an estimator needs fit and similarity"
            )
    return estimator


def default_estimators(
    args: SoftInfoNCETrainingArguments, profile: EncoderProfile, model: PreTrainedModel, estimator=None
) -> list:
    """Sets a trainer's options that depend on the encoder, and creates its default estimator.

    The defaults are the same as on the command line.

    Args:
        args: the training arguments, which are changed in place unless they are plain `TrainingArguments`.
        model: the encoder before training. A model without a name counts as trained from scratch.
        estimator: the estimator among the trainer's callbacks, or None.

    Returns:
        A list with the default estimator. The list is empty for plain `TrainingArguments`, for a run from the command
        line, if there already is an estimator, or if no option needs an estimator.

    Raises:
        UserError: `args` has a teacher, but the callbacks have another estimator.
    """
    if not isinstance(args, SoftInfoNCETrainingArguments) or args.from_command_line:
        return []
    data_args = DataArguments()
    other = None
    if estimator is not None:
        other = type(estimator).__name__
    name = model.config._name_or_path or None
    apply_defaults(data_args, args, profile, name, estimator=other, adapter=has_adapter(model))
    if estimator is not None or "estimator" in args.named or not reads_estimator(args):
        return []
    return [estimator_of_run(data_args, args, profile)]
