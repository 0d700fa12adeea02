"""The one exception that command lines turn into a single line and exit code 2."""


class SetupError(ValueError):
    """Something a person can put right: a missing file, a bad row, an impossible setting.

    The message says what is wrong, where (file and row, argument and allowed values) and what to do.
    """
