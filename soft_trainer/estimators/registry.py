"""Creates estimators by name, such as "bm25", and the estimator of a run."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

from soft_trainer.data.array_cache import DEFAULT_FOLDER
from soft_trainer.encoders.loading import load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, is_cross_encoder, resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.scores import CrossEncoderEstimator
from soft_trainer.hub.files import split_revision
from soft_trainer.options.choices import ESTIMATORS, EstimatorChoice
from soft_trainer.options.defaults import train_without_teacher
from soft_trainer.options.fields import EstimatorOptions
from soft_trainer.options.references import import_reference
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.system.terminal import print_on_main


def choose_estimator(
    arguments: EstimatorOptions, query_columns: Sequence[str] = ("docstring_tokens",), trust_remote_code: bool = False
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
    choice = None
    if ":" in name:
        estimator = _imported(name)
    else:
        choice = ESTIMATORS[name]
        estimator = _built_in(name, choice, arguments, query_columns, trust_remote_code)
    if model and not (choice and choice.takes_model):
        print_on_main(f"warning: estimator_model={model} has no effect, because estimator={name} takes no model")
    return estimator


def estimator_of_run(
    args: SoftInfoNCETrainingArguments, profile: EncoderProfile, trust_remote_code: bool = False, split=None
) -> Estimator | None:
    """Creates a run's estimator like `choose_estimator`, or returns None if no option needs an estimator.

    If the default teacher, which the encoder's profile names, cannot be loaded, this prints the reason and changes the
    options: the encoder is trained without it.

    Args:
        split: the training rows, if known.
    """
    if not args.reads_estimator(split):
        return None
    try:
        return choose_estimator(args, profile.query_columns, trust_remote_code)
    except UserError as error:
        if args.teacher is None or "teacher" not in args.by_encoder:
            raise
        train_without_teacher(args)
        name = args.estimator
        print_on_main(f"This encoder trains with {name}, without its teacher, which cannot be loaded: {error}")
        return choose_estimator(args, profile.query_columns, trust_remote_code)


def _built_in(
    name: str,
    choice: EstimatorChoice | None,
    arguments: EstimatorOptions,
    query_columns: Sequence[str],
    trust_remote_code: bool,
) -> Estimator | None:
    """Creates a built-in estimator, an entry of `choices.ESTIMATORS`, with the options in `arguments`."""
    if choice is None:
        return None
    estimator_class = pkgutil.resolve_name(f"soft_trainer.estimators.{choice.reference}")
    folder = arguments.estimator_cache_dir or DEFAULT_FOLDER
    if folder == "none":
        folder = None
    options = {"cache_dir": folder}
    if name == "bm25":
        options |= {"column": query_columns[0], "document_column": arguments.bm25_document_column}
        options |= {"idf": arguments.bm25_idf, "scope": arguments.bm25_scope}
    if choice.takes_model:
        model = arguments.estimator_model or choice.default_model
        if model is None:
            raise UserError(f"estimator={name}: set estimator_model to a folder or a Hub name")
        base, revision = split_revision(model)
        options |= {"model_name_or_path": model, "trust_remote_code": trust_remote_code}
        if name == "trained_model" and is_cross_encoder(base, revision):
            return CrossEncoderEstimator(**options)
        # Raise an error for a missing encoder now rather than when the estimator is fitted.
        load_tokenizer(base, resolve_profile(base, revision=revision), revision, trust_remote_code)
    return estimator_class(**options)


def _imported(name: str):
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
