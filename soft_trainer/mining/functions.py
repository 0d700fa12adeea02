"""Turns one source file into rows, a row for every function."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from tree_sitter import Node, Query, QueryCursor

from soft_trainer.dataflow.grammars import parser
from soft_trainer.mining.definitions import definitions, last_child, name_node
from soft_trainer.mining.documentation import document_tokens, summary
from soft_trainer.mining.languages import SOURCE_LANGUAGES, SourceLanguage

Row = dict[str, Any]
Span = tuple[int, int]


def functions(root: Node, source: bytes, language: str, path: str) -> Iterator[tuple[Row, Node]]:
    """Yields the named functions of `source` that have a body, in order, each with its syntax node.

    A row has CodeSearchNet's columns except `repo` and `partition`, which depend on the package. A function without
    documentation has an empty `docstring`. One with tags alone has a `docstring`, but no `docstring_tokens`.
    """
    file = FileFunctions(root, source, language)
    for function in file.functions:
        yield file.row(function, path), function.node


class Function(NamedTuple):
    """A named function: its syntax node, the node around it that names it, and its body."""

    name: str
    node: Node
    named: Node
    body: Node

    @property
    def lines(self) -> Span:
        """The first and the last line, counted from 1."""
        return self.named.start_point[0] + 1, self.named.end_point[0] + 1


class FileFunctions:
    """The functions of one file. They are found at once; a row, which costs most of the time, is made on request."""

    def __init__(self, root: Node, source: bytes, language: str):
        self.source, self.language, self.table = source, language, SOURCE_LANGUAGES[language]
        self._comments = _Comments(source, _comment_nodes(root, language), self.table)
        self.functions: list[Function] = []
        end, places = 0, set()
        for found in definitions(root, source, language):
            node = named = found.node
            if found.kind != "function" or (node.end_byte <= end and not self.table.nested):
                continue
            end = max(end, node.end_byte)
            body = node.child_by_field_name("body") or last_child(node, "function_body")
            if name_node(node) is None:  # `f = function () {}`
                named = node.parent
                if not self.table.wrappers.get(named.type):
                    continue
            scope = [outer.name for outer in found.around if outer.kind == "container"]
            function = Function(".".join([*scope, found.name]), node, named, body)
            if body is not None and found.name and function.lines not in places:
                places.add(function.lines)
                self.functions.append(function)

    def row(self, function: Function, path: str) -> Row:
        """The row of a function; see `functions`."""
        named, (first, last) = function.named, function.lines
        docstring = self._comments.docstring(named, function.body)
        spans = self._comments.between(named.start_byte, named.end_byte, function.body)
        return {
            "path": path,
            "func_name": function.name,
            "original_string": _node_text(named),
            "language": self.language,
            "code": _without(self.source, named, spans),
            "code_tokens": _tokens(self.source, named, spans, self.table.strings),
            "docstring": docstring,
            "docstring_tokens": document_tokens(summary(docstring, self.table.style)) if docstring else [],
            "url": f"{path}#L{first}-L{last}",
        }


def comment_spans(root: Node, language: str) -> list[Span]:
    """The byte spans of every comment and docstring below `root`."""
    return [(node.start_byte, node.end_byte) for node in _comment_nodes(root, language)]


def _comment_nodes(root: Node, language: str) -> list[Node]:
    return QueryCursor(_comment_query(language)).captures(root).get("comment", [])


@cache
def _comment_query(language: str) -> Query:
    return Query(parser(language).language, SOURCE_LANGUAGES[language].comments)


class _Comments:
    """The comments of a file: their places, and the documentation of each function."""

    def __init__(self, source: bytes, nodes: list[Node], table: SourceLanguage):
        self.source, self.table = source, table
        self.nodes = sorted(nodes, key=lambda node: node.start_byte)
        self.starts = [node.start_byte for node in self.nodes]
        self.by_last_row = {_last_row(node): node for node in self.nodes}

    def between(self, start: int, end: int, body: Node) -> list[Span]:
        """The byte spans of the comments in a function, which goes from `start` to `end` and has this `body`."""
        inside = self.nodes[bisect_left(self.starts, start) : bisect_left(self.starts, end)]
        # An inner function that consists of a docstring would not parse without it.
        return [
            (node.start_byte, node.end_byte)
            for node in inside
            if node.type != "expression_statement" or node.parent.named_child_count > 1 or node.parent == body
        ]

    def docstring(self, function: Node, body: Node) -> str:
        """The documentation of `function` without delimiters, empty if it has none."""
        if self.table.docstring_in_body:
            first = body.named_children[0] if body.named_child_count else None
            is_string = first is not None and first.type == "expression_statement"
            literal = first.named_children[0] if is_string else None
            return self.table.strip(_node_text(literal)) if literal is not None and literal.type == "string" else ""
        comment = self._before(function)
        return self.table.strip(comment).strip() if comment else ""

    def _before(self, function: Node) -> str:
        """The doc comment that ends on the line above `function`. Line comments are joined."""
        while function.parent is not None and function.parent.type in self.table.wrappers:
            function = function.parent
        row, group = function.start_point[0] - 1, [""]
        while (comment := self.by_last_row.get(row)) is not None and self._alone(comment):
            group.insert(0, _node_text(comment))
            row = comment.start_point[0] - 1
            if group[0].startswith(("/*", "=begin")):
                del group[1:]
                break
        return "\n".join(group) if group[0].startswith(self.table.doc_prefix) else ""

    def _alone(self, comment: Node) -> bool:
        """True if `comment` is the first thing on its line."""
        start = comment.start_byte
        return not self.source[self.source.rfind(b"\n", 0, start) + 1 : start].strip()


def _last_row(comment: Node) -> int:
    """The row of the comment's last character. In some grammars a comment ends at the start of the next line."""
    return comment.end_point[0] - (comment.end_point[1] == 0)


def _without(source: bytes, node: Node, spans: list[Span]) -> str:
    """The text of `node` without `spans`, nor the lines that become blank, nor the blank lines after them."""
    pieces, at = [], node.start_byte
    for start, end in spans:
        line_start = max(source.rfind(b"\n", 0, start) + 1, at)
        rest = _REST_OF_LINE.match(source, end, node.end_byte)
        if rest and not source[line_start:start].strip():
            pieces.append(source[at:line_start])
            at = rest.end()
        else:
            pieces.append(source[at:start].rstrip(b" \t") if rest else source[at:start])
            at = end
    pieces.append(source[at : node.end_byte])
    return b"".join(pieces).decode(errors="replace").rstrip()


# blanks up to the end of the line, and the blank lines after it
_REST_OF_LINE = re.compile(rb"[ \t]*(?:\n(?:[ \t]*\n)*|\Z)")


def _tokens(source: bytes, node: Node, spans: list[Span], strings: frozenset[str]) -> list[str]:
    """The leaves of `node` outside `spans`. A string is one leaf."""
    skipped, tokens = dict(spans), []
    cursor, depth = node.walk(), 0
    while True:
        leaf = cursor.node
        comment = skipped.get(leaf.start_byte) == leaf.end_byte
        if not comment and leaf.type not in strings and cursor.goto_first_child():
            depth += 1
            continue
        text = source[leaf.start_byte : leaf.end_byte].strip()
        if not comment and text and text != b"\\":
            tokens.append(text.decode(errors="replace"))
        while not cursor.goto_next_sibling():
            if depth == 0 or not cursor.goto_parent():
                return tokens
            depth -= 1
            if depth == 0:
                return tokens


def _node_text(node: Node) -> str:
    """The source text of `node`."""
    return node.text.decode(errors="replace")
