"""The one table of estimators, and the way from a name on the command line to an estimator.

A new estimator is one entry here: its name, label, place in tables, class (with its default settings) and how the
options of a run make one.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.encoders.loading import load_tokenizer
from soft_trainer.encoders.profiles import resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.base import Estimator
from soft_trainer.estimators.bm25 import BM25Estimator
from soft_trainer.estimators.mixture import MixtureEstimator
from soft_trainer.estimators.row_cache import DEFAULT_FOLDER, REMEDY, refusal_of
from soft_trainer.estimators.simcse import SimCSEEstimator
from soft_trainer.estimators.trained_model import InitialModelEstimator, TrainedModelEstimator
from soft_trainer.options.commands import PAPER_MODEL
from soft_trainer.options.fields import DataArguments
from soft_trainer.terminal import print_on_main


@dataclass
class EstimatorModels:
    """The encoders of `--estimator_model`, each for the next estimator that needs one.

    Args:
        names: the encoders not yet taken.
        trust_remote_code: run the code that comes with them.
    """

    names: Iterator[str]
    trust_remote_code: bool = False

    def take(self, default: str | None = None) -> dict | None:
        """Returns an estimator's arguments, with the next encoder or the default one; None if there is neither."""
        model = next(self.names, default)
        if model is None:
            return None
        name, _, revision = model.partition("@")
        load_tokenizer(
            name, resolve_profile(name, revision=revision or None), revision or None, self.trust_remote_code
        )
        return {"model_name_or_path": model, "trust_remote_code": self.trust_remote_code}


@dataclass(frozen=True)
class EstimatorEntry:
    """An estimator that `--estimator` names.

    Args:
        name: the name on the command line.
        label: the name in tables.
        estimator_class: its class, whose attributes are the default alpha, beta and temperature; None for "none".
        make: (options, the encoders of `--estimator_model`, the query's column) -> an estimator.
        takes_model: True if it takes an encoder of `--estimator_model`.
    """

    name: str
    label: str
    estimator_class: type[Estimator] | None
    make: Callable[[DataArguments, EstimatorModels, str], Estimator | None]
    takes_model: bool = False


def _bm25(arguments: DataArguments, models: EstimatorModels, query_column: str) -> BM25Estimator:
    return BM25Estimator(
        query_column,
        document_column=arguments.bm25_document_column,
        idf=arguments.bm25_idf,
        scope=arguments.bm25_scope,
        cache_dir=cache_folder(arguments),
    )


def _simcse(arguments: DataArguments, models: EstimatorModels, _: str) -> SimCSEEstimator:
    return SimCSEEstimator(**models.take(PAPER_MODEL), cache_dir=_writable_cache(arguments))


def _trained_model(arguments: DataArguments, models: EstimatorModels, _: str) -> TrainedModelEstimator:
    model = models.take()
    if model is None:
        raise UserError("estimator=trained_model: name its folder or Hub name with --estimator_model")
    return TrainedModelEstimator(**model, cache_dir=_writable_cache(arguments))


def cache_folder(arguments: DataArguments) -> str | Path | None:
    """Returns the folder that keeps row embeddings and neighbours, None to keep none."""
    return None if arguments.no_estimator_cache else arguments.estimator_cache_dir or DEFAULT_FOLDER


def _writable_cache(arguments: DataArguments) -> str | Path | None:
    folder = cache_folder(arguments)
    if folder is not None and (refusal := refusal_of(Path(folder))):
        raise UserError(f"estimator_cache_dir={folder}: {refusal}; {REMEDY}")
    return folder


# In the order of the paper's tables.
ESTIMATORS: dict[str, EstimatorEntry] = {
    entry.name: entry
    for entry in (
        EstimatorEntry("none", "", None, lambda *_: None),
        EstimatorEntry("bm25", "BM25", BM25Estimator, _bm25),
        EstimatorEntry("trained_model", "Trained model", TrainedModelEstimator, _trained_model, takes_model=True),
        EstimatorEntry("simcse", "SimCSE", SimCSEEstimator, _simcse, takes_model=True),
        EstimatorEntry(
            "initial_model",
            "Initial model",
            InitialModelEstimator,
            lambda arguments, *_: InitialModelEstimator(_writable_cache(arguments)),
        ),
    )
}

WITH_MODEL = tuple(name for name, entry in ESTIMATORS.items() if entry.takes_model)


def choose_estimator(
    arguments: DataArguments,
    query_columns: Sequence[str] = ("docstring_tokens",),
    trust_remote_code: bool = False,
):
    """Makes the estimator for `--estimator`: a name of `ESTIMATORS`, a mixture `a+b`, or a user's `module:Class`.

    Args:
        query_columns: the columns of the queries, for an estimator that reads their words; it reads the first.
        trust_remote_code: run the code that comes with the encoders of `--estimator_model`.

    Returns:
        An estimator, or None for "none".

    Raises:
        UserError: an unknown name, a module or class that cannot be imported, or an encoder that is missing.
    """
    names = (arguments.estimator or "none").split("+")
    names_of_models = arguments.estimator_model.split(",") if arguments.estimator_model else ()
    models = EstimatorModels(iter(names_of_models), trust_remote_code)
    members = [_make(name, arguments, models, query_columns[0], alone=len(names) == 1) for name in names]
    takers = sum(name in WITH_MODEL for name in names)
    if takers < len(names_of_models):
        counts = f"{len(names_of_models)} encoders, but estimator={arguments.estimator} takes {takers or 'none'}"
        if takers:
            raise UserError(f"estimator_model={arguments.estimator_model}: {counts}")
        print_on_main(f"warning: estimator_model={arguments.estimator_model} has no effect: {counts}")
    if len(members) == 1:
        return members[0]
    return MixtureEstimator(
        members, _numbers("mixture_shares", arguments), _numbers("mixture_temperatures", arguments)
    )


def _make(name: str, arguments: DataArguments, models: EstimatorModels, query_column: str, alone: bool):
    if ":" in name:
        return _users_own(name)
    if name not in ESTIMATORS or (name == "none" and not alone):
        known = ", ".join(known for known in ESTIMATORS if known != "none")
        raise UserError(f"estimator={name!r}: use {known}, none, a mixture a+b, or module:Class")
    return ESTIMATORS[name].make(arguments, models, query_column)


def _users_own(name: str):
    """Makes a user's own estimator, `module:Class`, without arguments."""
    module, _, attribute = name.partition(":")
    try:
        # An installed command does not look for modules in the current folder, as `python -m` does.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        estimator = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        raise UserError(f"estimator={name!r}: {error}") from error
    missing = [method for method in ("fit", "similarity") if not callable(getattr(estimator, method, None))]
    if missing:
        raise UserError(f"estimator={name!r}: it has no method {missing[0]}; an estimator has fit and similarity")
    return estimator


def _numbers(option: str, arguments: DataArguments) -> Sequence[float] | None:
    value = getattr(arguments, option)
    try:
        return None if value is None else [float(number) for number in value.split(",")]
    except ValueError:
        raise UserError(f"{option}={value!r}: numbers separated by commas are expected") from None
