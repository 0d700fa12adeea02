"""The rules by which CodeSearchNet and GraphCodeBERT choose their rows.

Most rules look at a single row in CodeSearchNet's columns: a function with the rule's name, whose parameters are the
columns that it reads, returns True to drop it. `comments` drops nothing but removes the comments from the code. The
two rules on duplicates compare a row with the rows before it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from soft_trainer.mining.documentation import JAVADOC
from soft_trainer.mining.languages import SOURCE_LANGUAGES, SourceLanguage
from soft_trainer.mining.source_files import SKIPPED_FOLDERS

Row = dict[str, Any]

MIN_CODE_LINES = 3
MIN_DOCUMENT_TOKENS = 3
MAX_DOCUMENT_TOKENS = 256

_TEST_WORDS = {"test", "tests"}
_UNKNOWN = SourceLanguage((), "", "", JAVADOC)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")


def identifier_words(text: str) -> list[str]:
    """Splits text into lower-case words: `parseHTTPHeader2` and `parse_http_header_2` give the same four.

    Punctuation is dropped and numbers stay.
    """
    return [word.lower() for word in _WORD.findall(text)]


def unparseable(code: str, language: str) -> bool:
    """The code has a syntax error."""
    from soft_trainer.dataflow import parses  # loads tree-sitter, which the command line does without

    return not parses(code, language)


def short_functions(code: str) -> bool:
    """The code has fewer than three lines, blank ones not counted."""
    lines = list(filter(str.strip, code.splitlines()))
    return len(lines) < MIN_CODE_LINES


def tests(path: str, func_name: str, language: str) -> bool:
    """The function's name or its path contains the word `test` (in Ruby and JavaScript also `spec` in the path)."""
    name = func_name.rsplit(".", 1)[-1]
    return is_test_path(path, language) or not _TEST_WORDS.isdisjoint(identifier_words(name))


def is_test_path(path: str, language: str) -> bool:
    """Returns True if the path looks like a test: `tests/`, `test_x.py`, `XTest.java`, `x.spec.js`."""
    return not set(_table(language).test_words.split()).isdisjoint(identifier_words(path))


def is_mined_path(path: str, language: str) -> bool:
    """Returns True for a source file of the language outside tests, hidden folders and vendored code."""
    *folders, name = path.split("/")
    if not name.endswith(SOURCE_LANGUAGES[language].extensions) or is_test_path(path, language):
        return False
    return not any(folder in SKIPPED_FOLDERS or folder.startswith(".") for folder in folders)


def constructors(func_name: str, language: str) -> bool:
    """The function is a constructor or destructor. In Java, C# and C++, it has the name of its class."""
    *scope, name = func_name.split(".")
    table = _table(language)
    named_as_class = table.named_as_class and scope[-1:] == [name]
    return named_as_class or bool(re.fullmatch(table.constructors, name))


def magic_methods(func_name: str, language: str) -> bool:
    """The function is a method of any class, such as `__str__`, `toString` or `<=>`, but not a constructor."""
    magic = re.fullmatch(_table(language).magic_methods, func_name.rsplit(".", 1)[-1])
    return bool(magic) and not constructors(func_name, language)


def _table(language: str) -> SourceLanguage:
    """Returns the description of a language. Of an unknown one, only the words for tests are known."""
    return SOURCE_LANGUAGES.get(language, _UNKNOWN)


def document_length(docstring_tokens: list[str]) -> bool:
    """The document has fewer than 3 or more than 256 tokens."""
    return not MIN_DOCUMENT_TOKENS <= len(docstring_tokens) <= MAX_DOCUMENT_TOKENS


def images(docstring_tokens: list[str]) -> bool:
    """The document contains `<img ...>`."""
    return bool(re.search(r"(?i)<\s*img\b", " ".join(docstring_tokens)))


def links(docstring_tokens: list[str]) -> bool:
    """The document contains `http://` or `https://`."""
    return bool(re.search(r"(?i)https?\s*:\s*/\s*/", " ".join(docstring_tokens)))


def not_english(docstring_tokens: list[str]) -> bool:
    """The document has a character outside ASCII, which no published query has."""
    return not "".join(docstring_tokens).isascii()


def _named(*rules: Callable[..., bool]) -> dict[str, Callable[..., bool]]:
    return {rule.__name__: rule for rule in rules}


# Code rules look at the function, document rules at its documentation.
CODE_RULES = _named(short_functions, tests, constructors, magic_methods)
DOCUMENT_RULES = _named(document_length, images, links, not_english)
ROW_RULES = {**_named(unparseable), **CODE_RULES, **DOCUMENT_RULES}
RULES: dict[str, str] = {
    "comments": "Comments and docstrings are removed from the code. The count is the number of rows with comments.",
    **{name: rule.__doc__ or "" for name, rule in ROW_RULES.items()},
    "duplicates": "An earlier row has the same code tokens.",
    "near_duplicates": "An earlier row has nearly the same code tokens.",
}
# rule -> the columns that it reads
COLUMNS: dict[str, tuple[str, ...]] = {
    "comments": ("code", "code_tokens", "language"),
    **{name: tuple(inspect.signature(rule).parameters) for name, rule in ROW_RULES.items()},
    **dict.fromkeys(("duplicates", "near_duplicates"), ("code_tokens",)),
}
GRAPHCODEBERT_RULES = ("comments", "unparseable", *DOCUMENT_RULES)
CODESEARCHNET_RULES = (*CODE_RULES, "duplicates", "near_duplicates")


def first_broken(row: Row, rules: Iterable[str], keep: Collection[str] = ()) -> str:
    """Returns the first of `rules`, except those in `keep`, that drops `row`; empty if no rule does."""
    for name in rules:
        if name not in keep and ROW_RULES[name](*map(row.__getitem__, COLUMNS[name])):
            return name
    return ""
