"""Reads one file of a tree the way search indexes it."""

from __future__ import annotations

import os

from soft_trainer.mining.source_files import MAX_FILE_BYTES, read_regular, readable
from soft_trainer.search.notebooks import is_notebook, notebook_text
from soft_trainer.search.pieces import language_of

MAX_NOTEBOOK_BYTES = 20_000_000  # with its pictures, which are left out


def read_source(root: str, path: str) -> tuple[bytes, str] | str:
    """Returns a file's text and its language; else the reason to leave it out."""
    full = os.path.join(root, path)
    language = ""
    source = read_regular(full, MAX_NOTEBOOK_BYTES if is_notebook(path) else MAX_FILE_BYTES)
    if is_notebook(path) and isinstance(source, bytes):
        source, language = notebook_text(source) or (source, "")
    if len(source) > MAX_FILE_BYTES:
        return f"over {MAX_FILE_BYTES:,} bytes"
    source = readable(source, path)
    if isinstance(source, str):
        return source
    return source, language or language_of(path, source)
