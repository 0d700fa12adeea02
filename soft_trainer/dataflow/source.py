"""Parses source code, and returns its tokens or its text without comments."""

from __future__ import annotations

import pkgutil
import re
from bisect import bisect_left
from functools import cache

from tree_sitter import Language, Node, Parser

from soft_trainer.dataflow.rules import DATA_FLOW_RULES, Rules
from soft_trainer.errors import UserError

DATA_FLOW_LANGUAGES = tuple(DATA_FLOW_RULES)
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
# What encloses a piece of source in a file.
_AROUND = {"php": (b"<?php", b"?>")}
# Frames are put around a piece of source so that it parses. They give no tokens. A bare method parses inside a class,
# and a JavaScript function without a name inside parentheses.
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
_STRINGS = ("string", "concatenated_string")  # A docstring is a statement that consists of one.
# The pattern matches strings too, so that a comment sign inside a string is not taken for a comment.
_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


@cache
def parser(language: str) -> Parser:
    """Returns the tree-sitter parser for a language. Each process creates it once.

    Raises:
        UserError: the language is not in `GRAMMARS`.
    """
    grammar = pkgutil.resolve_name(_entry(GRAMMARS, language))
    return Parser(Language(grammar()))


def _entry(table: dict, language: str):
    """Returns a language's entry in a table.

    Raises:
        UserError: the language is not in the table.
    """
    if language not in table:
        raise UserError(f"language={language!r}: use one of {', '.join(table)}")
    return table[language]


class Source:
    """The tokens of a piece of source code, in order and without comments.

    Attributes:
        root: the root of the syntax tree.
        rules: the rules of the language.
        tokens: the text of each token.
        value_at: the index of each token that is a name or a literal, keyed by the offset of its first byte. Keywords
            and signs are left out.
        names: the indices of the tokens that become variables at their first occurrence.

    Raises:
        UserError: the language is not in `DATA_FLOW_LANGUAGES`.
    """

    def __init__(self, code: str, language: str):
        self.rules = rules = _entry(DATA_FLOW_RULES, language)
        if rules.text_comments:
            code = _cut_comments(code)
        self.root, text, hidden = _parse(code, language)
        self.tokens: list[str] = []
        self.value_at: dict[int, int] = {}
        self.names: set[int] = set()
        for leaf in _leaves(self.root, rules)[0]:
            start = leaf.start_byte
            kind = leaf.type
            if start in hidden or start == leaf.end_byte:
                continue
            index = len(self.tokens)
            if kind == "identifier" or (hidden and kind == rules.method_name and not self.names):
                self.names.add(index)
            token = text[start : leaf.end_byte].decode("utf-8", "replace")
            keyword = token in rules.keywords and self.tokens[-1:] != ["$"]
            if kind != token and kind not in rules.signs and not keyword:
                self.value_at[start] = index
            self.tokens.append(token.replace("\n", ""))
        self._value_starts = list(self.value_at)
        self._values = tuple(self.value_at.values())

    def values(self, *nodes: Node) -> tuple[int, ...]:
        """Returns the indices of the names and literals from the first to the last of `nodes`."""
        first = bisect_left(self._value_starts, nodes[0].start_byte)
        last = bisect_left(self._value_starts, nodes[-1].end_byte)
        return self._values[first:last]

    def parts(self, node: Node) -> list[list[Node]]:
        """Returns the members of one side of an assignment. A plain name or a literal has none."""
        rules = self.rules
        if node.type in rules.atoms:
            return []
        children = []
        for child in node.children:
            kind = child.type
            if kind in rules.wrappers:
                children += child.children
            elif kind != "," and kind not in rules.comments and kind not in rules.dropped:
                children += [child] * (1 + kind.count(" "))  # `not in` was two leaves
        head = rules.heads.get(node.type, 1)
        if len(children) <= head:
            head = 1
        parts = [[child] for child in children]
        parts[:head] = [children[:head]] if children else []
        return parts


def code_tokens(code: str, language: str) -> list[str]:
    """Returns the tokens that GraphCodeBERT reads: the leaves of the tree except comments and docstrings.

    Raises:
        UserError: the language is not in `DATA_FLOW_LANGUAGES`.
    """
    return Source(code, language).tokens


def parses(code: str, language: str) -> bool:
    """Returns True if `code` is a file, a function or a method without its class, and has no syntax error.

    Raises:
        UserError: the language is not in `GRAMMARS`.
    """
    return not _parse(code, language)[0].has_error


def remove_comments(code: str, language: str) -> str:
    """Returns `code` without comments, docstrings and blank lines.

    In Python and Ruby, the syntax tree shows what is a comment. In Java, JavaScript, PHP and Go, GraphCodeBERT's rule
    removes all text outside quotes that looks like a comment, even a `//` in a regular expression or a raw string.

    Raises:
        UserError: the language is not in `DATA_FLOW_LANGUAGES`.
    """
    rules = _entry(DATA_FLOW_RULES, language)
    if rules.text_comments:
        return _cut_comments(code)
    root, text, _ = _parse(code, language)
    kept = bytearray(text)
    for node in reversed(_leaves(root, rules)[1]):
        del kept[node.start_byte : node.end_byte]
    return _cut_blank_lines(kept.decode("utf-8", "replace"))


def _parse(code: str, language: str) -> tuple[Node, bytes, set[int]]:
    """Parses code in the first frame that gives no syntax error, or without a frame if none does.

    Returns:
        The root of the tree, the text that was parsed, and the positions of the frame's bytes in it.
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


def _leaves(root: Node, rules: Rules) -> tuple[list[Node], list[Node]]:
    """Returns the nodes of the tokens below `root`, and the nodes of the comments and docstrings."""
    tokens = []
    comments = []
    stack = [root]
    while stack:
        node = stack.pop()
        kind = node.type
        if kind in rules.comments:
            comments.append(node)
        elif kind in rules.atoms or not node.child_count:
            if kind not in rules.dropped:
                tokens.append(node)
        elif kind in rules.plain and node.child_count == 1:
            tokens.append(node)
        elif kind == rules.docstring and node.child_count == 1 and node.children[0].type in _STRINGS:
            comments.append(node)
        else:
            stack += reversed(node.children)
    return tokens, comments


def _cut_comments(code: str) -> str:
    """Returns the code without comments of the form `//` and `/* */`, and without blank lines."""
    return _cut_blank_lines(_COMMENT_OR_STRING.sub(lambda match: " " if match[0][0] == "/" else match[0], code))


def _cut_blank_lines(code: str) -> str:
    """Returns the code without blank lines."""
    return "\n".join(line for line in code.split("\n") if line.strip())
