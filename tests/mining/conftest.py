"""Gives the tests of mining a `datasets` cache that is removed after each test."""

import pytest


@pytest.fixture(autouse=True)
def _cache(own_cache):
    """Gives every test in this folder an empty `datasets` cache."""
