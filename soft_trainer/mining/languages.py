"""Describes each language for mining. A new language is one more entry in the table.

Its grammar is named in `GRAMMARS` in `dataflow/source.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from soft_trainer.mining import documentation
from soft_trainer.mining.documentation import DocStyle


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


@dataclass(frozen=True)
class SourceLanguage:
    """Describes how a language writes functions, names and documentation.

    Attributes:
        extensions: endings of file names.
        functions: node types with a `body` field that count as functions.
        strings: node types that are one token with all that they contain.
        style: the delimiters and the markup of documentation.
        comments: tree-sitter query for comments and docstrings.
        containers: node types whose name goes in front of the function's (`Class.method`).
        types: further node types that define a name: structures, aliases, macros. Search shows them; mining does not.
        wrappers: node types around a function that name it (`exports.f = function () {}`) or separate it from its doc
            comment; the value is the field that holds the name, None for a wrapper without a name.
        doc_prefix: beginnings of doc comments; other comments (`/* ... */` in Java) are no documentation.
        docstring_in_body: the documentation is the first statement of the body.
        nested: functions inside functions are rows too.
    """

    extensions: tuple[str, ...]
    functions: frozenset[str]
    strings: frozenset[str]
    style: DocStyle
    comments: str = "(comment) @comment"
    containers: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    wrappers: dict[str, str | None] = field(default_factory=dict)
    doc_prefix: tuple[str, ...] = ("/**",)
    docstring_in_body: bool = False
    nested: bool = False


_LINES_AND_BLOCKS = "(line_comment) @comment (block_comment) @comment"
SOURCE_LANGUAGES: dict[str, SourceLanguage] = {
    "ruby": SourceLanguage(
        extensions=(".rb", ".rake"),
        functions=_types("method singleton_method"),
        strings=_types("string heredoc_body regex subshell delimited_symbol string_array"),
        containers=_types("class module"),
        style=documentation.RUBY,
        doc_prefix=("#", "=begin"),
    ),
    "python": SourceLanguage(
        extensions=(".py",),
        functions=_types("function_definition"),
        strings=_types("string"),
        # A string that is a statement is a docstring or serves as a comment.
        comments="(comment) @comment (expression_statement . (string) .) @comment",
        containers=_types("class_definition"),
        wrappers={"decorated_definition": None},
        style=documentation.PYTHON,
        docstring_in_body=True,
    ),
    "java": SourceLanguage(
        extensions=(".java",),
        functions=_types("method_declaration constructor_declaration compact_constructor_declaration"),
        strings=_types("string_literal character_literal"),
        comments=_LINES_AND_BLOCKS,
        containers=_types("class_declaration interface_declaration enum_declaration record_declaration"),
        style=documentation.JAVADOC,
        doc_prefix=("/**", "///"),
    ),
    "javascript": SourceLanguage(
        extensions=(".js", ".mjs", ".cjs", ".jsx"),
        functions=_types(
            "function_declaration generator_function_declaration function_expression generator_function arrow_function"
            " method_definition"
        ),
        strings=_types("string template_string regex"),
        containers=_types("class_declaration"),
        wrappers={
            "variable_declarator": "name",
            "assignment_expression": "left",
            "pair": "key",
            "field_definition": "property",
            **dict.fromkeys(_types("expression_statement variable_declaration lexical_declaration export_statement")),
        },
        style=documentation.JSDOC,
        # A function often wraps a module, and constructors define methods.
        nested=True,
    ),
    "php": SourceLanguage(
        extensions=(".php", ".inc"),
        functions=_types("function_definition method_declaration"),
        strings=_types("string encapsed_string heredoc nowdoc shell_command_expression"),
        containers=_types("class_declaration interface_declaration trait_declaration enum_declaration"),
        style=documentation.PHPDOC,
    ),
    "go": SourceLanguage(
        extensions=(".go",),
        functions=_types("function_declaration method_declaration"),
        strings=_types("interpreted_string_literal raw_string_literal rune_literal"),
        style=documentation.GO,
        doc_prefix=("//", "/*"),
        types=_types("type_spec type_alias"),
    ),
    "c": SourceLanguage(
        extensions=(".c", ".h"),
        functions=_types("function_definition"),
        strings=_types("string_literal char_literal system_lib_string"),
        style=documentation.JAVADOC,
        doc_prefix=("/**", "/*!", "///", "//!"),
        types=_types("struct_specifier union_specifier enum_specifier type_definition preproc_function_def"),
    ),
    "rust": SourceLanguage(
        extensions=(".rs",),
        functions=_types("function_item"),
        strings=_types("string_literal raw_string_literal char_literal"),
        comments=_LINES_AND_BLOCKS,
        containers=_types("impl_item trait_item mod_item"),
        style=documentation.RUST,
        doc_prefix=("///", "/**"),
        types=_types("struct_item enum_item union_item type_item macro_definition"),
    ),
    "csharp": SourceLanguage(
        extensions=(".cs",),
        functions=_types("method_declaration constructor_declaration local_function_statement"),
        strings=_types("string_literal verbatim_string_literal raw_string_literal character_literal")
        | {"interpolated_string_expression"},
        containers=_types("class_declaration interface_declaration struct_declaration record_declaration")
        | {"enum_declaration"},
        style=documentation.JAVADOC,
        doc_prefix=("///", "/**"),
        types=_types("delegate_declaration property_declaration"),
    ),
    "kotlin": SourceLanguage(
        extensions=(".kt", ".kts"),
        functions=_types("function_declaration"),
        strings=_types("string_literal multiline_string_literal character_literal"),
        comments=_LINES_AND_BLOCKS,
        containers=_types("class_declaration object_declaration"),
        style=documentation.KDOC,
        types=_types("type_alias"),
    ),
}
_C = SOURCE_LANGUAGES["c"]
_JAVASCRIPT = SOURCE_LANGUAGES["javascript"]
SOURCE_LANGUAGES["cpp"] = replace(
    _C,
    extensions=(".cpp", ".cc", ".cxx", ".hpp", ".hh", ".hxx", ".cu", ".cuh"),
    strings=_C.strings | {"raw_string_literal"},
    containers=_types("class_specifier struct_specifier namespace_definition"),
    wrappers={"template_declaration": None},
    types=(_C.types | {"alias_declaration", "concept_definition"}) - {"struct_specifier"},
)
SOURCE_LANGUAGES["typescript"] = replace(
    _JAVASCRIPT,
    extensions=(".ts", ".mts", ".cts"),
    containers=_types("class_declaration abstract_class_declaration internal_module"),
    wrappers={kind: name for kind, name in _JAVASCRIPT.wrappers.items() if kind != "field_definition"}
    | {"public_field_definition": "name"},
    types=_types("interface_declaration type_alias_declaration enum_declaration"),
)
# the same language with markup in it, which has its own grammar
SOURCE_LANGUAGES["tsx"] = replace(SOURCE_LANGUAGES["typescript"], extensions=(".tsx",))
