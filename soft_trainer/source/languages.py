"""Describes each language's syntax for functions, names, comments and documentation.

CONTRIBUTING.md lists what else to change when you add a language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from soft_trainer.source import documentation
from soft_trainer.source.documentation import DocStyle

_NEVER = "(?!)"  # a pattern that matches nothing


@dataclass(frozen=True)
class SourceLanguage:
    """The syntax of a language's functions, names and documentation. Node types are separated by spaces.

    Attributes:
        extensions: the file extensions.
        functions: the node types that count as functions if they have a `body` field.
        strings: the node types that become a single token, whatever they contain.
        style: the delimiters and the markup of documentation.
        comments: a tree-sitter query for comments and docstrings.
        attributes: a tree-sitter query for nodes that may come between a function and its doc comment (`@attribute`),
            and for overloads and prototypes without a body (`@signature`), which may have the function's doc comment.
        containers: the node types whose names precede a function's name (`Class.method`).
        types: the other node types that define a name: structures, aliases, macros. Search returns them as results.
        signatures: a tree-sitter query for definitions without a body, such as interface members and overloads. They
            are names for search, and never rows. It also finds properties with code (`@function`).
        wrappers: the node types that may enclose a function and name it (`exports.f = function () {}`), or come
            between a function and its doc comment. The value is the field with the name, or "" if there is none.
        gap: a pattern for the text that may come between a function and its doc comment, besides attributes and other
            comments.
        doc_prefix: the beginnings of doc comments. Other comments (`/* ... */` in Java) are not documentation.
        inner_doc: the beginnings of doc comments at the start of the body.
        joined: True if all doc comments before a function are one text, whatever comments and lines come between.
        docstring_in_body: True if the documentation is the first statement of the body.
        nested: True if nested functions also become rows.
        constructors: a pattern that matches the names of constructors and destructors.
        named_as_class: True if constructors are named after their class.
        magic_methods: a pattern that matches CodeSearchNet's list of methods that any class may have.
        test_words: the words in a path that mark a test.
    """

    extensions: tuple[str, ...]
    functions: str
    strings: str
    style: DocStyle
    comments: str = "(comment) @comment"
    attributes: str = ""
    containers: str = ""
    types: str = ""
    signatures: str = ""
    wrappers: dict[str, str] = field(default_factory=dict)
    gap: str = r"\s*"
    doc_prefix: tuple[str, ...] = ("/**",)
    inner_doc: tuple[str, ...] = ()
    joined: bool = False
    docstring_in_body: bool = False
    nested: bool = False
    constructors: str = _NEVER
    named_as_class: bool = False
    magic_methods: str = _NEVER
    test_words: str = "test tests"


# In JavaScript and TypeScript, many functions get their name from what encloses them.
_NAMING_FUNCTIONS = {
    "variable_declarator": "name",
    "assignment_expression": "left",
    "pair": "key",
    "expression_statement": "",
    "variable_declaration": "",
    "lexical_declaration": "",
    "export_statement": "",
}
_LINES_AND_BLOCKS = "(line_comment) @comment (block_comment) @comment"
SOURCE_LANGUAGES: dict[str, SourceLanguage] = {
    "ruby": SourceLanguage(
        extensions=(".rb", ".rake", ".gemspec"),
        functions="method singleton_method",
        strings="string heredoc_body regex subshell delimited_symbol string_array",
        # Sorbet's signatures
        attributes='((call method: (identifier) @name) @attribute (#eq? @name "sig"))',
        containers="class module",
        style=documentation.RUBY,
        # At most one blank line; `public` on a line, as in RDoc; and words before `def`: `private def total`.
        gap=r"[ \t]*\n?(?:[ \t]*\n)?[ \t]*"
        r"(?:(?:public|protected|private|module_function)[ \t]*\n(?:[ \t]*\n)?[ \t]*)?(?:\b\w+[ \t]+)*",
        doc_prefix=("#", "=begin"),
        constructors="initialize",
        magic_methods=r"to_s|to_text|inspect|display|dup|clone|equal\?|eql\?|hash|===?|!=|=~|<=>|[<>]=?|between\?",
        test_words="test tests spec specs",
    ),
    "python": SourceLanguage(
        extensions=(".py", ".pyw"),
        functions="function_definition",
        strings="string",
        # A string that is a statement is a docstring or serves as a comment.
        comments="(comment) @comment"
        " (expression_statement . [(string) (concatenated_string) (parenthesized_expression)] .) @comment",
        containers="class_definition",
        wrappers={"decorated_definition": ""},
        style=documentation.PYTHON,
        docstring_in_body=True,
        constructors="__init__|__new__",
        magic_methods=r"__\w+__",
    ),
    "java": SourceLanguage(
        extensions=(".java",),
        functions="method_declaration constructor_declaration compact_constructor_declaration",
        strings="string_literal character_literal",
        comments=_LINES_AND_BLOCKS,
        containers="class_declaration interface_declaration enum_declaration record_declaration"
        " annotation_type_declaration",
        signatures="(annotation_type_element_declaration) @signature",
        style=documentation.JAVADOC,
        doc_prefix=("/**", "///"),
        named_as_class=True,
        magic_methods="toString|hashCode|equals|finalize|notify|notifyAll|clone",
    ),
    "javascript": SourceLanguage(
        extensions=(".js", ".mjs", ".cjs", ".jsx"),
        functions="function_declaration generator_function_declaration method_definition"
        " function_expression generator_function arrow_function",
        strings="string template_string regex",
        containers="class_declaration class",
        # Cart.prototype.total = sum;
        signatures="((assignment_expression left: (member_expression object: (member_expression property:"
        ' (property_identifier) @scope) property: (property_identifier))) @signature (#eq? @scope "prototype"))',
        wrappers=_NAMING_FUNCTIONS | {"field_definition": "property"},
        style=documentation.JSDOC,
        # A function often wraps a module, and constructors define methods.
        nested=True,
        constructors="constructor",
        magic_methods="toString|toLocaleString|valueOf",
        test_words="test tests spec specs",
    ),
    "php": SourceLanguage(
        extensions=(".php", ".inc"),
        functions="function_definition method_declaration",
        strings="string encapsed_string heredoc nowdoc shell_command_expression",
        containers="class_declaration interface_declaration trait_declaration enum_declaration",
        style=documentation.PHPDOC,
        constructors="__construct|__destruct",
        magic_methods=r"__[a-z]\w*",
    ),
    "go": SourceLanguage(
        extensions=(".go",),
        functions="function_declaration method_declaration",
        strings="interpreted_string_literal raw_string_literal rune_literal",
        style=documentation.GO,
        gap=r"\s?[ \t]*",
        doc_prefix=("//", "/*"),
        types="type_spec type_alias",
        magic_methods="String|GoString",
    ),
    "c": SourceLanguage(
        extensions=(".c", ".h"),
        functions="function_definition",
        strings="string_literal char_literal system_lib_string",
        attributes="(declaration) @signature (field_declaration) @signature",
        style=documentation.DOXYGEN,
        # Macros before the function: `XMLPUBFUN`, `ATTRIBUTE(pure)`.
        gap=r"\s*(?:\b_*[A-Z][A-Z0-9_]*\b(?:\([^()]*\))?[ \t]*\n?[ \t]*)*",
        doc_prefix=("/**", "/*!", "///", "//!"),
        types="struct_specifier union_specifier enum_specifier type_definition preproc_function_def",
        wrappers={"linkage_specification": ""},
        constructors=r"~\w+",
    ),
    "rust": SourceLanguage(
        extensions=(".rs",),
        functions="function_item",
        strings="string_literal raw_string_literal char_literal",
        comments=_LINES_AND_BLOCKS,
        attributes="(attribute_item) @attribute",
        containers="impl_item trait_item mod_item",
        style=documentation.RUST,
        doc_prefix=("///", "/**"),
        inner_doc=("//!", "/*!"),
        joined=True,
        types="struct_item enum_item union_item type_item macro_definition",
        signatures="(function_signature_item) @signature (associated_type) @signature",
        magic_methods="fmt|eq|ne|cmp|partial_cmp|hash|clone|drop|default",
    ),
    "csharp": SourceLanguage(
        extensions=(".cs",),
        functions="method_declaration constructor_declaration local_function_statement operator_declaration"
        " conversion_operator_declaration destructor_declaration",
        strings="string_literal verbatim_string_literal raw_string_literal character_literal"
        " interpolated_string_expression",
        containers="class_declaration interface_declaration struct_declaration record_declaration enum_declaration",
        style=documentation.CSHARP,
        doc_prefix=("///", "/**"),
        types="delegate_declaration property_declaration",
        signatures="([(indexer_declaration accessors: (accessor_list (accessor_declaration body: (_))))"
        " (property_declaration accessors: (accessor_list (accessor_declaration body: (_))))"
        " (indexer_declaration value: (_))] @function)",
        constructors=r"~\w+",
        named_as_class=True,
        magic_methods="ToString|GetHashCode|Equals|Dispose|Finalize",
    ),
    "kotlin": SourceLanguage(
        extensions=(".kt", ".kts"),
        functions="function_declaration secondary_constructor",
        strings="string_literal multiline_string_literal character_literal",
        comments=_LINES_AND_BLOCKS,
        # At the top of a file, the grammar takes `@Throws(IOException::class)` for an expression.
        attributes="(annotated_expression) @attribute",
        containers="class_declaration object_declaration",
        style=documentation.KDOC,
        gap=r"\s*(?:context\s*\((?:[^()]|\([^()]*\))*\)\s*)?",
        types="type_alias",
        signatures="(property_declaration [(getter (function_body)) (setter (function_body))]) @function",
        constructors="constructor",
        magic_methods="toString|hashCode|equals",
    ),
}
_C = SOURCE_LANGUAGES["c"]
_JAVASCRIPT = SOURCE_LANGUAGES["javascript"]
SOURCE_LANGUAGES["cpp"] = replace(
    _C,
    extensions=(".cpp", ".cc", ".cxx", ".hpp", ".hh", ".hxx", ".C", ".tpp", ".ipp", ".inl", ".ino", ".cu", ".cuh"),
    strings=_C.strings + " raw_string_literal",
    containers="class_specifier struct_specifier namespace_definition",
    wrappers=_C.wrappers | {"template_declaration": "", "friend_declaration": ""},
    types="union_specifier enum_specifier type_definition preproc_function_def alias_declaration concept_definition",
    named_as_class=True,
)
SOURCE_LANGUAGES["typescript"] = replace(
    _JAVASCRIPT,
    extensions=(".ts", ".mts", ".cts"),
    attributes="(decorator) @attribute (function_signature) @signature (method_signature) @signature",
    containers="class_declaration abstract_class_declaration class internal_module module",
    signatures="(function_signature) @signature (method_signature) @signature (abstract_method_signature) @signature"
    + _JAVASCRIPT.signatures,
    wrappers=_NAMING_FUNCTIONS | {"public_field_definition": "name"},
    types="interface_declaration type_alias_declaration enum_declaration",
)
# TypeScript with JSX has another grammar.
SOURCE_LANGUAGES["tsx"] = replace(SOURCE_LANGUAGES["typescript"], extensions=(".tsx",))

LANGUAGE_OF_ENDING = {ending: name for name, table in SOURCE_LANGUAGES.items() for ending in table.extensions}

# The languages with a preprocessor, so that a file holds more than their grammars know.
PREPROCESSED = ("c", "cpp")
CODESEARCHNET_LANGUAGES = ("ruby", "python", "java", "javascript", "php", "go")
_IN_CPP = re.compile(rb"^[ \t]*(class|namespace|template)\b|\b\w+::\w", re.MULTILINE)


def source_language(path: str, source: bytes) -> str | None:
    """Returns a source file's language, or None if the extension is unknown. A `.h` file may be in C or in C++."""
    ending = "".join(path.rpartition("/")[2].rpartition(".")[1:])
    if ending in (".h", ".H") and _IN_CPP.search(source):
        return "cpp"
    return LANGUAGE_OF_ENDING.get(ending, LANGUAGE_OF_ENDING.get(ending.lower()))  # `.C` is C++
