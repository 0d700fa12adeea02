"""Builds data-flow graphs with tree-sitter. `inputs.py`, which needs torch, makes GraphCodeBERT's input from them."""

from soft_trainer.dataflow.graph import DataFlow, Edge, extract_data_flow
from soft_trainer.dataflow.source import DATA_FLOW_LANGUAGES, code_tokens, remove_comments

__all__ = [
    "DATA_FLOW_LANGUAGES",
    "DataFlow",
    "Edge",
    "code_tokens",
    "extract_data_flow",
    "remove_comments",
]
