"""The one place that knows which grammar reads which language."""

from __future__ import annotations

import importlib
from functools import cache

from tree_sitter import Language, Parser

from soft_trainer.errors import UserError

# language -> the function of `tree_sitter_LANGUAGE` that returns the grammar
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
    """The tree-sitter parser of `language`, one of `LANGUAGES`, made once a process.

    Raises:
        UserError: any other language.
    """
    if language not in _GRAMMARS:
        raise UserError(f"language={language!r}: use one of {', '.join(LANGUAGES)}")
    module = importlib.import_module(f"tree_sitter_{language}")
    return Parser(Language(getattr(module, _GRAMMARS[language])()))
