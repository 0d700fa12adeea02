"""Reads the published files of evaluation sets, plain or gzipped, and turns them into rows."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path

from soft_trainer.errors import UserError


def matching_files(folder: Path, pattern: str) -> list[Path]:
    """Returns the files of a folder whose whole name matches the regular expression, sorted by name."""
    return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))


def read_text(path: Path) -> str:
    """Returns the text of a file, which may be gzipped.

    Raises:
        UserError: the file cannot be read as UTF-8.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def read_json(path: Path, kind: type):
    """Returns the content of a JSON file, which must be a `kind`: `list` or `dict`.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, kind):
        names = {list: "a list", dict: "an object"}
        raise UserError(f"{path}: {names[kind]} is expected, not {type(value).__name__}")
    return value


def code_row(code: str, url: str, language: str) -> dict:
    """Returns a corpus row in CodeSearchNet's columns. Tokens are split at white space."""
    return {"code": code, "code_tokens": code.split(), "original_string": code, "language": language, "url": url}


def query_row(query: str, url: str, language: str) -> dict:
    """Returns a query's row in CodeSearchNet's columns. Tokens are split at white space."""
    return {"docstring": query, "docstring_tokens": query.split(), "language": language, "url": url}
