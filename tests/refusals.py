"""The check that all tests of error messages share."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from soft_trainer.errors import UserError


@contextmanager
def refused(*words) -> Iterator[None]:
    """Expects a `UserError` with a one-line message that contains all `words`."""
    with pytest.raises(UserError) as error:
        yield
    message = str(error.value)
    assert "\n" not in message
    assert not [word for word in words if str(word) not in message], message
