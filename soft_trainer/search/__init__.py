"""Search in one repository: an index of its functions, classes and texts, and queries in words or symbols."""

import importlib

__all__ = ["CodeIndex", "SearchResult"]


def __getattr__(name: str):
    """Imports a public name on first use, because printing the help of the command needs no NumPy."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"CodeIndex": "index", "SearchResult": "results"}[name]
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
