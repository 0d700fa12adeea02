"""Defines the rules that CodeSearchNet and GraphCodeBERT use to select rows.

A rule is a function that returns True to drop a row with CodeSearchNet's columns. Its parameters are the columns that
it reads.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable

from soft_trainer.source.functions import Row
from soft_trainer.source.names import identifier_words, is_test_path, patterns_of

MIN_CODE_LINES = 3
MIN_DOCUMENT_TOKENS = 3
MAX_DOCUMENT_TOKENS = 256

_TEST_WORDS = {"test", "tests"}


def unparseable(code: str, language: str) -> bool:
    """Returns True if the code has a syntax error, as a file, a function, or a method without its class."""
    from soft_trainer.source.grammars import parse_framed  # loads tree-sitter, which the command line does not need

    return parse_framed(code, language)[0].has_error


def short_functions(code: str) -> bool:
    """Returns True if the code has fewer than three non-blank lines."""
    lines = list(filter(str.strip, code.splitlines()))
    return len(lines) < MIN_CODE_LINES


def tests(path: str, func_name: str, language: str) -> bool:
    """Returns True if the function's name contains the word `test`, or if its path looks like a test."""
    name = func_name.rsplit(".", 1)[-1]
    return is_test_path(path, language) or not _TEST_WORDS.isdisjoint(identifier_words(name))


def constructors(func_name: str, language: str) -> bool:
    """Returns True if the function is a constructor or destructor."""
    *scope, name = func_name.split(".")
    table = patterns_of(language)
    named_as_class = table.named_as_class and scope[-1:] == [name]
    return named_as_class or bool(re.fullmatch(table.constructors, name))


def magic_methods(func_name: str, language: str) -> bool:
    """Returns True for a method that any class may have, such as `__str__`, `toString` or `<=>`."""
    magic = re.fullmatch(patterns_of(language).magic_methods, func_name.rsplit(".", 1)[-1])
    return bool(magic) and not constructors(func_name, language)


def document_length(docstring_tokens: list[str]) -> bool:
    """Returns True if the documentation has fewer than 3 or more than 256 tokens."""
    return not MIN_DOCUMENT_TOKENS <= len(docstring_tokens) <= MAX_DOCUMENT_TOKENS


def images(docstring_tokens: list[str]) -> bool:
    """Returns True if the documentation contains `<img ...>`."""
    return bool(re.search(r"(?i)<\s*img\b", " ".join(docstring_tokens)))


def links(docstring_tokens: list[str]) -> bool:
    """Returns True if the documentation contains `http://` or `https://`."""
    return bool(re.search(r"(?i)https?\s*:\s*/\s*/", " ".join(docstring_tokens)))


def not_ascii(docstring_tokens: list[str]) -> bool:
    """Returns True if the documentation has a non-ASCII character. The published queries have none."""
    return not "".join(docstring_tokens).isascii()


_ROW_RULES = (
    unparseable,
    short_functions,
    tests,
    constructors,
    magic_methods,
    document_length,
    images,
    links,
    not_ascii,
)
ROW_RULES = {rule.__name__: rule for rule in _ROW_RULES}
# Code rules look at the function, and document rules at its documentation.
CODE_RULES = ("short_functions", "tests", "constructors", "magic_methods")
DOCUMENT_RULES = ("document_length", "images", "links", "not_ascii")
# rule -> the columns that it reads
COLUMNS = {name: tuple(inspect.signature(rule).parameters) for name, rule in ROW_RULES.items()}


def first_broken(row: Row, rules: Iterable[str], keep: Collection[str] = ()) -> str:
    """Returns the first rule that drops a row, or "" if no rule does. Rules in `keep` are ignored."""
    for name in rules:
        if name not in keep and ROW_RULES[name](*map(row.__getitem__, COLUMNS[name])):
            return name
    return ""
