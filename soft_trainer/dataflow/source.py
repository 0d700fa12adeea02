"""Parses source text: its tree, its tokens, and the text without comments."""

from __future__ import annotations

import importlib
import re
from bisect import bisect_left
from functools import cache

from tree_sitter import Language, Node, Parser

from soft_trainer.dataflow.rules import RULES, Rules
from soft_trainer.errors import UserError

LANGUAGES = tuple(RULES)  # whose data flow is extracted
# Language -> the package of its grammar, and the function in it that returns the grammar.
_GRAMMARS = {
    **{
        name: (f"tree_sitter_{name}", "language")
        for name in "ruby python java javascript go c cpp rust kotlin".split()
    },
    "php": ("tree_sitter_php", "language_php"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
    "tsx": ("tree_sitter_typescript", "language_tsx"),
    "csharp": ("tree_sitter_c_sharp", "language"),
}
PARSED_LANGUAGES = tuple(_GRAMMARS)
# Frames turn a piece of source into a file: (before, opening, closing, after). Opening and closing give no tokens.
# A bare method parses inside a class, a nameless JavaScript function inside parentheses.
_FRAMES = {
    "java": ((b"", b"", b"", b""), (b"", b"class C {", b"}", b"")),
    "javascript": ((b"", b"", b"", b""), (b"", b"class C {", b"}", b""), (b"", b"(", b")", b"")),
    "php": ((b"<?php", b"", b"", b"?>"), (b"<?php", b" class C {", b"}", b"?>")),
}
_FRAMES |= {"csharp": _FRAMES["java"], "typescript": _FRAMES["javascript"], "tsx": _FRAMES["javascript"]}
_FILE = ((b"", b"", b"", b""),)
_STRINGS = ("string", "concatenated_string")  # a docstring is a statement that consists of one
# Strings are matched too, so that a comment sign inside a string is not taken for a comment.
_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


@cache
def parser(language: str) -> Parser:
    """Returns the tree-sitter parser of a language of `PARSED_LANGUAGES`. Each process makes it once.

    Raises:
        UserError: any other language.
    """
    _check(language, PARSED_LANGUAGES)
    package, function = _GRAMMARS[language]
    return Parser(Language(getattr(importlib.import_module(package), function)()))


def _check(language: str, known: tuple[str, ...]) -> None:
    if language not in known:
        raise UserError(f"language={language!r}: use one of {', '.join(known)}")


class Source:
    """The tokens of a piece of source in the order of the text.

    Attributes:
        root: the tree.
        rules: the rules of the language.
        tokens: the text of each token.
        value: True for each token that is a name or a literal, False for keywords and signs.
        name: True for each token that becomes a variable when it first occurs.
        at: first byte of a token -> index of the token.
    """

    def __init__(self, root: Node, text: bytes, hidden: tuple[range, range], rules: Rules):
        self.root = root
        self.rules = rules
        self.tokens: list[str] = []
        self.value: list[bool] = []
        self.name: list[bool] = []
        self.at: dict[int, int] = {}
        opening, closing = hidden
        for leaf in _leaves(root, rules)[0]:
            start = leaf.start_byte
            end = leaf.end_byte
            kind = leaf.type
            name = kind == "identifier"
            if opening:
                if start in opening or start in closing:
                    continue
                name |= kind == rules.method_name and True not in self.name
            if start < end:
                token = text[start:end].decode("utf-8", "replace")
                keyword = token in rules.keywords and self.tokens[-1:] != ["$"]
                self.at[start] = len(self.tokens)
                self.tokens.append(token.replace("\n", ""))
                self.value.append(kind != token and kind not in rules.signs and not keyword)
                self.name.append(name)
        self._starts = list(self.at)

    def values(self, *nodes: Node) -> tuple[int, ...]:
        """Returns the indices of the names and literals from the first to the last of `nodes`."""
        first = bisect_left(self._starts, nodes[0].start_byte)
        last = bisect_left(self._starts, nodes[-1].end_byte)
        return tuple(i for i in range(first, last) if self.value[i])

    def parts(self, node: Node) -> list[list[Node]]:
        """Returns the members of one side of an assignment. A plain name or a literal has none."""
        if node.type in self.rules.atoms:
            return []
        children = []
        rules = self.rules
        for child in node.children:
            kind = child.type
            if kind in rules.wrappers:
                children += child.children
            elif kind != "," and kind not in rules.comments and kind not in rules.dropped:
                children += [child] * (1 + kind.count(" "))  # `not in` was two leaves
        head = rules.heads.get(node.type, 1)
        if len(children) <= head:
            head = 1
        if children:
            return [children[:head], *([child] for child in children[head:])]
        return []


def read(code: str, language: str) -> Source:
    """Parses `code` without its comments.

    Raises:
        UserError: a language that is not in `soft_trainer.dataflow.LANGUAGES`.
    """
    _check(language, LANGUAGES)
    rules = RULES[language]
    if rules.text_comments:
        code = _cut_comments(code)
    return Source(*_parse(code, language), rules)


def code_tokens(code: str, language: str) -> list[str]:
    """Returns the tokens that GraphCodeBERT reads: the leaves of the tree except comments and docstrings.

    Raises:
        UserError: a language that is not in `soft_trainer.dataflow.LANGUAGES`.
    """
    return read(code, language).tokens


def parses(code: str, language: str) -> bool:
    """Returns True if `code` is a file, a function or a bare method without a syntax error.

    Raises:
        UserError: a language that is not in `PARSED_LANGUAGES`.
    """
    return not _parse(code, language)[0].has_error


def remove_comments(code: str, language: str) -> str:
    """Returns `code` without comments, docstrings and blank lines.

    Python and Ruby lose the comments of the tree. Java, JavaScript, PHP and Go lose, by GraphCodeBERT's rule, all text
    outside quotes that looks like a comment, even a `//` in a regular expression or a raw string.

    Raises:
        UserError: a language that is not in `soft_trainer.dataflow.LANGUAGES`.
    """
    _check(language, LANGUAGES)
    rules = RULES[language]
    if rules.text_comments:
        return _cut_comments(code)
    root, text, _ = _parse(code, language)
    kept = []
    start = 0
    for node in _leaves(root, rules)[1]:
        kept.append(text[start : node.start_byte])
        start = node.end_byte
    return _cut_blank_lines((b"".join(kept) + text[start:]).decode("utf-8", "replace"))


def _parse(code: str, language: str) -> tuple[Node, bytes, tuple[range, range]]:
    """Parses `code` in the first frame without an error, else in the first; returns tree, text and hidden bytes."""
    code = code.encode("utf-8", "replace")
    parsed = None
    for before, opening, closing, after in _FRAMES.get(language, _FILE):
        text = b"".join((before, opening, code, closing, after))
        root = parser(language).parse(text).root_node
        start = len(before)
        end = len(text) - len(after)
        hidden = range(start, start + len(opening)), range(end - len(closing), end)
        if parsed is None or not root.has_error:
            parsed = root, text, hidden
        if not root.has_error:
            break
    return parsed


def _leaves(root: Node, rules: Rules) -> tuple[list[Node], list[Node]]:
    """Returns the tokens under `root`, and the comments and docstrings under it."""
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
    """Removes comments of the form // and /* */."""
    return _cut_blank_lines(_COMMENT_OR_STRING.sub(lambda match: " " if match[0][0] == "/" else match[0], code))


def _cut_blank_lines(code: str) -> str:
    """Removes blank lines."""
    return "\n".join(line for line in code.split("\n") if line.strip())
