"""Turns a source file into rows, one for each function."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from tree_sitter import Node, QueryCursor

from soft_trainer.mining.definitions import definitions, last_child, name_node, queries
from soft_trainer.mining.documentation import document_tokens, summary
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.rules import Row

Span = tuple[int, int]
# blanks up to the end of the line, and the blank lines after it
_REST_OF_LINE = re.compile(rb"[ \t]*(?:\n(?:[ \t]*\n)*|\Z)")
_START = attrgetter("start_byte")


def functions(root: Node, source: bytes, language: str, path: str) -> Iterator[tuple[Row, Node]]:
    """Yields the named functions of `source` that have a body, in order, each with its syntax node.

    A row has CodeSearchNet's columns except `repo` and `partition`, which depend on the package. A function without
    documentation has an empty `docstring`. One with tags alone has a `docstring`, but no `docstring_tokens`.
    """
    file = FileFunctions(root, source, language)
    for function in file.functions.values():
        yield file.row(function, path), function.node


class Function(NamedTuple):
    """A named function: its parameters, its syntax node, the node around it that names it, and its body."""

    name: str
    parameters: str
    node: Node
    named: Node
    body: Node

    @property
    def lines(self) -> Span:
        """The first and the last line, counted from 1."""
        return self.named.start_point[0] + 1, self.named.end_point[0] + 1


class FileFunctions:
    """The functions of one file. They are found at once; a row, which costs most of the time, is made on request.

    Args:
        root: the syntax tree; None for a file that cannot be read, which has no functions.

    Attributes:
        functions: in order, each by a name that no other function of the file has: `Cart.total`, of overloads
            `Cart.total(int count)`, and `Cart.total(int count)~2` for a second one with the same parameters.
    """

    def __init__(self, root: Node | None, source: bytes, language: str):
        self.source = source
        self.language = language
        self.table = SOURCE_LANGUAGES[language]
        self.functions: dict[str, Function] = {}
        if root is None:
            return
        self._comments = comments(root, language)
        # In some grammars a comment ends at the start of the next line.
        self._by_last_row = {node.end_point[0] - (node.end_point[1] == 0): node for node in self._comments}
        found = list(self._found(root))
        overloads = Counter(function.name for function in found)
        seen = Counter()
        for function in found:
            own = function.name
            if overloads[own] > 1:
                own += f"({function.parameters})"
            name = own
            while name in self.functions:  # also if another function has the very name `total~2`
                seen[own] += 1
                name = f"{own}~{1 + seen[own]}"
            self.functions[name] = function

    def _found(self, root: Node) -> Iterator[Function]:
        """Yields the named functions that have a body, at most one on the same lines."""
        end = 0
        places = set()
        for found in definitions(root, self.source, self.language):
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
            parameters = _parameters(self.source, node)
            function = Function(".".join([*scope, found.name]), parameters, node, named, body)
            if body is not None and found.name and function.lines not in places:
                places.add(function.lines)
                yield function

    def counterpart(self, name: str, other: FileFunctions) -> str | None:
        """Returns the name of a function in another version of the file, None if it is not there.

        Overloads are told apart by their parameters.
        """
        if name in other.functions:
            return name
        own = self.functions[name]
        for key, function in other.functions.items():
            if (function.name, function.parameters) == (own.name, own.parameters):
                return key
        return None

    def row(self, function: Function, path: str) -> Row:
        """Returns the row of a function; see `functions`."""
        first, last = function.lines
        docstring = self._docstring(function)
        return {
            "path": path,
            "func_name": function.name,
            "original_string": _node_text(self.source, function.named),
            "language": self.language,
            "code": _without(self.source, function.named, self._comment_spans(function)),
            "code_tokens": self.tokens(function),
            "docstring": docstring,
            "docstring_tokens": document_tokens(summary(docstring, self.table.style)),
            "url": f"{path}#L{first}-L{last}",
        }

    def tokens(self, function: Function) -> list[str]:
        """Returns the tokens of a function without comments. A string is one token."""
        return _tokens(self.source, function.named, self._comment_spans(function), self.table.strings)

    def _comment_spans(self, function: Function) -> list[Span]:
        """Returns the first byte of every comment in a function, and the byte after it."""
        first = bisect_left(self._comments, function.named.start_byte, key=_START)
        last = bisect_left(self._comments, function.named.end_byte, key=_START)
        spans = []
        for node in self._comments[first:last]:
            # An inner function that consists of a docstring would not parse without it.
            alone = node.type == "expression_statement" and node.parent.named_child_count == 1
            if not alone or node.parent == function.body:
                spans.append(node.byte_range)
        return spans

    def at(self, lines: Sequence[range]) -> set[str]:
        """Returns the names of the innermost functions that hold these lines."""
        owners: dict[int, str] = {}
        wanted = set().union(*lines)
        for name, function in self.functions.items():  # outer functions come before those inside them
            first, last = function.lines
            owners |= dict.fromkeys(wanted.intersection(range(first, last + 1)), name)
        return set(owners.values())

    def _docstring(self, function: Function) -> str:
        """Returns the documentation of a function without delimiters, empty if it has none."""
        if not self.table.docstring_in_body:
            return self.table.style.strip(self._comment_above(function.named)).strip()
        first = function.body.named_child(0)
        if first is None or first.type != "expression_statement" or first.named_child(0).type != "string":
            return ""
        return self.table.style.strip(_node_text(self.source, first.named_child(0)))

    def _comment_above(self, node: Node) -> str:
        """Returns the doc comment that ends on the line above a function. Line comments are joined."""
        while node.parent is not None and node.parent.type in self.table.wrappers:
            node = node.parent
        row = node.start_point[0] - 1
        group = [""]
        while (comment := self._by_last_row.get(row)) is not None:
            line_start = self.source.rfind(b"\n", 0, comment.start_byte) + 1
            if self.source[line_start : comment.start_byte].strip():
                break  # it stands behind code
            group.insert(0, _node_text(self.source, comment))
            row = comment.start_point[0] - 1
            if group[0].startswith(("/*", "=begin")):
                del group[1:]
                break
        if group[0].startswith(self.table.doc_prefix):
            return "\n".join(group)
        return ""


def _parameters(source: bytes, node: Node) -> str:
    """Returns the parameters of a function in one line, without the brackets around them."""
    parameters = node.child_by_field_name("parameters")
    declarator = node
    while parameters is None and (declarator := declarator.child_by_field_name("declarator")):  # in C
        parameters = declarator.child_by_field_name("parameters")
    if parameters is None:
        return ""
    return " ".join(_node_text(source, parameters)[1:-1].split())


def comments(root: Node, language: str) -> list[Node]:
    """Returns the nodes of every comment and docstring below `root`, in order."""
    nodes = QueryCursor(queries(language)[1]).captures(root).get("comment", [])
    return sorted(nodes, key=_START)


def _without(source: bytes, node: Node, spans: list[Span]) -> str:
    """Returns the text of `node` without `spans`, the lines that become blank, and blank lines after those."""
    pieces = []
    at = node.start_byte
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


def _tokens(source: bytes, node: Node, spans: list[Span], strings: frozenset[str]) -> list[str]:
    """Returns the leaves of `node` outside `spans`. A string is one leaf."""
    skipped = dict(spans)
    tokens = []
    cursor = node.walk()
    while True:
        leaf = cursor.node
        comment = skipped.get(leaf.start_byte) == leaf.end_byte
        if not comment and leaf.type not in strings and cursor.goto_first_child():
            continue
        text = source[leaf.start_byte : leaf.end_byte].strip()
        if not comment and text and text != b"\\":
            tokens.append(text.decode(errors="replace"))
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return tokens


def _node_text(source: bytes, node: Node) -> str:
    """Returns the source text of `node`. `node.text` would call the parser's `read` for every byte."""
    return source[node.start_byte : node.end_byte].decode(errors="replace")
