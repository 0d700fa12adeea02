"""A `datasets` cache that goes with the test."""

import pytest


@pytest.fixture(autouse=True)
def _cache(own_cache):
    """Every test of this folder has a cache of its own."""
