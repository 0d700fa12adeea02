"""Loads the tree-sitter grammars, and parses source code."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from soft_trainer.errors import UserError
from soft_trainer.source.extra import needed

if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Query

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


def check_grammars() -> None:
    """Checks that all grammars are installed, before an index or rows are written.

    Raises:
        UserError: the extra `search` is not installed, or not all of it.
    """
    for module in ("tree_sitter", *GRAMMARS.values()):
        needed(module.partition(":")[0])


@cache
def parser(language: str) -> Parser:
    """Returns the tree-sitter parser for a language. Each process creates one parser per language.

    Raises:
        UserError: the language is not in `GRAMMARS`, or the extra `search` is not installed.
    """
    module, _, function = entry_of(GRAMMARS, language).partition(":")
    tree_sitter = needed("tree_sitter")
    grammar = getattr(needed(module), function)
    return tree_sitter.Parser(tree_sitter.Language(grammar()))


def captures_of(query: Query, root: Node) -> dict[str, list[Node]]:
    """Returns the nodes below `root` that a query captures, by the name of the capture."""
    return needed("tree_sitter").QueryCursor(query).captures(root)


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
