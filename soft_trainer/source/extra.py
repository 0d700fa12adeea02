"""Imports the packages of the extra `search`, which read source code. Rows that exist train without them."""

from __future__ import annotations

import importlib
from types import ModuleType

from soft_trainer.errors import UserError, extra_needed


def needed(name: str) -> ModuleType:
    """Imports a module of the extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # a module that this one imports, so the installation is damaged
            raise
        raise UserError(extra_needed("Reading source code", "search")) from error
