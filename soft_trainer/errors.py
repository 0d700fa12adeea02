"""Defines `UserError`, the exception for problems that a user can fix.

Commands print the exception as one line and exit with code 2.
"""

from __future__ import annotations


class UserError(ValueError):
    """A problem that the user can fix: a missing file, a bad row, an impossible setting, a failed push or a full disk.

    The message states the problem, where it is (file and row, or argument and allowed values), and how to fix it.
    """


class NotFiniteError(RuntimeError):
    """The loss, the gradient or a weight became NaN or infinite."""


def extra_needed(what: str, extra: str) -> str:
    """Returns the message for a missing optional dependency, with the command to install it in a source clone."""
    return f"{what} needs the extra: pip install -c constraints.txt -e '.[{extra}]'"
