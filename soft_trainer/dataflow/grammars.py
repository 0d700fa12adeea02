"""The grammars of the languages. A new language is one more entry here and in `rules.py`."""

from __future__ import annotations

import importlib
from functools import cache

from tree_sitter import Language, Parser

from soft_trainer.errors import UserError

# language -> the function of the module `tree_sitter_LANGUAGE` that returns the grammar
_GRAMMARS = {
    "ruby": "language",
    "python": "language",
    "java": "language",
    "javascript": "language",
    "php": "language_php",
    "go": "language",
}
LANGUAGES = tuple(_GRAMMARS)


@cache
def parser(language: str) -> Parser:
    """The tree-sitter parser of a language of `LANGUAGES`. Each process makes it once.

    Raises:
        UserError: any other language.
    """
    if language not in _GRAMMARS:
        raise UserError(f"language={language!r}: use one of {', '.join(LANGUAGES)}")
    module = importlib.import_module(f"tree_sitter_{language}")
    return Parser(Language(getattr(module, _GRAMMARS[language])()))
