"""Defines the exception for problems that a user can fix, and how its messages name options.

Commands print the exception as one line and exit with code 2.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator


class UserError(ValueError):
    """A problem that the user can fix: a missing file, a bad row, an impossible setting, a failed push or a full disk.

    The message says what is wrong, where (file and row, argument and allowed values), and what to do.
    """


SetupError = UserError


_in_shell = False  # all threads share it: those that answer requests belong to the command that started them


@contextlib.contextmanager
def messages_for_shell() -> Iterator[None]:
    """Makes messages name options as a shell does, while the body runs. Otherwise they name them as Python does."""
    global _in_shell
    before = _in_shell
    _in_shell = True
    try:
        yield
    finally:
        _in_shell = before


def for_caller(shell: str, python: str) -> str:
    """Returns the words for the caller: `shell` while a command runs, otherwise `python`."""
    return shell if _in_shell else python


def name_option(name: str, value=None) -> str:
    """Returns an option as the caller writes it, such as `--bf16 true` in the shell and `bf16=True` in Python.

    Args:
        value: a value to suggest. By default, only the option is named.
    """
    if value is None:
        return for_caller(f"--{name}", name)
    if isinstance(value, str):
        return for_caller(f"--{name} {value}", f"{name}={json.dumps(value)}")
    return for_caller(f"--{name} {json.dumps(value)}", f"{name}={value}")


def extra_needed(what: str, extra: str) -> str:
    """Returns the message for a missing optional dependency, with a command that works in a clone."""
    return f"{what} needs the extra: pip install -c constraints.txt -e '.[{extra}]'"
