"""The one exception that command lines turn into a single line and exit code 2."""


class UserError(ValueError):
    """A problem that the user can solve: a missing file, a bad row, an impossible setting, a failed push, a full disk.

    The message says what is wrong, where (file and row, argument and allowed values) and what to do.
    """


SetupError = UserError


def refuse(*cases: tuple[object, str]) -> None:
    """Raises `UserError` with the message of the first case that holds.

    Args:
        cases: a condition and a message each.
    """
    for holds, message in cases:
        if holds:
            raise UserError(message)
