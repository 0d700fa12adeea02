"""The grammars of the languages. A new one is an entry of `_GRAMMARS`; data flow also needs a table in `rules.py`."""

from __future__ import annotations

import importlib
from functools import cache

from tree_sitter import Language, Parser

from soft_trainer.dataflow.rules import RULES
from soft_trainer.errors import UserError

LANGUAGES = tuple(RULES)  # whose data flow is extracted
# Language -> the package of its grammar, and the function in it that returns the grammar.
_GRAMMARS = {
    "ruby": ("tree_sitter_ruby", "language"),
    "python": ("tree_sitter_python", "language"),
    "java": ("tree_sitter_java", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "go": ("tree_sitter_go", "language"),
    "php": ("tree_sitter_php", "language_php"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
    "csharp": ("tree_sitter_c_sharp", "language"),
    "rust": ("tree_sitter_rust", "language"),
    "kotlin": ("tree_sitter_kotlin", "language"),
}
PARSED_LANGUAGES = tuple(_GRAMMARS)


def check_language(language: str) -> None:
    """Raises a UserError unless the data flow of `language` can be extracted."""
    if language not in LANGUAGES:
        raise UserError(f"language={language!r}: use one of {', '.join(LANGUAGES)}")


@cache
def parser(language: str) -> Parser:
    """Returns the tree-sitter parser of a language of `PARSED_LANGUAGES`. Each process makes it once.

    Raises:
        UserError: any other language.
    """
    if language not in _GRAMMARS:
        raise UserError(f"language={language!r}: use one of {', '.join(PARSED_LANGUAGES)}")
    package, function = _GRAMMARS[language]
    return Parser(Language(getattr(importlib.import_module(package), function)()))
