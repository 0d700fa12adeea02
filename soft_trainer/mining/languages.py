"""What mining needs to know of each language: one table entry a language."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from soft_trainer.mining import documentation
from soft_trainer.mining.documentation import DocStyle


@dataclass(frozen=True)
class SourceLanguage:
    """Where a language keeps functions, their names and their documentation.

    Attributes:
        extensions: endings of its files.
        functions: node types with a `body` field that count as functions.
        strings: node types that are one token, whatever they contain.
        style: how its documentation is marked up.
        strip: takes the delimiters off a doc comment.
        comments: tree-sitter query for everything that is not code.
        containers: node types whose name goes in front of the function's (`Class.method`).
        wrappers: node types around a function that name it (`exports.f = function () {}`) or stand between it and its
            doc comment; the value is the field with the name, None where there is none.
        doc_prefix: what a doc comment begins with; plain comments (`/* ... */` in Java) do not document.
        docstring_in_body: documentation is the first statement of the body.
        nested: functions inside functions count too.
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
        # a string that is a statement of its own documents something, or stands in for a comment
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
        # modules are often wrapped in a function, constructors hold their methods
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
