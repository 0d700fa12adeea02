"""Defines the exception for problems that a user can fix. Commands print it as one line and exit with code 2."""


class UserError(ValueError):
    """A problem that the user can fix: a missing file, a bad row, an impossible setting, a failed push or a full disk.

    The message says what is wrong, where (file and row, argument and allowed values), and what to do.
    """


SetupError = UserError
