"""Builds data-flow graphs with tree-sitter, and the inputs of GraphCodeBERT from them."""

import importlib

_EXPORTS = {
    "LANGUAGES": "grammars",
    "parser": "grammars",
    "code_tokens": "source",
    "parses": "source",
    "remove_comments": "source",
    "DataFlow": "graph",
    "Edge": "graph",
    "extract_data_flow": "graph",
    "graph_embeddings": "inputs",
    "graph_features": "inputs",
    "pad_graph_features": "inputs",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str):
    """Import a public name on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
