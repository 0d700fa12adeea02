"""Splits source code into tokens, and removes comments, by GraphCodeBERT's rules."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

from soft_trainer.dataflow.rules import DATA_FLOW_RULES, Rules
from soft_trainer.source.grammars import entry_of, parse_framed

if TYPE_CHECKING:
    from tree_sitter import Node

DATA_FLOW_LANGUAGES = tuple(DATA_FLOW_RULES)
_STRINGS = ("string", "concatenated_string")  # A docstring is a statement that consists of one.
# The pattern matches strings too, so that a comment sign inside a string is not taken for a comment.
_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


class Source:
    """The tokens of some source code, in order and without comments.

    Attributes:
        root: the root of the syntax tree.
        rules: the rules of the language.
        tokens: the text of each token.
        value_at: the index of each name or literal, keyed by the offset of the token's first byte. Keywords and signs
            are excluded.
        names: the indices of the tokens that become variables the first time they occur.

    Raises:
        UserError: the language is not in `DATA_FLOW_LANGUAGES`.
    """

    def __init__(self, code: str, language: str):
        self.rules = rules = entry_of(DATA_FLOW_RULES, language)
        if rules.text_comments:
            code = _cut_comments(code)
        self.root, text, hidden = parse_framed(code, language)
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
        """Returns the members of one side of an assignment, such as `a` and `b` in `a, b`, or [] for a plain name."""
        rules = self.rules
        if node.type in rules.atoms:
            return []
        children = []
        for child in node.children:
            kind = child.type
            if kind in rules.wrappers:
                children += child.children
            elif kind != "," and kind not in rules.comments and kind not in rules.dropped:
                children += [child] * (1 + kind.count(" "))  # `not in` was two leaves in 2020
        head = rules.heads.get(node.type, 1)
        if len(children) <= head:
            head = 1
        parts = [[child] for child in children]
        parts[:head] = [children[:head]] if children else []
        return parts


def code_tokens(code: str, language: str) -> list[str]:
    """Returns the tokens that GraphCodeBERT reads: the leaves of the syntax tree, except comments and docstrings.

    Raises:
        UserError: the language is not in `DATA_FLOW_LANGUAGES`.
    """
    return Source(code, language).tokens


def remove_comments(code: str, language: str) -> str:
    """Returns `code` without comments, docstrings or blank lines.

    In Python and Ruby, the syntax tree identifies comments. In Java, JavaScript, PHP and Go, GraphCodeBERT's rule
    removes all text outside quotes that looks like a comment, even a `//` in a regular expression or a raw string.

    Raises:
        UserError: the language is not in `DATA_FLOW_LANGUAGES`.
    """
    rules = entry_of(DATA_FLOW_RULES, language)
    if rules.text_comments:
        return _cut_comments(code)
    root, text, _ = parse_framed(code, language)
    kept = bytearray(text)
    for node in reversed(_leaves(root, rules)[1]):
        del kept[node.start_byte : node.end_byte]
    return _cut_blank_lines(kept.decode("utf-8", "replace"))


def _leaves(root: Node, rules: Rules) -> tuple[list[Node], list[Node]]:
    """Returns the token nodes below `root`, and the nodes of comments and docstrings, as two lists."""
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
    """Returns the code without `//` and `/* */` comments, and without blank lines."""
    return _cut_blank_lines(_COMMENT_OR_STRING.sub(lambda match: " " if match[0][0] == "/" else match[0], code))


def _cut_blank_lines(code: str) -> str:
    """Returns the code without blank lines."""
    return "\n".join(line for line in code.split("\n") if line.strip())
