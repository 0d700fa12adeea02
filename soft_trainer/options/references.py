"""Converts between a user's function or class and a text that refers to it, `module:name`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

from soft_trainer.errors import UserError


class NamedFunction(str):
    """The name of a callable that no other process can import, such as a closure, with the callable itself.

    A run stores and compares the name, `module:name`.
    """

    function: Callable


def name_functions(options) -> None:
    """Replaces callables in the options `loss` and `weighting` with their names (`module:name`).

    Data workers, other processes and resumed runs import a function at the top level of a module by its name. Any
    other callable (a closure, a `functools.partial`, an object) stays with its name, as a `NamedFunction`.

    Args:
        options: an object that has these two attributes, such as the training arguments.
    """
    for option in ("loss", "weighting"):
        function = getattr(options, option)
        if not callable(function):
            continue
        called = getattr(function, "func", function)  # of a `functools.partial`
        if not hasattr(called, "__qualname__"):
            called = type(called)
        name = f"{called.__module__}:{called.__qualname__}"
        if getattr(sys.modules.get(called.__module__), called.__qualname__, None) is not function:
            name = NamedFunction(name)
            name.function = function
        setattr(options, option, name)


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
