"""Converts between a user's function or class and a text that refers to it, `module:name`."""

from __future__ import annotations

import importlib
import os
import sys

from soft_trainer.errors import UserError


def name_functions(options) -> None:
    """Replaces functions in the options `loss` and `weighting` with their names (`module:name`).

    Unlike a function, a name can be stored as JSON, and data workers, other processes and resumed runs can use it to
    import the function.

    Args:
        options: an object that has these two attributes, such as the training arguments.

    Raises:
        UserError: a function is not defined at the top level of a module.
    """
    for option in ("loss", "weighting"):
        function = getattr(options, option)
        if not callable(function):
            continue
        module = getattr(function, "__module__", None)
        name = getattr(function, "__qualname__", "")
        if getattr(sys.modules.get(module), name, None) is not function:
            raise UserError(f"{option}={function!r}: define it with `def`, at the top level of a module")
        setattr(options, option, f"{module}:{name}")


def import_reference(option: str, reference: str):
    """Imports the object that an option refers to as `module:name`. The module may be in the current folder.

    Raises:
        UserError: the module does not exist or has no object with this name.
    """
    module, _, name = reference.partition(":")
    # Unlike `python -m`, an installed command does not look for modules in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"{option}={reference!r}: {error}") from error
