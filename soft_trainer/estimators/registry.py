"""Creates the estimator that `--estimator` selects. `ESTIMATORS` lists all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from soft_trainer.data.array_cache import DEFAULT_FOLDER, REMEDY, refusal_of
from soft_trainer.encoders.hub_files import split_revision
from soft_trainer.encoders.loading import load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator, SimCSEEstimator, TrainedModelEstimator
from soft_trainer.objective import import_reference
from soft_trainer.options.defaults import apply_default_recipe
from soft_trainer.options.fields import DataArguments, reads_estimator
from soft_trainer.options.removed import REMOVED
from soft_trainer.options.training import SoftInfoNCETrainingArguments
from soft_trainer.terminal import print_on_main

PAPER_MODEL = "sentence-transformers/msmarco-distilbert-dot-v5"  # the paper's SimCSE estimator starts from it


# In the order of the paper's tables. Each constructor takes `cache_dir`.
ESTIMATORS: dict[str, type[Estimator] | None] = {
    "none": None,
    "bm25": BM25Estimator,
    "trained_model": TrainedModelEstimator,
    "simcse": SimCSEEstimator,
    "initial_model": InitialModelEstimator,
}
# The estimators whose encoder `--estimator_model` selects, with their default encoders.
DEFAULT_MODELS: dict[str, str | None] = {"trained_model": None, "simcse": PAPER_MODEL}


def choose_estimator(
    arguments: DataArguments, query_columns: Sequence[str] = ("docstring_tokens",), trust_remote_code: bool = False
):
    """Creates the estimator that `--estimator` selects: a key of `ESTIMATORS`, or a user's class as `module:Class`.

    Args:
        query_columns: the columns of the queries. BM25 reads the first one.
        trust_remote_code: run the code that comes with the encoder of `--estimator_model`.

    Returns:
        The estimator, or None for "none".

    Raises:
        UserError: the name is unknown, the module or class cannot be imported, or the encoder cannot be loaded.
    """
    name = arguments.estimator or "none"
    model = arguments.estimator_model
    if ":" in name:
        estimator = _users_own(name)
    elif "+" in name:
        raise UserError(f"estimator={name}: mixtures are gone; {REMOVED['mixture_shares']}")
    elif name not in ESTIMATORS:
        raise UserError(f"estimator={name!r}: use {', '.join(ESTIMATORS)}, or module:Class")
    else:
        estimator = _known(name, arguments, query_columns[0], trust_remote_code)
    if model and name not in DEFAULT_MODELS:
        print_on_main(f"warning: estimator_model={model} has no effect: estimator={name} takes none")
    return estimator


def apply_default_options(
    args: SoftInfoNCETrainingArguments, profile: EncoderProfile, model: PreTrainedModel
) -> list[Estimator]:
    """Sets the options that depend on the encoder, for training from Python, and returns the default estimator.

    The options and the estimator are the same as on the command line.

    Args:
        args: the training arguments, which are changed in place. Plain `TrainingArguments` are left as they are.
        model: the encoder before training.

    Returns:
        A list with the estimator. It is empty for plain `TrainingArguments`, if `--estimator` was given, or if no
        option reads an estimator.
    """
    if not isinstance(args, SoftInfoNCETrainingArguments) or "estimator" in args.named or not reads_estimator(args):
        return []
    data_args = DataArguments()
    apply_default_recipe(data_args, args, profile, model.config._name_or_path)
    return [choose_estimator(data_args, profile.query_columns)]


def _known(name: str, arguments: DataArguments, query_column: str, trust_remote_code: bool) -> Estimator | None:
    """Creates an estimator that is listed in `ESTIMATORS`."""
    estimator_class = ESTIMATORS[name]
    if estimator_class is None:
        return None
    folder = arguments.estimator_cache_dir or DEFAULT_FOLDER
    if folder == "none":
        folder = None
    options = {"cache_dir": folder}
    if name == "bm25":
        options["column"] = query_column
        options["document_column"] = arguments.bm25_document_column
        options["idf"] = arguments.bm25_idf
        options["scope"] = arguments.bm25_scope
    elif folder is not None and (refusal := refusal_of(Path(folder))):
        raise UserError(f"estimator_cache_dir={folder}: {refusal}; {REMEDY}")
    if name in DEFAULT_MODELS:
        model = arguments.estimator_model or DEFAULT_MODELS[name]
        if model is None:
            raise UserError(f"estimator={name}: name its folder or Hub name with --estimator_model")
        base, revision = split_revision(model)
        # Raises an error for a missing encoder now rather than when the estimator is fitted.
        load_tokenizer(base, resolve_profile(base, revision=revision), revision, trust_remote_code)
        options |= {"model_name_or_path": model, "trust_remote_code": trust_remote_code}
    return estimator_class(**options)


def _users_own(name: str):
    """Creates a user's own estimator, given as `module:Class`. The class is called without arguments."""
    own_class = import_reference("estimator", name)
    try:
        estimator = own_class()
    except (TypeError, ValueError, OSError) as error:
        raise UserError(f"estimator={name!r}: {error}") from error
    for method in ("fit", "similarity"):
        if not callable(getattr(estimator, method, None)):
            raise UserError(f"estimator={name!r}: it has no method {method}; an estimator has fit and similarity")
    return estimator
