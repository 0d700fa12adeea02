"""Splits identifiers into words."""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")


def identifier_words(text: str) -> list[str]:
    """Splits text into words in lower case: `parseHTTPHeader2` and `parse_http_header_2` give the same four.

    Punctuation is dropped and numbers stay.
    """
    return [word.lower() for word in _WORD.findall(text)]
