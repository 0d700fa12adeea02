"""The rules by which CodeSearchNet and GraphCodeBERT choose their rows.

Most rules look at one row, in CodeSearchNet's columns, and say whether it goes. `comments` drops nothing: it takes the
comments off the code. Whether a row is a duplicate depends on the rows before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from soft_trainer import dataflow

if TYPE_CHECKING:
    pass

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
# their constructors have the name of the class
_NAMED_AS_CLASS = {"java", "csharp", "cpp"}
# CodeSearchNet's own lists of methods that every class may have; `__names__` of Python and PHP are a pattern
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
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_IMAGE = re.compile(r"<\s*img\b", re.IGNORECASE)
_LINK = re.compile(r"https?\s*:\s*/\s*/", re.IGNORECASE)


def does_not_parse(row: Row) -> bool:
    """Code that has a syntax error, or of which the grammar has no idea."""
    return not dataflow.parses(row["code"], row["language"])


def is_short(row: Row) -> bool:
    """Under three lines of code, blank ones not counted."""
    return sum(1 for line in row["code"].splitlines() if line.strip()) < MIN_CODE_LINES


def is_test(row: Row) -> bool:
    """A test: `test` is a word of the function's own name, or of its path (in Ruby and JavaScript also `spec`)."""
    return is_test_path(row["path"], row["language"]) or bool(_TEST_WORDS & _words(_own_name(row)))


def is_test_path(path: str, language: str) -> bool:
    """Whether a file or a folder of its is named as tests are: `tests/`, `test_x.py`, `XTest.java`, `x.spec.js`."""
    words = _TEST_WORDS | {"spec", "specs"} if language in _SPEC_LANGUAGES else _TEST_WORDS
    return bool(words & _words(path))


def is_constructor(row: Row) -> bool:
    """A constructor or destructor, by its name; in Java one that is named as its class is."""
    *scope, name = row["func_name"].split(".")
    language = row["language"]
    return name in CONSTRUCTORS.get(language, ()) or (language in _NAMED_AS_CLASS and scope[-1:] == [name])


def is_magic(row: Row) -> bool:
    """A method that any class may have, such as `__str__`, `toString` or `<=>`, constructors not counted."""
    name, language = _own_name(row), row["language"]
    pattern = _MAGIC_PATTERN.get(language)
    magic = bool(pattern.fullmatch(name)) if pattern else name in MAGIC_METHODS.get(language, ())
    return magic and not is_constructor(row)


def has_document_of_odd_length(row: Row) -> bool:
    """A document of under 3 or over 256 tokens."""
    return not MIN_DOCUMENT_TOKENS <= len(row["docstring_tokens"]) <= MAX_DOCUMENT_TOKENS


def has_image(row: Row) -> bool:
    """`<img ...>` in the document."""
    return bool(_IMAGE.search(_document(row)))


def has_link(row: Row) -> bool:
    """`http://` or `https://` in the document."""
    return bool(_LINK.search(_document(row)))


def is_not_english(row: Row) -> bool:
    """A character outside ASCII in the document: no published query has one."""
    return not _document(row).isascii()


def _own_name(row: Row) -> str:
    """The function's name without its class."""
    return row["func_name"].rsplit(".", 1)[-1]


def _document(row: Row) -> str:
    """The query of a row as one string."""
    return " ".join(row["docstring_tokens"])


def _words(name: str) -> set[str]:
    """The lower-case words of an identifier or a path: `FooTest`, `foo_test` and `foo/test` hold `test`."""
    return {word.lower() for word in _WORD.findall(name)}


# name -> whether a row goes: rules that look at the function, and rules that look at its document
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
    "comments": "Comments and docstrings are taken off the code; counts the rows that had some.",
    **{name: (rule.__doc__ or "").strip() for name, rule in ROW_RULES.items()},
    "duplicates": "The same code tokens as a row before.",
    "near_duplicates": "Nearly the same code tokens as a row before.",
}
GRAPHCODEBERT_RULES = ("comments", "unparseable", *DOCUMENT_RULES)
CODESEARCHNET_RULES = (*CODE_RULES, "duplicates", "near_duplicates")


def first_broken(row: Row, rules: Iterable[str]) -> str:
    """The first of `rules` that drops `row`; empty where none does."""
    return next((name for name in rules if ROW_RULES[name](row)), "")
