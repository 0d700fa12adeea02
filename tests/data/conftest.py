"""Gives tests of data a `datasets` cache that is removed afterwards."""

import pytest


@pytest.fixture(autouse=True)
def _cache(own_cache):
    """Gives each test in this folder a separate cache."""
