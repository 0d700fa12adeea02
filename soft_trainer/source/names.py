"""Splits identifiers into words, and detects tests by their paths."""

from __future__ import annotations

import re

from soft_trainer.source.documentation import JAVADOC
from soft_trainer.source.languages import SOURCE_LANGUAGES, SourceLanguage

_UNKNOWN = SourceLanguage((), "", "", JAVADOC)
# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese kana, and Chinese characters; and Korean,
# which has no space between a word and its particle.
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")


def identifier_words(text: str) -> list[str]:
    """Splits text into lower-case words and numbers, without punctuation.

    `parseHTTPHeader2` and `parse_http_header_2` both become `parse`, `http`, `header` and `2`.
    """
    return [word.lower() for word in _WORD.findall(text)]


def is_test_path(path: str, language: str) -> bool:
    """Returns True if the path looks like a test's, such as `tests/x.py`, `test_x.py`, `XTest.java` or `x.spec.js`."""
    return not set(patterns_of(language).test_words.split()).isdisjoint(identifier_words(path))


def patterns_of(language: str) -> SourceLanguage:
    """Returns a language's entry in `SOURCE_LANGUAGES`, or an entry with only test words for an unknown language."""
    return SOURCE_LANGUAGES.get(language, _UNKNOWN)
