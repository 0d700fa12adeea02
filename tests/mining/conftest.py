"""A `datasets` cache that is removed with the test."""

import pytest


@pytest.fixture(autouse=True)
def _cache(own_cache):
    """Gives every test in this folder its own cache."""
