"""From the name on the command line to an estimator."""

from __future__ import annotations

import importlib

from soft_trainer.arguments import DataArguments
from soft_trainer.errors import SetupError


def choose_estimator(arguments: DataArguments):
    """The estimator that `--estimator` names, None for "none".

    Raises:
        SetupError: an unknown name, or a module or class that cannot be imported.
    """
    name = arguments.estimator or "none"
    if name == "none":
        return None
    if ":" in name:
        return _own(name)
    if name == "bm25":
        from soft_trainer.estimators.bm25 import BM25Estimator

        return BM25Estimator(
            document_column=arguments.bm25_document_column, idf=arguments.bm25_idf, scope=arguments.bm25_scope
        )
    raise SetupError(f"estimator={name!r}: use bm25, none or module:Class")


def _own(name: str):
    """A user's own estimator, `module:Class`, made without arguments."""
    module, _, attribute = name.partition(":")
    try:
        estimator = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SetupError(f"estimator={name!r}: {error}") from error
    return estimator()
