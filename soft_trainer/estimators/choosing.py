"""From the names on the command line to an estimator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from soft_trainer.arguments import DataArguments
from soft_trainer.encoders.profiles import resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.mixture import MixtureEstimator
from soft_trainer.estimators.row_cache import DEFAULT_FOLDER
from soft_trainer.estimators.simcse import PAPER_MODEL, SimCSEEstimator
from soft_trainer.estimators.trained_model import TrainedModelEstimator


def choose_estimator(arguments: DataArguments, query_columns: Sequence[str] = ("docstring_tokens",)):
    """The estimator that `--estimator` names: one, a mixture `a+b`, a user's `module:Class`, None for "none".

    Args:
        query_columns: where the queries stand, for an estimator that reads their words; the first is taken.

    Raises:
        UserError: an unknown name, a module or class that cannot be imported, or an encoder that is missing.
    """
    names = (arguments.estimator or "none").split("+")
    if names == ["none"]:
        return None
    models = iter(arguments.estimator_model.split(",") if arguments.estimator_model else ())
    members = [_one(name, arguments, models, query_columns[0]) for name in names]
    if len(members) == 1:
        return members[0]
    return MixtureEstimator(
        members, _numbers("mixture_shares", arguments), _numbers("mixture_temperatures", arguments)
    )


def _one(name: str, arguments: DataArguments, models, query_column: str):
    if ":" in name:
        return _own(name)
    if name not in MAKERS:
        raise UserError(f"estimator={name!r}: use {', '.join(MAKERS)}, none, a mixture a+b, or module:Class")
    return MAKERS[name](arguments, models, query_column)


def _bm25(arguments: DataArguments, models, query_column: str) -> BM25Estimator:
    return BM25Estimator(
        query_column,
        document_column=arguments.bm25_document_column,
        idf=arguments.bm25_idf,
        scope=arguments.bm25_scope,
    )


def _encoded(kind: type, default: str | None) -> Callable:
    def make(arguments: DataArguments, models, query_column: str):
        model = next(models, default)
        if model is None:
            raise UserError("estimator=trained_model: name its folder or Hub name with --estimator_model")
        resolve_profile(model.partition("@")[0], revision=model.partition("@")[2] or None)
        cache = None if arguments.no_estimator_cache else arguments.estimator_cache_dir or DEFAULT_FOLDER
        return kind(model, cache_dir=cache)

    return make


MAKERS: dict[str, Callable] = {
    "bm25": _bm25,
    "simcse": _encoded(SimCSEEstimator, PAPER_MODEL),
    "trained_model": _encoded(TrainedModelEstimator, None),
}


def _own(name: str):
    """A user's own estimator, `module:Class`, made without arguments."""
    module, _, attribute = name.partition(":")
    try:
        estimator = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"estimator={name!r}: {error}") from error
    return estimator()


def _numbers(option: str, arguments: DataArguments) -> Sequence[float] | None:
    value = getattr(arguments, option)
    try:
        return None if value is None else [float(number) for number in value.split(",")]
    except ValueError:
        raise UserError(f"{option}={value!r}: numbers by comma are expected") from None
