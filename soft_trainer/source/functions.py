"""Turns a source file into one row per function."""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from inspect import cleandoc
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from soft_trainer.source.definitions import (
    TEST_MACRO,
    component_call,
    defining_macro,
    definition_name,
    definitions,
    last_child,
    name_node,
    node_text,
    queries,
)
from soft_trainer.source.documentation import document_tokens, is_about_another, strip_comment, summary
from soft_trainer.source.grammars import captures_of
from soft_trainer.source.languages import PREPROCESSED, SOURCE_LANGUAGES

if TYPE_CHECKING:
    from tree_sitter import Node

Row = dict[str, Any]  # the columns of CodeSearchNet
Span = tuple[int, int]
# Blanks up to the end of the line, and the blank lines after it.
_REST_OF_LINE = re.compile(rb"[ \t]*(?:\n(?:[ \t]*\n)*|\Z)")
# Frames, and Doxygen's comments on what stands before them.
_NO_DOCUMENTATION = re.compile(r"/\*\*(?=[*/])|////|/\*[*!]<|//[/!]<")
# Bodies that are not in a field.
_BODIES = ("function_body", "block", "getter", "setter", "try_statement")
# In Rust, `/// Adds.` is short for `#[doc = "Adds."]`, which may be composed, and depend on a condition.
_DOC_ATTRIBUTE = re.compile(r"#\[\s*(?:cfg_attr\s*\(.*,\s*)?doc\s*=\s*(?:concat!\s*\(\s*)?((?:r#*)?\".*)\]", re.DOTALL)
_RUST_STRING = re.compile(r"r(?P<hashes>#*)\"(?P<raw>.*?)\"(?P=hashes)|\"(?P<text>(?:\\.|[^\"\\])*)\"", re.DOTALL)
_START = attrgetter("start_byte")
_STRINGS = ("string", "parenthesized_expression")  # the second may be a docstring in brackets
_MAX_OVERLOADS = 50


class Function(NamedTuple):
    """A named function in a file.

    Attributes:
        name: the name, qualified by the enclosing classes and modules, such as `Cart.total`.
        node: the syntax node.
        named: the node that includes the name. For `f = function () {}`, this is the parent of `node`.
        body: the syntax node of the body.
        broken: True if the function has a syntax error. Where there is a preprocessor, the body may have some: the
            grammars do not know its macros.
    """

    name: str
    node: Node
    named: Node
    body: Node
    broken: bool

    @property
    def lines(self) -> Span:
        """The function's first and last line. Line numbers start at 1."""
        return self.named.start_point[0] + 1, self.named.end_point[0] + 1


class FileFunctions:
    """The functions in one file. Making a row is slow, so `row` makes one row at a time, on request.

    Args:
        root: the root of the syntax tree.
        source: the text of the file.
        language: one of `SOURCE_LANGUAGES`.
        path: the file's path, which is stored in each row.

    Attributes:
        functions: the functions in order.
    """

    def __init__(self, root: Node, source: bytes, language: str, path: str):
        self.source = source
        self.language = language
        self.path = path
        self.table = SOURCE_LANGUAGES[language]
        self._root = root
        self._strings = set(self.table.strings.split())
        self._containers = set(self.table.containers.split())
        self._gap = re.compile(self.table.gap.encode())
        self.functions: list[Function] = list(self._found(root))

    @cached_property
    def _comments(self) -> list[Node]:
        """All comments and docstrings in the file, in order."""
        return comments(self._root, self.source, self.language)

    @cached_property
    def _captures(self) -> dict[str, list[Node]]:
        """The attributes and the signatures in the file."""
        return captures_of(queries(self.language)[2], self._root)

    @cached_property
    def _between(self) -> list[Node]:
        """The nodes that may separate a doc comment from its function, in order, without comments in attributes."""
        return _outermost([*self._comments, *self._captures.get("attribute", [])])

    @cached_property
    def _prototypes(self) -> list[Node]:
        """The functions without a body, in order."""
        return sorted(self._captures.get("signature", []), key=_START)

    @cached_property
    def _signatures(self) -> dict[str, list[Node]]:
        """The functions without a body, by name."""
        by_name = defaultdict(list)
        for node in self._prototypes:
            if name := node.child_by_field_name("name"):
                by_name[node_text(self.source, name)].append(node)
        return by_name

    def _found(self, root: Node) -> Iterator[Function]:
        """Yields the named functions that have a body, but only the first of several functions on the same lines."""
        end = 0
        lines = set()
        found = list(definitions(root, self.source, self.language))
        swallowing = set()  # nodes that only look like functions, because others or a namespace are inside
        if self.language in PREPROCESSED:  # one `#if` whose branches open two brackets swallows the rest of the file
            for definition in found:
                if definition.kind == "function" or definition.node.type == "namespace_definition":
                    swallowing.update(outer.node.id for outer in definition.around[-1:] if outer.kind == "function")
        for definition in found:
            node = definition.node
            if (
                definition.kind != "function"
                or node.id in swallowing
                or (node.end_byte <= end and not self.table.nested)
            ):
                continue
            end = max(end, node.end_byte)
            named = node
            if name_node(node) is None:  # `f = function () {}`
                named = component_call(node, self.source).parent
                if not self.table.wrappers.get(named.type):
                    continue
            scope = [outer.name for outer in definition.around if outer.kind == "container"]
            fields = map(node.child_by_field_name, ("value", "accessors", "body"))
            body = next(filter(None, fields), None) or last_child(node, *_BODIES)
            macro = defining_macro(self.source, node)
            is_test = macro and TEST_MACRO.match(macro[0])  # `TEST_F(CartTest, Total) {`
            if body is None or not definition.name or is_test:
                continue
            name = ".".join([*scope, definition.name])
            broken = node.has_error
            if self.language in PREPROCESSED:
                broken = body.children[-1].is_missing or any(each.has_error for each in node.children if each != body)
            function = Function(name, node, named, body, broken)
            if function.lines not in lines:
                lines.add(function.lines)
                yield function

    def prototypes(self) -> Iterator[tuple[str, str]]:
        """Yields the qualified name and the documentation of each documented function in C or C++ without a body."""
        for node in self._prototypes:
            name = name_node(node)
            if name is None or name.parent.type != "function_declarator":
                continue
            documentation = self.table.style.strip(self._comment_before(self._outermost(node).start_byte)).strip()
            if documentation:
                scope = [definition_name(self.source, node, [], {})]
                outer = node.parent
                while outer is not None:
                    if outer.type in self._containers:
                        scope.insert(0, definition_name(self.source, outer, [], {}))
                    outer = outer.parent
                yield ".".join(filter(None, scope)), documentation

    def rows(self) -> list[Row]:
        """Returns the row of each function."""
        return list(map(self.row, self.functions))

    def row(self, function: Function) -> Row:
        """Returns a function's row with CodeSearchNet's columns, except `repo` and `partition`.

        These depend on the package. `docstring` and `docstring_tokens` are empty if a function has no documentation.
        If the documentation consists only of tags, only `docstring_tokens` is empty.
        """
        first, last = function.lines
        docstring = self.docstring(function)
        return {
            "path": self.path,
            "func_name": function.name,
            "original_string": node_text(self.source, function.named),
            "language": self.language,
            "code": _without(self.source, function.named, self._comment_spans(function)),
            "code_tokens": self.tokens(function),
            "docstring": docstring,
            "docstring_tokens": document_tokens(summary(docstring, self.table.style)),
            "url": f"{self.path}#L{first}-L{last}",
        }

    def tokens(self, function: Function) -> list[str]:
        """Returns a function's tokens without comments. A string is a single token."""
        skipped = set(self._comment_spans(function))
        tokens = []
        stack = [function.named]
        while stack:
            node = stack.pop()
            if node.byte_range in skipped:
                continue
            if node.child_count and node.type not in self._strings:
                stack += reversed(node.children)
                continue
            text = node_text(self.source, node).strip()
            if text not in ("", "\\"):
                tokens.append(text)
        return tokens

    def _comment_spans(self, function: Function) -> list[Span]:
        """Returns the byte range of each comment in a function, as (start, end). The end is exclusive."""
        spans = []
        for node in comments(function.named, self.source, self.language):
            # An inner function that consists of a docstring would not parse without it.
            alone = node.type == "expression_statement" and node.parent.named_child_count == 1
            if not alone or node.parent == function.body:
                spans.append(node.byte_range)
        return spans

    def docstring(self, function: Function) -> str:
        """Returns a function's documentation without delimiters, or "" if it has none."""
        if not self.table.docstring_in_body:
            inner = []
            for node in function.body.named_children:
                text = node_text(self.source, node).rstrip()
                if not text.startswith(self.table.inner_doc):
                    break
                inner += _as_lines(strip_comment(text).strip())
            return self.table.style.strip("\n".join([self._doc_comment(function), *inner]).strip()).strip()
        for first in function.body.named_children[:1]:
            return cleandoc(_string_statement(first, self.source) or "").strip()
        return ""

    def _doc_comment(self, function: Function) -> str:
        """Returns the doc comment before a function, between its annotations and its name, or before a signature."""
        outermost = self._outermost(function.named)
        found = self._comment_before(outermost.start_byte)
        name = name_node(function.node)
        if found or name is None:
            return found
        first = bisect_left(self._comments, function.node.start_byte, key=_START)
        last = bisect_left(self._comments, name.start_byte, key=_START)
        if first < last:
            return self._comment_before(self._end(self._comments[last - 1]))
        signatures = self._signatures.get(node_text(self.source, name), [])
        last = bisect_left(signatures, name.start_byte, key=_START)
        for signature in reversed(signatures[max(last - _MAX_OVERLOADS, 0) : last]):
            other = self._outermost(signature)
            if other.parent == outermost.parent and (found := self._comment_before(other.start_byte)):
                return found
        return ""

    def _outermost(self, node: Node) -> Node:
        """Returns the outermost wrapper of a function, or the function if it has none."""
        node = component_call(node, self.source)
        while node.parent is not None and node.parent.type in self.table.wrappers:
            node = node.parent
        return node

    def _end(self, node: Node) -> int:
        """Returns a node's end. In some grammars, a comment ends at the start of the next line."""
        return node.start_byte + len(self.source[node.start_byte : node.end_byte].rstrip())

    def _comment_before(self, at: int) -> str:
        """Returns the nearest doc comment before byte `at`, or "" if code comes between.

        Attributes, decorators, comments that are not documentation, and what the language's `gap` matches are skipped.
        Line comments on consecutive lines count as one comment.
        """
        code = self.source[at : at + 500].decode(errors="replace")
        lines = []
        for index in reversed(range(bisect_left(self._between, at, key=_START))):
            node = self._between[index]
            gap = self.source[self._end(node) : at]
            joined = self.table.joined or not lines
            if not self._gap.fullmatch(gap) or (gap.count(b"\n") > 1 and not joined):
                break
            at = node.start_byte
            text = node_text(self.source, node).rstrip()
            if not node.type.endswith("comment"):  # an attribute
                if found := _DOC_ATTRIBUTE.fullmatch(text):
                    strings = _RUST_STRING.finditer(found[1])
                    lines[:0] = _as_lines("".join(one["raw"] or _unescaped(one["text"] or "") for one in strings))
                continue
            is_block = text.startswith(("/*", "=begin"))
            if is_block and not joined:
                break
            if not text.startswith(self.table.doc_prefix) or _NO_DOCUMENTATION.match(text):
                continue
            on_line = self.source[self.source.rfind(b"\n", 0, at) + 1 : at].strip()
            after_code = on_line and not on_line.endswith(b"*/")
            begins_file = index == 0 and not self.source[:at].strip() and gap.count(b"\n") > 1
            if after_code or is_about_another(text, code, begins_file):
                break
            if is_block and not self.table.joined:
                return text
            lines[:0] = _as_lines(strip_comment(text).strip()) if is_block else [text]
        return "\n".join(lines)


def _unescaped(text: str) -> str:
    """Returns the value of a string literal in Rust, given the text between the quotes."""
    escapes = {"n": "\n", "t": "\t"}
    return re.sub(r"\\(\n\s*|.)", lambda found: escapes.get(found[1], found[1].strip()), text)


def _as_lines(text: str) -> list[str]:
    """Returns a text as line comments in Rust."""
    return [f"/// {line.removeprefix(' ')}" for line in text.splitlines()]


def comments(root: Node, source: bytes, language: str) -> list[Node]:
    """Returns the nodes of all comments and docstrings below `root`, in order."""
    nodes = captures_of(queries(language)[1], root).get("comment", [])
    return _outermost(
        [node for node in nodes if node.type.endswith("comment") or _string_statement(node, source) is not None]
    )


def _outermost(nodes: list[Node]) -> list[Node]:
    """Returns the nodes that are in none of the others, in order. A docstring in brackets may contain comments."""
    kept = []
    for node in sorted(nodes, key=_START):
        if not kept or node.start_byte >= kept[-1].end_byte:
            kept.append(node)
    return kept


def _string_statement(node: Node, source: bytes) -> str | None:
    """Returns the string of a statement in Python that is a string literal, or None for an f-string and other code."""
    if node.type != "expression_statement" or not node.named_children[0].type.endswith(_STRINGS):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `\d` in the user's file
        try:
            value = ast.literal_eval(node_text(source, node))
        except (SyntaxError, ValueError):
            return None
    return value.encode(errors="replace").decode() if isinstance(value, str) else None


def _without(source: bytes, node: Node, spans: list[Span]) -> str:
    """Returns a node's text without the bytes in `spans`.

    Lines that become blank are removed, together with the blank lines after them.
    """
    text = source[node.start_byte : node.end_byte]
    for start, end in reversed(spans):
        before = text[: start - node.start_byte]
        rest_at = end - node.start_byte
        blank = _REST_OF_LINE.match(text, rest_at)
        if blank:
            before = before.rstrip(b" \t")
            if not before or before.endswith(b"\n"):
                rest_at = blank.end()
        text = before + text[rest_at:]
    return text.decode(errors="replace").rstrip()
