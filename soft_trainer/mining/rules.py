"""The rules by which CodeSearchNet and GraphCodeBERT choose their rows.

Most rules look at a single row in CodeSearchNet's columns and return True to drop it. `comments` drops nothing but
removes the comments from the code. The two rules on duplicates compare a row with the rows before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from soft_trainer import dataflow
from soft_trainer.mining.identifiers import identifier_words

Row = dict[str, Any]

MIN_CODE_LINES = 3
MIN_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS = 3, 256

CONSTRUCTORS = {
    "ruby": {"initialize"},
    "python": {"__init__", "__new__"},
    "javascript": {"constructor"},
    "typescript": {"constructor"},
    "tsx": {"constructor"},
    "php": {"__construct", "__destruct"},
}
# Languages whose constructors have the name of the class.
_NAMED_AS_CLASS = {"java", "csharp", "cpp"}
# CodeSearchNet's lists of methods that any class may have. Those of Python and PHP are a pattern.
MAGIC_METHODS = {
    "ruby": set("to_s to_text inspect display dup clone equal? eql? hash == != === =~ <=> <= < > >= between?".split()),
    "java": set("toString hashCode equals finalize notify notifyAll clone".split()),
    "javascript": set("toString toLocaleString valueOf".split()),
    "go": {"String", "GoString"},
    "typescript": set("toString toLocaleString valueOf".split()),
    "tsx": set("toString toLocaleString valueOf".split()),
    "csharp": set("ToString GetHashCode Equals Dispose Finalize".split()),
    "kotlin": set("toString hashCode equals".split()),
    "rust": set("fmt eq ne cmp partial_cmp hash clone drop default".split()),
}
_MAGIC_PATTERN = {"python": re.compile(r"__\w+__"), "php": re.compile(r"__[a-z]\w*")}
_TEST_WORDS = {"test", "tests"}
_SPEC_LANGUAGES = {"ruby", "javascript", "typescript", "tsx"}
_IMAGE = re.compile(r"<\s*img\b", re.IGNORECASE)
_LINK = re.compile(r"https?\s*:\s*/\s*/", re.IGNORECASE)


def does_not_parse(row: Row) -> bool:
    """The code has a syntax error."""
    return not dataflow.parses(row["code"], row["language"])


def is_short(row: Row) -> bool:
    """The code has fewer than three lines, blank ones not counted."""
    return sum(1 for line in row["code"].splitlines() if line.strip()) < MIN_CODE_LINES


def is_test(row: Row) -> bool:
    """The function's name or its path contains the word `test` (in Ruby and JavaScript also `spec` in the path)."""
    return is_test_path(row["path"], row["language"]) or not _TEST_WORDS.isdisjoint(identifier_words(_own_name(row)))


def is_test_path(path: str, language: str) -> bool:
    """True if the path looks like a test: `tests/`, `test_x.py`, `XTest.java`, `x.spec.js`."""
    words = _TEST_WORDS | {"spec", "specs"} if language in _SPEC_LANGUAGES else _TEST_WORDS
    return not words.isdisjoint(identifier_words(path))


def is_constructor(row: Row) -> bool:
    """The function's name is that of a constructor or destructor, in Java that of its class."""
    *scope, name = row["func_name"].split(".")
    language = row["language"]
    return name in CONSTRUCTORS.get(language, ()) or (language in _NAMED_AS_CLASS and scope[-1:] == [name])


def is_magic(row: Row) -> bool:
    """The function is a method that any class may have, such as `__str__`, `toString` or `<=>`, but no constructor."""
    name, language = _own_name(row), row["language"]
    pattern = _MAGIC_PATTERN.get(language)
    magic = bool(pattern.fullmatch(name)) if pattern else name in MAGIC_METHODS.get(language, ())
    return magic and not is_constructor(row)


def has_document_of_odd_length(row: Row) -> bool:
    """The document has fewer than 3 or more than 256 tokens."""
    return not MIN_DOCUMENT_TOKENS <= len(row["docstring_tokens"]) <= MAX_DOCUMENT_TOKENS


def has_image(row: Row) -> bool:
    """The document contains `<img ...>`."""
    return bool(_IMAGE.search(_document(row)))


def has_link(row: Row) -> bool:
    """The document contains `http://` or `https://`."""
    return bool(_LINK.search(_document(row)))


def is_not_english(row: Row) -> bool:
    """The document has a character outside ASCII, which no published query has."""
    return not _document(row).isascii()


def _own_name(row: Row) -> str:
    """The function's name without its class."""
    return row["func_name"].rsplit(".", 1)[-1]


def _document(row: Row) -> str:
    """The query of a row as one string."""
    return " ".join(row["docstring_tokens"])


# name -> True for a row to drop. Code rules look at the function, document rules at its documentation.
CODE_RULES: dict[str, Callable[[Row], bool]] = {
    "short_functions": is_short,
    "tests": is_test,
    "constructors": is_constructor,
    "magic_methods": is_magic,
}
DOCUMENT_RULES: dict[str, Callable[[Row], bool]] = {
    "document_length": has_document_of_odd_length,
    "images": has_image,
    "links": has_link,
    "not_english": is_not_english,
}
ROW_RULES = {"unparseable": does_not_parse, **CODE_RULES, **DOCUMENT_RULES}
RULES: dict[str, str] = {
    "comments": "Comments and docstrings are removed from the code. The count is the number of rows with comments.",
    **{name: (rule.__doc__ or "").strip() for name, rule in ROW_RULES.items()},
    "duplicates": "An earlier row has the same code tokens.",
    "near_duplicates": "An earlier row has nearly the same code tokens.",
}
# rule -> the columns that it reads
COLUMNS: dict[str, tuple[str, ...]] = {
    "comments": ("code", "code_tokens", "language"),
    "unparseable": ("code", "language"),
    "short_functions": ("code",),
    "tests": ("path", "func_name", "language"),
    "constructors": ("func_name", "language"),
    "magic_methods": ("func_name", "language"),
    **{name: ("docstring_tokens",) for name in DOCUMENT_RULES},
    "duplicates": ("code_tokens",),
    "near_duplicates": ("code_tokens",),
}
GRAPHCODEBERT_RULES = ("comments", "unparseable", *DOCUMENT_RULES)
CODESEARCHNET_RULES = (*CODE_RULES, "duplicates", "near_duplicates")


def first_broken(row: Row, rules: Iterable[str]) -> str:
    """The first of `rules` that drops `row`, empty if no rule does."""
    return next((name for name in rules if ROW_RULES[name](row)), "")
