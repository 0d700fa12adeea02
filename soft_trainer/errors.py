"""The one exception that command lines turn into a single line and exit code 2."""


class UserError(ValueError):
    """A problem that the user can solve: a missing file, a bad row, an impossible setting, a failed push, a full disk.

    The message says what is wrong, where (file and row, argument and allowed values) and what to do.
    """


SetupError = UserError
