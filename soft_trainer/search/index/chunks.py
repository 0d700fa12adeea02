"""Splits files into searchable chunks: functions, classes, and blocks of the remaining lines."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from soft_trainer.search.index.notebooks import cells
from soft_trainer.source.definitions import definitions, parse_file
from soft_trainer.source.languages import LANGUAGE_OF_ENDING, SOURCE_LANGUAGES, source_language

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_LINES = 60  # longer functions are split; encoders read about 30 lines
MIN_LINES = 4  # fewer lines between two functions are added to the second function
PARSE_SECONDS = 2.0  # a file that takes longer is split into plain lines
_MAX_SCOPE = 4
# A line of a comment, a decorator, or a macro before a function in C.
_COMMENT_OR_DECORATOR = re.compile(rb"\s*(#|//|/\*|\*|--|@|\"\"\"|'''|_*[A-Z][A-Z0-9_]+(\([^()]*\))?\s*$)")
# Names that a line outside functions assigns or declares: any name at the start of the line, such as a constant or an
# export, and a constant in capitals anywhere, such as one of a class.
_ASSIGNED = rb"\s*(?::[^=\n]{1,80})?=(?![=>])"
_CONSTANT = re.compile(
    rb"(?:(?:export|default|pub(?:\([\w:]+\))?|const|let|var|val|static|mut|final|declare|readonly)\s+)*"
    rb"(?:(?:module\.)?exports\.)?([A-Za-z_$][\w$]*)"
    + _ASSIGNED
    + rb"|\s*(?:[^\s=]+\s+)*?([A-Z][A-Z0-9_]+)"
    + _ASSIGNED
)
_CONSTANTS = {
    "go": re.compile(rb"(?:(?:const|var)\s+|\t)([A-Za-z_]\w*)(?:\s+[\w.*\[\]]+)?\s*(?:=(?!=)|$|//)"),
    "ruby": re.compile(
        rb"\s*(?:([A-Z]\w*)\s*=(?![=>~])|alias\s+:?([\w?!=]+)|alias_method[\s(]+[:\"']([\w?!=]+)"
        rb"|attr_(?:accessor|reader|writer)[\s(]+:(\w+)(?:,\s*:(\w+))?(?:,\s*:(\w+))?(?:,\s*:(\w+))?(?:,\s*:(\w+))?)"
    ),
}
# The first paragraph of a docstring, of a block comment, or a group of line comments.
_PARAGRAPH = re.compile(
    rb'"{3}(.*?)(?:"{3}|\n\s*\n)|/\*[*!](.*?)(?:\*/|\n\s*\*\s*\n)|((?:^[ \t]*(?://|#)[^\n]*\n)+)',
    re.DOTALL | re.MULTILINE,
)
_MAX_BEFORE_PARAGRAPH = 2000  # bytes
_NAME = re.compile(r"[\w$]+")

OTHER_LANGUAGES = {
    ".md": "markdown", ".markdown": "markdown", ".rst": "restructuredtext", ".txt": "text", ".json": "json",
    ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".ini": "ini", ".cfg": "ini", ".xml": "xml", ".html": "html",
    ".css": "css", ".scss": "css", ".sql": "sql", ".sh": "shell", ".bash": "shell", ".swift": "swift",
    ".scala": "scala", ".lua": "lua", ".pl": "perl", ".r": "r", ".ex": "elixir", ".exs": "elixir", ".hs": "haskell",
    ".dart": "dart", ".zig": "zig", ".vue": "vue", ".proto": "protobuf", ".tf": "terraform", ".jl": "julia",
    ".pyi": "python",
}  # fmt: skip

# The programs that run scripts, by the beginning of their names.
_INTERPRETERS = {
    b"python": "python", b"pypy": "python", b"ruby": "ruby", b"node": "javascript", b"php": "php", b"perl": "perl",
    b"sh": "shell", b"bash": "shell", b"dash": "shell", b"ksh": "shell", b"zsh": "shell", b"lua": "lua",
    b"Rscript": "r",
}  # fmt: skip
_SHEBANG = re.compile(rb"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?([A-Za-z]+)")

OF_ENDING = OTHER_LANGUAGES | LANGUAGE_OF_ENDING
LANGUAGES = frozenset(OF_ENDING.values())
LINES, CLASS, WHOLE = range(3)
TEXT_LANGUAGES = {"markdown", "restructuredtext", "text", "json", "yaml", "toml", "ini", "xml", "html", "css"}


@dataclass(slots=True)
class Chunk:
    """A range of lines in a file, from `start` to `end` inclusive. Line numbers start at 1.

    Attributes:
        name: the name of the function or class that contains the lines, qualified by the enclosing classes, or "" for
            other lines.
        defines: the unqualified names that the chunk defines. A name with signs, such as `valid?` or `operator[]`, is
            there with and without them.
        kind: `LINES` for lines outside definitions, `CLASS` for the lines of a class outside its members, and
            `WHOLE` for other definitions and for notebooks.
        broken: 1 if a syntax error in the file may hide functions, 2 if parsing failed or took too long.
    """

    start: int
    end: int
    name: str = ""
    defines: list[str] = field(default_factory=list)
    kind: int = LINES
    broken: int = 0


def language_of(path: str, source: bytes) -> str:
    """Returns the language for a file's extension, or "text" if the extension is unknown.

    The source distinguishes C++ headers from C headers, because both may end in `.h`. The first line of a script
    without an extension names its language.
    """
    name = path.rpartition("/")[2]
    if "." not in name:
        shebang = _SHEBANG.match(source)
        return _INTERPRETERS.get(shebang[1] if shebang else b"", "text")
    ending = f".{name.rpartition('.')[2].lower()}"
    return source_language(path, source) or OTHER_LANGUAGES.get(ending, "text")


def split(source: bytes, language: str, notebook: bool = False) -> list[Chunk]:
    """Splits a file into chunks, in order. Every line that contains a word is in exactly one chunk.

    Args:
        notebook: True if the source comes from `notebook_text`, and should be split into cells first.
    """
    parts = list(cells(source)) if notebook else []
    if not parts:
        return _split_text(source, language)
    chunks = []
    for first, kind, cell in parts:
        for chunk in _split_text(cell, language if kind == "code" else "markdown"):
            chunk.start += first
            chunk.end += first
            chunk.kind = WHOLE
            chunks.append(chunk)
    return chunks


def _split_text(source: bytes, language: str) -> list[Chunk]:
    lines = source.split(b"\n")
    spans = []
    signatures = []
    broken = 0
    if language in SOURCE_LANGUAGES:
        root, parsed = parse_file(source, language, PARSE_SECONDS)
        broken = 2 if root is None else int(not parsed)
        spans, signatures = _definitions(root, source, language)
        signatures += _constants(lines, spans, language)
    chunks = []
    line = 1
    for span, following in zip_longest(spans, spans[1:]):
        if following and following.start <= span.end:  # the head of a class or of a long function
            end = _with_comments(lines, following.start, span.start + 1) - 1
            span = Chunk(span.start, max(end, span.start), span.name, span.defines, span.kind)
        elif span.kind == CLASS and span.end > span.start:
            span.kind = WHOLE  # it has no members
        start = _with_comments(lines, max(span.start, line), line)
        if span.end < line:  # a second definition on the same line
            chunks[-1].defines += span.defines
            continue
        if start - line < MIN_LINES and not (chunks and chunks[-1].name == span.name):
            start = line
        last = bisect_right(spans, line, key=lambda span: span.start)
        outer = (span for span in reversed(spans[max(last - 50, 0) : last]) if span.end >= line)
        around = next(outer, Chunk(line, start - 1))
        chunks += _blocks(lines, line, start - 1, replace(around, defines=[]))
        chunks += _blocks(lines, start, span.end, span)
        line = span.end + 1
    chunks += _blocks(lines, line, len(lines), Chunk(line, len(lines)))
    for line, name in signatures:
        chunk = chunks[bisect_right(chunks, line, key=lambda chunk: chunk.start) - 1]
        if name not in chunk.defines and len(chunk.defines) < MAX_LINES:
            chunk.defines.append(name)
    for chunk in chunks:
        chunk.broken = broken
    return chunks


def first_paragraph(text: bytes) -> bytes:
    """Returns the first paragraph of a chunk's documentation, or b"" if it has none."""
    found = _PARAGRAPH.search(text[:_MAX_BEFORE_PARAGRAPH])
    return found[found.lastindex] if found else b""


def _blocks(lines: list[bytes], start: int, end: int, chunk: Chunk) -> list[Chunk]:
    """Splits lines `start` to `end` into blocks of at most `MAX_LINES`. Drops blocks that contain no words."""
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
        defines = list(chunk.defines) if not blocks else []
        blocks.append(Chunk(first, last, chunk.name, defines, chunk.kind))
    return blocks


def _with_comments(lines: list[bytes], start: int, least: int) -> int:
    """Returns the first line of the comments and decorators directly above line `start`, or `start` if there are none.

    Lines before `least` are not considered.
    """
    if start > least + 1 and not lines[start - 2].strip() and lines[start - 3].rstrip().endswith(b"*/"):
        start -= 1
    while start > least and _COMMENT_OR_DECORATOR.match(lines[start - 2]):
        start -= 1
    return start


def _constants(lines: list[bytes], spans: list[Chunk], language: str) -> list[tuple[int, str]]:
    """Returns the line and name of each constant, alias, attribute or exported value outside functions."""
    pattern = _CONSTANTS.get(language, _CONSTANT)
    functions = [span for span in spans if span.kind != CLASS]
    found = []
    line = 1
    for function in [*functions, Chunk(len(lines) + 1, len(lines) + 1)]:
        for number in range(line, function.start):
            if match := pattern.match(lines[number - 1][:200]):
                found += [(number, name.decode()) for name in match.groups() if name]
        line = max(line, function.end + 1)
    return found


def _definitions(root: Node | None, source: bytes, language: str) -> tuple[list[Chunk], list[tuple[int, str]]]:
    """Returns functions, classes and types as chunks, and the line and name of each signature without a body.

    Outer definitions come before inner definitions. A function nested in a function of at most `MAX_LINES` lines stays
    part of the outer function's chunk.
    """
    spans = []
    signatures = []
    hidden_until = -1
    for found in definitions(root, source, language) if root else ():
        node = found.node
        own = found.name.rsplit(".", 1)[-1]
        plain = _NAME.findall(own)
        if own.startswith("operator"):
            plain = plain[:1]  # `bool` is not a name that `operator bool` defines
        defines = list(dict.fromkeys([*plain[-1:], own]))
        if found.kind == "signature":
            signatures += [(node.start_point.row + 1, name) for name in defines]
            continue
        if not found.name or node.start_byte < hidden_until:
            continue
        outermost = min([node, *found.wrappers], key=lambda node: node.start_byte)
        first = outermost.start_point.row
        last = node.end_point.row
        last -= node.end_point.column == 0 and last > first
        name = ".".join([*(outer.name for outer in found.around[-_MAX_SCOPE:]), found.name])
        kind = CLASS if found.kind == "container" or (found.kind == "type" and first == last) else WHOLE
        body = node.child_by_field_name("body")
        if body and source[body.start_byte : body.end_byte] == b"...":  # an overload, or a stub in a `.pyi` file
            kind = LINES
        spans.append(Chunk(first + 1, last + 1, name, defines, kind))
        if found.kind != "container" and last - first < MAX_LINES:
            hidden_until = node.end_byte
    return spans, signatures
