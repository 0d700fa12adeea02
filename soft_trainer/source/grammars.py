"""Loads the tree-sitter grammars, and parses source code."""

from __future__ import annotations

import pkgutil
from functools import cache

from tree_sitter import Language, Node, Parser

from soft_trainer.errors import UserError

# Each language that can be parsed, and the function that returns its grammar.
GRAMMARS = {
    "ruby": "tree_sitter_ruby:language",
    "python": "tree_sitter_python:language",
    "java": "tree_sitter_java:language",
    "javascript": "tree_sitter_javascript:language",
    "php": "tree_sitter_php:language_php",
    "go": "tree_sitter_go:language",
    "c": "tree_sitter_c:language",
    "cpp": "tree_sitter_cpp:language",
    "csharp": "tree_sitter_c_sharp:language",
    "kotlin": "tree_sitter_kotlin:language",
    "rust": "tree_sitter_rust:language",
    "typescript": "tree_sitter_typescript:language_typescript",
    "tsx": "tree_sitter_typescript:language_tsx",
}
# The text around all code in a file.
_AROUND = {"php": (b"<?php", b"?>")}
# Frames are put around a code fragment so that it parses. They give no tokens. A bare method parses inside a
# class, and a JavaScript function without a name inside parentheses.
_NO_FRAME = (b"", b"")
_CLASS = (b" class C {", b"}")
_METHOD_FRAMES = (_NO_FRAME, _CLASS)
_FUNCTION_FRAMES = (_NO_FRAME, _CLASS, (b"(", b")"))
_FRAMES = {
    "java": _METHOD_FRAMES,
    "csharp": _METHOD_FRAMES,
    "php": _METHOD_FRAMES,
    "javascript": _FUNCTION_FRAMES,
    "typescript": _FUNCTION_FRAMES,
    "tsx": _FUNCTION_FRAMES,
}


@cache
def parser(language: str) -> Parser:
    """Returns the tree-sitter parser for a language. Each process creates one parser per language.

    Raises:
        UserError: the language is not in `GRAMMARS`.
    """
    grammar = pkgutil.resolve_name(entry_of(GRAMMARS, language))
    return Parser(Language(grammar()))


def entry_of(table: dict, language: str):
    """Returns a language's entry in a table.

    Raises:
        UserError: the language is not in the table.
    """
    if language not in table:
        raise UserError(f"language={language!r}: use one of {', '.join(table)}")
    return table[language]


def parse_framed(code: str, language: str) -> tuple[Node, bytes, set[int]]:
    """Parses code in the first frame, such as `class C { ... }`, that gives no syntax error, or else without a frame.

    Returns:
        The root of the tree, the parsed text, and the positions of the frame's bytes in the text.
    """
    before, after = _AROUND.get(language, _NO_FRAME)
    parsed = []
    for opening, closing in _FRAMES.get(language, [_NO_FRAME]):
        text = b"".join((before, opening, code.encode("utf-8", "replace"), closing, after))
        root = parser(language).parse(text).root_node
        end = len(text) - len(after)
        hidden = {*range(len(before), len(before + opening)), *range(end - len(closing), end)}
        parsed.append((root, text, hidden))
        if not root.has_error:
            return parsed[-1]
    return parsed[0]
