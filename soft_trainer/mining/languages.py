"""The facts that mining needs about each language. A new language is one more entry in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from soft_trainer.mining import documentation
from soft_trainer.mining.documentation import DocStyle


@dataclass(frozen=True)
class SourceLanguage:
    """The places of functions, their names and their documentation in a language.

    Attributes:
        extensions: endings of file names.
        functions: node types with a `body` field that count as functions.
        strings: node types that are one token with all that they contain.
        style: the markup of documentation.
        strip: removes the delimiters of a doc comment.
        comments: tree-sitter query for comments and docstrings.
        containers: node types whose name goes in front of the function's (`Class.method`).
        wrappers: node types around a function that name it (`exports.f = function () {}`) or separate it from its doc
            comment; the value is the field that holds the name, None for a wrapper without a name.
        doc_prefix: beginnings of doc comments; other comments (`/* ... */` in Java) are no documentation.
        docstring_in_body: the documentation is the first statement of the body.
        nested: functions inside functions are rows too.
    """

    extensions: tuple[str, ...]
    functions: tuple[str, ...]
    strings: frozenset[str]
    style: DocStyle
    strip: Callable[[str], str]
    comments: str = "(comment) @comment"
    containers: frozenset[str] = frozenset()
    wrappers: dict[str, str | None] = field(default_factory=dict)
    doc_prefix: tuple[str, ...] = ("/**",)
    docstring_in_body: bool = False
    nested: bool = False


SOURCE_LANGUAGES: dict[str, SourceLanguage] = {
    "ruby": SourceLanguage(
        extensions=(".rb", ".rake"),
        functions=("method", "singleton_method"),
        strings=frozenset({"string", "heredoc_body", "regex", "subshell", "delimited_symbol", "string_array"}),
        containers=frozenset({"class", "module"}),
        style=documentation.RUBY,
        strip=documentation.strip_ruby,
        doc_prefix=("#", "=begin"),
    ),
    "python": SourceLanguage(
        extensions=(".py",),
        functions=("function_definition",),
        strings=frozenset({"string"}),
        # A string that is a statement is a docstring or serves as a comment.
        comments="(comment) @comment (expression_statement . (string) .) @comment",
        containers=frozenset({"class_definition"}),
        style=documentation.PYTHON,
        strip=documentation.strip_python,
        docstring_in_body=True,
    ),
    "java": SourceLanguage(
        extensions=(".java",),
        functions=("method_declaration", "constructor_declaration", "compact_constructor_declaration"),
        strings=frozenset({"string_literal", "character_literal"}),
        comments="(line_comment) @comment (block_comment) @comment",
        containers=frozenset({"class_declaration", "interface_declaration", "enum_declaration", "record_declaration"}),
        style=documentation.JAVADOC,
        strip=documentation.strip_java,
        doc_prefix=("/**", "///"),
    ),
    "javascript": SourceLanguage(
        extensions=(".js", ".mjs", ".cjs", ".jsx"),
        functions=(
            "function_declaration",
            "generator_function_declaration",
            "function_expression",
            "generator_function",
            "arrow_function",
            "method_definition",
        ),
        strings=frozenset({"string", "template_string", "regex"}),
        containers=frozenset({"class_declaration"}),
        wrappers={
            "variable_declarator": "name",
            "assignment_expression": "left",
            "pair": "key",
            "field_definition": "property",
            "expression_statement": None,
            "variable_declaration": None,
            "lexical_declaration": None,
            "export_statement": None,
        },
        style=documentation.JSDOC,
        strip=documentation.strip_block,
        # A function often wraps a module, and constructors define methods.
        nested=True,
    ),
    "php": SourceLanguage(
        extensions=(".php", ".inc"),
        functions=("function_definition", "method_declaration"),
        strings=frozenset({"string", "encapsed_string", "heredoc", "nowdoc", "shell_command_expression"}),
        containers=frozenset({"class_declaration", "interface_declaration", "trait_declaration", "enum_declaration"}),
        style=documentation.PHPDOC,
        strip=documentation.strip_block,
    ),
    "go": SourceLanguage(
        extensions=(".go",),
        functions=("function_declaration", "method_declaration"),
        strings=frozenset({"interpreted_string_literal", "raw_string_literal", "rune_literal"}),
        style=documentation.GO,
        strip=documentation.strip_go,
        doc_prefix=("//", "/*"),
    ),
}
