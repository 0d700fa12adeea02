"""Finds functions, classes and types in a file's syntax tree, and their names."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from soft_trainer.source.extra import needed
from soft_trainer.source.grammars import captures_of, parser
from soft_trainer.source.languages import PREPROCESSED, SOURCE_LANGUAGES
from soft_trainer.source.recovery import hides_functions, without_errors

if TYPE_CHECKING:
    from tree_sitter import Node, Query

# Searching the children of a syntax error takes quadratic time, 20 s for 80,000 children.
MAX_ERROR_CHILDREN = 10_000
# Context parameters, which Kotlin's grammar does not know, or takes for a call.
_CONTEXT = re.compile(
    rb"\bcontext\s*\((?:[^()\"]|\([^()\"]*\))*\)(?=\s*(?:@|(?:public|protected|private|internal|override|open|abstract|final"
    rb"|inline|suspend|operator|infix|tailrec|fun|val|var|class|interface)\b))"
)
# The guard of a branch, which the grammar does not know: `is String if text.length > 3 ->`.
_GUARD = re.compile(
    rb"^([ \t]*(?:!?(?:is|in)\b[^\n{}]*?|else|[\w.]+(?:\([^()\n]*\))?))([ \t]+if\b[^\n{}]*?)(?=[ \t]*->)", re.MULTILINE
)
# In C#, the head of a block of extension members, which the grammar takes for a method. It is parsed as the
# head of a class, whose name is then the end of this word.
_EXTENSION = re.compile(rb"^([ \t]*)extension(\s*(?:<[^{}()]*>)?\s*\([^(){}]*\)[^{}();]*)(?=\{)", re.MULTILINE)
_READ_BYTES = 1 << 15
_ACCESSORS = ("accessor_declaration", "getter", "setter")
_MAX_AROUND = 8
_MAX_NAME = 200  # characters
# The order of nodes with the same text, outer ones first.
_KINDS = ("wrapper", "container", "function", "type", "signature")
# In C, `struct point p` mentions a structure and does not define it.
_NEED_BODY = {"struct_specifier", "union_specifier", "enum_specifier", "class_specifier"}
# Type parameters outside a conversion, which they belong to: `operator Foo<int>`; and `a::inline v1`.
_TYPE_PARAMETERS = re.compile(r"(\boperator\s+\w.*)|(?<=::)inline\s+|(?<=\w)<\s*\w[^<>]*>", re.DOTALL)
_CONVERSION = re.compile(r"(\boperator\s+\w[^(]*)\(.*", re.DOTALL)  # `operator bool() const`
_SPACE = re.compile(r"(?<!\w) | (?!\w)")  # a space that does not separate two words
# A directive in which the grammars for C and C++ expect nothing after a comment, with its comments and lines.
_DIRECTIVE = re.compile(
    rb"^[ \t]*#[ \t]*(?:define|pragma|error|warning)\b(?:/\*.{0,2000}?\*/|\\\n|[^\n])*", re.DOTALL | re.MULTILINE
)
# A string, and a comment with code after it.
_STRING_OR_COMMENT = re.compile(rb"\"(?:\\.|[^\"\\\n])*\"|/\*.{0,2000}?\*/(?![ \t\r]*(?:\n|//|\Z))", re.DOTALL)
# Comments, directives, strings and characters, in which no macro is looked for.
_NO_MACROS = re.compile(
    rb"/\*.*?(?:\*/|\Z)|//[^\n]*|^[ \t]*#(?:/\*.*?(?:\*/|\Z)|\\\n|[^\n])*"
    rb"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'",
    re.DOTALL | re.MULTILINE,
)
_TYPE = rb"(?:auto|bool|char|double|float|int|long|short|signed|unsigned|void)\b"
_KEYWORD = (
    rb"(?:case|class|const|constexpr|delete|else|enum|explicit|extern|friend|goto|inline|namespace|new|register|return"
    rb"|static|struct|template|throw|typedef|typename|union|using|virtual|volatile)\b"
)
_PATTERNS = {
    b"CAPITALS": rb"\b_*[A-Z][A-Z0-9_]+\b(?:[ \t]*\([^()\n]*\))?",
    b"NAME": rb"[A-Za-z_~][\w:~]*(?:<[^<>;{}()]*>)?",
    b"PREFIX": rb"^([ \t]*(?:template\s*<[^<>;{}]*>\s*|" + _KEYWORD + rb"\s+)*)",
    b"KEYWORD": _KEYWORD,
    b"TYPE": _TYPE,
}
# Words in capitals that are macros, each after what stands before it. Not every such word is a macro: `U32` and `BYTE`
# are types.
_MACROS = (
    # class API Cart {
    rb"(\b(?:class|struct|union|enum|namespace)\s+)(CAPITALS)(?=\s+\w+(?:<[^<>;{}]*>)?(?:\s+final)?\s*(?::(?!:)|\{))",
    rb"(\b(?!KEYWORD)\w+[\s*&>]*[\s*&])(CAPITALS(?:\s+CAPITALS){0,2})(?=\s[\s*&]*NAME\s*\()",  # int API total(
    # API static int total(, API Price total(, API Cart::Cart(
    rb"PREFIX(CAPITALS(?:\s+CAPITALS){0,2})(?=\s+(?!const\b)(?:KEYWORD|TYPE|[\w:]+(?:<[^<>;{}]*>)?[\s*&][\s*&]*NAME\s*\("
    rb"|(?:\w+(?:<[^<>;{}]*>)?::)*?(\w+)(?:<[^<>;{}]*>)?::~?\3\s*\())",
    rb"(\b(?!KEYWORD)\w+[\s*&]+(?!KEYWORD|TYPE)\w*[a-z]\w*(?:\[\w*\])?\s+)(CAPITALS)(?=\s*[,)])",  # (int n UNUSED)
    rb"(\)(?:[ \t]*\n[ \t])?[ \t]*(?:const\s+)?)(CAPITALS)(?=\s*\{)",  # int total() API {
)
BLANKS = bytes(10 if byte == 10 else 32 for byte in range(256))  # for `bytes.translate`: line breaks stay
# What a macro can make look like a function: `CHECK(x) if (x) { }`.
_STATEMENT = re.compile(rb"(?:if|for|while|switch|return|else|catch)\b")
_REFERENCES = ("reference_declarator", "function_declarator")
_DECLARATORS = (*_REFERENCES, "pointer_declarator", "array_declarator", "parenthesized_declarator")
# The children that lead to the name of a definition without a field for it.
_NAMING = {
    "operator_declaration": ("operator",),
    "conversion_operator_declaration": ("operator",),
    "indexer_declaration": ("this",),
    "secondary_constructor": ("constructor",),
    "property_declaration": ("variable_declaration", "identifier"),
}
_COMPONENT = re.compile(rb"\b(?:memo|forwardRef)\s*(?:<[^()]*>)?\(\s*\Z")
# A macro that defines a function, and what names the function: `TEST_F(CartTest, Total) {`.
_DEFINING_MACRO = re.compile(r"([A-Z][A-Z0-9_]+)\s*\(\s*(\w+(?:\s*,\s*\w+)*)\s*\)")
TEST_MACRO = re.compile(r"(?:[A-Z]+_)*TEST(?:_[A-Z]+)*\(")


def parse(source: bytes, language: str, seconds: float = 60.0) -> Node | None:
    """Parses a file. Returns None if most of it is a syntax error, or if parsing takes over `seconds` of CPU time."""
    return parse_file(source, language, seconds)[0]


def parse_file(source: bytes, language: str, seconds: float = 60.0) -> tuple[Node | None, bool]:
    """Returns what `parse` returns, and False if a syntax error may hide functions.

    If the grammar then finds more functions without the lines that it cannot parse, the tree lacks these lines.
    """
    deadline = time.thread_time() + seconds
    if language in PREPROCESSED:
        source = _without_macros(_without_inner_comments(source))
    if language == "kotlin":
        source = _CONTEXT.sub(lambda found: found[0].translate(BLANKS), source)
        source = _GUARD.sub(lambda found: found[1] + found[2].translate(BLANKS), source)
    if language == "csharp":
        source = _EXTENSION.sub(lambda found: found[1] + b"class ion" + found[2].translate(BLANKS), source)
    read = partial(_parse, language=language, deadline=deadline)
    root = read(source)
    functions = {*SOURCE_LANGUAGES[language].functions.split(), *_ACCESSORS}
    whole = root is not None and not hides_functions(root, functions)
    if root is not None and not whole and language not in PREPROCESSED:
        mended = read(without_errors(source, read, functions))
        if mended is not None and _count_names(mended, source, language) > _count_names(root, source, language):
            root = mended
    return root, whole


def _parse(source: bytes, language: str, deadline: float) -> Node | None:
    """Parses a text. Returns None if most of it is a syntax error, or after the deadline, in the thread's CPU time.

    Some files, even files of 200 bytes, make the parser hang forever. All other files take far less than a minute.
    """
    parsing = True

    def read(at: int, _) -> bytes:
        if not parsing:  # a query compares a node's text, one byte at a time, and would never end without the text
            return source[at : at + 1]
        # The parser of tree-sitter 0.26 stops only if `read` reports the end of the text.
        return source[at : at + _READ_BYTES] if time.thread_time() < deadline else b""

    try:
        root = parser(language).parse(read).root_node
    except SystemError as error:  # the parser goes on after Ctrl-C in `read`, and then fails
        raise KeyboardInterrupt from error
    parsing = False
    broken = any(node.is_error and node.child_count > MAX_ERROR_CHILDREN for node in (root, *root.children))
    return None if broken or time.thread_time() > deadline else root


def _count_names(root: Node, source: bytes, language: str) -> int:
    """Returns the number of functions, and of the definitions around each."""
    found = definitions(root, source, language)
    return sum(1 + len(each.around) for each in found if each.kind == "function")


def _without_inner_comments(source: bytes) -> bytes:
    """Blanks comments inside directives such as `#define`, where the grammars lose the function that follows.

    A string with `/*` is also blanked. Comments at the end of a directive and the positions of all bytes stay.
    """

    def blank(found: re.Match[bytes]) -> bytes:
        if b"/*" not in found[0]:
            return found[0]
        return found[0].translate(BLANKS).replace(b" \n", b"\\\n")

    return _DIRECTIVE.sub(lambda directive: _STRING_OR_COMMENT.sub(blank, directive[0]), source)


@cache
def _macros() -> list[re.Pattern[bytes]]:
    """Returns patterns for words in capitals that are macros. The second group is the macro."""
    patterns = []
    for pattern in _MACROS:
        for name, meaning in _PATTERNS.items():
            pattern = pattern.replace(name, meaning)
        patterns.append(re.compile(pattern, re.MULTILINE))
    return patterns


def _without_macros(source: bytes) -> bytes:
    """Blanks macros such as `API` in `class API Cart {`, where the grammar finds no class. All positions stay."""
    code = bytearray(_NO_MACROS.sub(lambda found: found[0].translate(BLANKS), source))
    blanked = bytearray(source)
    for pattern in _macros():
        for found in list(pattern.finditer(code)):
            start, end = found.span(2)
            blanked[start:end] = code[start:end] = found[2].translate(BLANKS)
    return bytes(blanked)


class Definition(NamedTuple):
    """A function, a container (class, module, `impl`), a type, or a signature without a body.

    Attributes:
        kind: "function", "container", "type" or "signature".
        name: the unqualified name, or "" for an anonymous function.
        node: the syntax node.
        wrappers: the enclosing nodes that may name the definition, such as an assignment, outermost first.
        around: the innermost eight named definitions that enclose this one, outermost first.
    """

    kind: str
    name: str
    node: Node
    wrappers: list[Node]
    around: list[Definition]


def definitions(root: Node, source: bytes, language: str) -> Iterator[Definition]:
    """Yields all definitions below `root`. Outer definitions come before inner ones."""
    captures = captures_of(queries(language)[0], root)
    nodes = []
    for kind in _KINDS:
        nodes += [(kind, node) for node in captures.get(kind, ())]
    nodes.sort(key=lambda each: (each[1].start_byte, -each[1].end_byte))
    # The definitions and wrappers around the current node. Looking up parents would be quadratic in a deep tree.
    around = []
    wrappers = []
    for kind, node in nodes:
        while around and around[-1].node.end_byte <= node.start_byte:
            around.pop()
        while wrappers and wrappers[-1].end_byte <= node.start_byte:
            wrappers.pop()
        if kind == "wrapper":
            wrappers.append(node)
            continue
        if around and around[-1].node.id == node.id:  # a function and a type
            continue
        if node.type in _NEED_BODY and node.child_by_field_name("body") is None:
            continue
        c_function = language in PREPROCESSED and kind == "function"
        if c_function and _STATEMENT.match(source, (name_node(node) or node).start_byte):
            continue
        # A wrapper of an enclosing definition may end here too: a decorated class ends with its last method.
        first = around[-1].node.start_byte if around else 0
        end = component_call(node, source).end_byte + 1
        own = [
            wrapper
            for wrapper in wrappers[-_MAX_AROUND // 2 :]
            if wrapper.start_byte >= first and wrapper.end_byte <= end
        ]
        name = definition_name(source, node, own, SOURCE_LANGUAGES[language].wrappers)
        definition = Definition(kind, name, node, own, around[-_MAX_AROUND:])
        if name and kind != "signature":
            around.append(definition)
        yield definition


def component_call(node: Node, source: bytes) -> Node:
    """Returns the outermost call of React's `memo` or `forwardRef` around a function, or the function itself."""
    while _COMPONENT.search(source, max(node.start_byte - 200, 0), node.start_byte):
        if node.parent.type != "arguments":
            break
        node = node.parent.parent
    return node


def name_node(node: Node) -> Node | None:
    """Returns the node that contains a definition's name. In C, the name is inside declarators.

    In a Rust `impl`, the name is a type. In C, `PHP_FUNCTION(total)` looks like a type with a name in brackets.
    """
    name = node.child_by_field_name("name")
    if name is None and node.type == "impl_item":
        return node.child_by_field_name("type")
    if name is None and node.type in _NAMING:
        for kind in _NAMING[node.type]:
            node = next(child for child in node.children if child.type == kind)
        return node
    while name is None:
        inner = node.child_by_field_name("declarator") or last_child(node, *_REFERENCES)
        if inner is None and node.type == "parenthesized_declarator":
            inner = node.named_children[-1]
        if inner is None:
            return None
        node = inner
        if node.type not in _DECLARATORS:
            name = node
    return name


def last_child(node: Node, *kinds: str) -> Node | None:
    """Returns a node's last named child if the child's type is one of `kinds`, or None."""
    for last in node.named_children[-1:]:
        if last.type in kinds:
            return last
    return None


def definition_name(source: bytes, node: Node, wrappers: Sequence[Node], naming: dict[str, str]) -> str:
    """Returns a definition's name, or the name it is assigned to, on one line and without type parameters.

    Args:
        wrappers: the enclosing nodes that may name the definition, outermost first.
        naming: the field with the name for each type of wrapper.
    """
    named = name_node(node)
    for wrapper in reversed(wrappers):
        field = naming.get(wrapper.type)
        target = wrapper.child_by_field_name(field) if field else None
        if target and (named is None or b".prototype." in source[target.start_byte : target.end_byte]):
            named = target
    if named is None or source[named.start_byte - 6 : named.end_byte] == b"extension":
        return ""
    if node.type == "function_definition" and (macro := defining_macro(source, node)):
        return ".".join(re.findall(r"\w+", macro[2]))
    text = node_text(source, named)[:_MAX_NAME]
    if node.type.endswith("operator_declaration"):  # in C#
        text = source[named.start_byte : node.child_by_field_name("parameters").start_byte].decode(errors="replace")
        return re.sub(r"\W+", lambda signs: signs[0].strip() or " ", text.strip())
    if node.type == "destructor_declaration":
        return f"~{text}"
    if not text.isidentifier():  # most names are, and this saves a tenth of the time
        while (shorter := _TYPE_PARAMETERS.sub(r"\1", text)) != text:
            text = shorter
        text = _CONVERSION.sub(r"\1", text)
        text = compact_name(text.replace("::", ".").removeprefix("this.").strip("\"'` \n"))
    receiver = node.child_by_field_name("receiver")
    if receiver:
        owner = re.findall(r"\w+", node_text(source, receiver).split("[")[0])
        text = ".".join([*owner[-1:], text])
    return text


def compact_name(name: str) -> str:
    """Returns a name on one line, with spaces only between words: `operator bool`, but `operator==`."""
    return _SPACE.sub("", " ".join(name.split()))


def defining_macro(source: bytes, node: Node) -> re.Match[str] | None:
    """Returns the macro by which a function in C or C++ is defined, such as `TEST_F(CartTest, Total)`, or None."""
    declarator = node.child_by_field_name("declarator")
    if declarator is None or node.parent.type == "field_declaration_list":
        return None
    start = declarator.start_byte
    if declarator.type == "parenthesized_declarator":  # the macro looks like a type
        start = node.start_byte
    elif declarator.type != "function_declarator" or node.child_by_field_name("type") is not None:
        return None
    return _DEFINING_MACRO.fullmatch(source[start : declarator.end_byte].decode(errors="replace"))


def node_text(source: bytes, node: Node) -> str:
    """Returns a node's text. `node.text` would be slow, because it calls the parser's `read` for every byte."""
    return source[node.start_byte : node.end_byte].decode(errors="replace")


def literals(source: bytes, language: str, first: int, last: int) -> list[str]:
    """Returns the string literals on lines `first` to `last` of a file, without docstrings.

    Returns [] if the language cannot be parsed, or if parsing takes longer than a second.
    """
    root = parse(source, language, 1.0) if language in SOURCE_LANGUAGES else None
    if root is None:
        return []
    cursor = needed("tree_sitter").QueryCursor(queries(language)[3])
    cursor.set_point_range((first - 1, 0), (last, 0))
    strings = cursor.captures(root).get("string", [])
    return [node_text(source, node) for node in strings if node.parent.type != "expression_statement"]


@cache
def queries(language: str) -> tuple[Query, Query, Query, Query]:
    """Returns four tree-sitter queries.

    They find functions, classes, types and their wrappers; comments; attributes, decorators and overload signatures;
    string literals.
    """
    table = SOURCE_LANGUAGES[language]
    kinds = {
        "function": table.functions.split(),
        "container": table.containers.split(),
        "type": table.types.split(),
        "wrapper": table.wrappers,
    }
    patterns = [table.signatures]
    for kind, types in kinds.items():
        patterns += [f"({name}) @{kind}" for name in types]
    grammar = parser(language).language
    strings = "".join(f"({name}) @string" for name in table.strings.split())
    sources = ("\n".join(patterns), table.comments, table.attributes, strings)
    query = needed("tree_sitter").Query
    return tuple(query(grammar, source) for source in sources)
