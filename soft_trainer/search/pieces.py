"""One file -> the pieces that are searched: functions, classes, and the rest in blocks of lines."""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

from tree_sitter import Node, Query, QueryCursor

from soft_trainer.dataflow.grammars import parser
from soft_trainer.mining.functions import MAX_ERROR_CHILDREN, name_node
from soft_trainer.mining.languages import SOURCE_LANGUAGES

# a longer function is cut; encoders read some 30 lines
MAX_LINES = 60
# fewer lines between two functions belong to the second
MIN_LINES = 4
# a grammar may take minutes for a file that was made to that end; the rest of the file is then plain lines
PARSE_SECONDS = 2.0
_READ_BYTES = 1 << 15
_MAX_SCOPE = 4
_COMMENT_OR_DECORATOR = re.compile(rb"\s*(#|//|/\*|\*|--|@|\"\"\"|''')")
# a name that is given a value at the start of a line: a constant, an alias, an export
_ASSIGNED = re.compile(
    rb"^(?:(?:export|default|pub|const|let|var|val|static|final|declare|readonly)\s+)*([A-Za-z_$][\w$]*)"
    rb"\s*(?::[^=\n]{1,80})?=(?![=>])",
    re.MULTILINE,
)
_MAX_ASSIGNED = 20
_NAME = re.compile(r"[\w$]+")
_ENDINGS = {ending: name for name, table in SOURCE_LANGUAGES.items() for ending in table.extensions}
_CPP_HEADER = re.compile(rb"^\s*(class|namespace|template)\b|\b\w+::\w", re.MULTILINE)
OTHER_LANGUAGES = {
    ".md": "markdown", ".markdown": "markdown", ".rst": "restructuredtext", ".txt": "text", ".json": "json",
    ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".ini": "ini", ".cfg": "ini", ".xml": "xml", ".html": "html",
    ".css": "css", ".scss": "css", ".sql": "sql", ".sh": "shell", ".bash": "shell", ".swift": "swift",
    ".scala": "scala", ".lua": "lua", ".pl": "perl", ".r": "r", ".ex": "elixir", ".exs": "elixir", ".hs": "haskell",
    ".dart": "dart", ".zig": "zig", ".vue": "vue", ".proto": "protobuf", ".tf": "terraform", ".jl": "julia",
}  # fmt: skip


@dataclass(slots=True)
class Piece:
    """Lines `start` to `end` of a file, counted from 1, both included.

    Attributes:
        name: of the function or class that the lines belong to, its classes in front; empty for other lines.
        defines: the plain names that are defined here.
    """

    start: int
    end: int
    name: str = ""
    defines: list[str] = field(default_factory=list)


def language_of(path: str, source: bytes) -> str:
    """The language of a file by its ending; "text" where the ending says nothing."""
    ending = path[path.rfind(".") :].lower() if "." in path.rsplit("/", 1)[-1] else ""
    language = _ENDINGS.get(ending) or OTHER_LANGUAGES.get(ending, "text")
    return "cpp" if ending == ".h" and _CPP_HEADER.search(source) else language


def split(source: bytes, language: str) -> list[Piece]:
    """The pieces of a file, in order; no line is in two of them, and every line with a word is in one."""
    lines = source.split(b"\n")
    spans = _definitions(source, language) if language in SOURCE_LANGUAGES else []
    pieces: list[Piece] = []
    line = 1
    for span in _leaves(spans, lines):
        start = _with_comments(lines, max(span.start, line), line)
        if span.end < line:  # a second definition on the line of the one before
            pieces[-1].defines += span.defines
            continue
        if start - line < MIN_LINES and not (pieces and pieces[-1].name == span.name):
            start = line
        pieces += _blocks(lines, line, start - 1, Piece(line, start - 1, _scope(spans, line)), language)
        pieces += _blocks(lines, start, span.end, span, language)
        line = span.end + 1
    pieces += _blocks(lines, line, len(lines), Piece(line, len(lines)), language)
    return pieces


def _blocks(lines: list[bytes], start: int, end: int, piece: Piece, language: str) -> list[Piece]:
    """`piece` as blocks of at most `MAX_LINES` of the lines `start` to `end`, those without a word left out."""
    while start <= end and not lines[start - 1].strip():
        start += 1
    while start <= end and not lines[end - 1].strip():
        end -= 1
    blocks = []
    count = -(-(end - start + 1) // MAX_LINES)
    for number in range(count):
        first = start + (end - start + 1) * number // count
        last = start + (end - start + 1) * (number + 1) // count - 1
        text = b"\n".join(lines[first - 1 : last])
        if not re.search(rb"\w", text):
            continue
        defines = list(piece.defines) if not blocks else []
        if not piece.name and language in SOURCE_LANGUAGES:
            defines += [name.decode() for name in _ASSIGNED.findall(text)[:_MAX_ASSIGNED]]
        blocks.append(Piece(first, last, piece.name, defines))
    return blocks


def _with_comments(lines: list[bytes], start: int, least: int) -> int:
    """The first line of the comments and decorators right above line `start`, not above line `least`."""
    if start > least + 1 and not lines[start - 2].strip() and lines[start - 3].rstrip().endswith(b"*/"):
        start -= 1
    while start > least and _COMMENT_OR_DECORATOR.match(lines[start - 2]):
        start -= 1
    return start


def _leaves(spans: list[Piece], lines: list[bytes]) -> list[Piece]:
    """Spans that are pieces: functions, types, and of a class (or a long function) its head and its members."""
    leaves: list[Piece] = []
    for place, span in enumerate(spans):
        inner = spans[place + 1] if place + 1 < len(spans) and spans[place + 1].start <= span.end else None
        if inner is not None:
            end = _with_comments(lines, inner.start, span.start + 1) - 1
            leaves.append(Piece(span.start, max(end, span.start), span.name, span.defines))
        else:
            leaves.append(span)
    return leaves


def _scope(spans: list[Piece], line: int) -> str:
    """The name of the innermost span around a line; empty where there is none."""
    place = bisect_right(spans, line, key=lambda span: span.start)
    for span in reversed(spans[max(place - 50, 0) : place]):
        if span.end >= line:
            return span.name
    return ""


def _definitions(source: bytes, language: str) -> list[Piece]:
    """Functions, classes and types in order, outer ones before inner ones.

    Functions inside a function that is no longer than `MAX_LINES` belong to it.
    """
    deadline = time.monotonic() + PARSE_SECONDS

    def read(at: int, _) -> bytes:
        # the only way to stop a parser of tree-sitter 0.26: to tell it that the text ends here
        return source[at : at + _READ_BYTES] if time.monotonic() < deadline else b""

    root = parser(language).parse(source if len(source) < _READ_BYTES else read).root_node
    broken = any(node.is_error and node.child_count > MAX_ERROR_CHILDREN for node in (root, *root.children[:100]))
    if broken or time.monotonic() > deadline:
        return []
    captures = QueryCursor(_query(language)).captures(root)
    order = ("wrapper", "container", "type", "function")
    nodes = [
        (node.start_byte, -node.end_byte, order.index(kind), node) for kind in captures for node in captures[kind]
    ]
    table, spans, hidden_until = SOURCE_LANGUAGES[language], [], -1
    # Both hold what stands around a node. To ask each node for its parent takes quadratic time in a deep tree.
    scopes: list[tuple[int, str]] = []
    wrappers: list[Node] = []
    for start, negative_end, kind, node in sorted(nodes, key=lambda entry: entry[:3]):
        end = -negative_end
        while scopes and scopes[-1][0] <= start:
            scopes.pop()
        while wrappers and wrappers[-1].end_byte <= start:
            wrappers.pop()
        if order[kind] == "wrapper":
            wrappers.append(node)
            continue
        if start < hidden_until or (node.type in _NEED_BODY and node.child_by_field_name("body") is None):
            continue
        around = [wrapper for wrapper in wrappers[-_MAX_SCOPE:] if wrapper.end_byte <= end + 1]
        name = _name(source, node, around, table.wrappers)
        if not name:
            continue
        first, last = min([node, *around], key=lambda node: node.start_byte).start_point.row, node.end_point.row
        last -= node.end_point.column == 0 and last > first
        scope = [part for _, part in scopes[-_MAX_SCOPE:]]
        plain = _NAME.findall(name.rsplit(".", 1)[-1])
        spans.append(Piece(first + 1, last + 1, ".".join([*scope, name]), plain[-1:]))
        if order[kind] == "container" or last - first >= MAX_LINES:
            scopes.append((end, name))
        else:
            hidden_until = end
    return spans


# in C, `struct point p` names a structure and does not define it
_NEED_BODY = {"struct_specifier", "union_specifier", "enum_specifier", "class_specifier"}


def _name(source: bytes, node: Node, around: list[Node], naming: dict[str, str | None]) -> str:
    """The name of a definition, or of what it is assigned to; one line, without type parameters."""
    named = name_node(node)
    for wrapper in reversed(around):
        if named is None and (field_name := naming.get(wrapper.type)):
            named = wrapper.child_by_field_name(field_name)
    if named is None:
        return ""
    text = _text(source, named).split("<")[0].replace("::", ".")
    text = "".join(text.removeprefix("this.").strip("\"'` \n").split())
    if receiver := node.child_by_field_name("receiver"):
        text = ".".join([*_NAME.findall(_text(source, receiver).split("[")[0])[-1:], text])
    return text


def _text(source: bytes, node: Node) -> str:
    """The first 200 bytes of a node. `node.text` would call `read` for every byte."""
    return source[node.start_byte : min(node.end_byte, node.start_byte + 200)].decode(errors="replace")


@cache
def _query(language: str) -> Query:
    """Captures every function, class, type and what may stand around a function, in one pass."""
    table = SOURCE_LANGUAGES[language]
    wrappers = [*table.wrappers, *(["decorated_definition"] if language == "python" else [])]
    kinds = {"function": table.functions, "container": table.containers, "type": table.types, "wrapper": wrappers}
    alternatives = [
        f"[{' '.join(f'({node})' for node in sorted(nodes))}] @{kind}" for kind, nodes in kinds.items() if nodes
    ]
    return Query(parser(language).language, "\n".join(alternatives))
