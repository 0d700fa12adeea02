"""The rules by which CodeSearchNet and GraphCodeBERT choose their rows.

Most rules look at one row, in CodeSearchNet's columns, and say whether it goes. `comments` drops nothing: it takes the
comments off the code. Whether a row is a duplicate depends on the rows before it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soft_trainer import dataflow
from soft_trainer.data.duplicates import exact_duplicates, fingerprint, minhash, near_duplicates
from soft_trainer.errors import SetupError

if TYPE_CHECKING:
    from datasets import Dataset, Features

Row = dict[str, Any]

MIN_CODE_LINES = 3
MIN_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS = 3, 256

CONSTRUCTORS = {
    "ruby": {"initialize"},
    "python": {"__init__", "__new__"},
    "java": set(),
    "javascript": {"constructor"},
    "php": {"__construct", "__destruct"},
    "go": set(),
}
# CodeSearchNet's own lists of methods that every class may have; `__names__` of Python and PHP are a pattern
MAGIC_METHODS = {
    "ruby": set("to_s to_text inspect display dup clone equal? eql? hash == != === =~ <=> <= < > >= between?".split()),
    "java": set("toString hashCode equals finalize notify notifyAll clone".split()),
    "javascript": set("toString toLocaleString valueOf".split()),
    "go": {"String", "GoString"},
}
_MAGIC_PATTERN = {"python": re.compile(r"__\w+__"), "php": re.compile(r"__[a-z]\w*")}
_TEST_WORDS = {"test", "tests"}
_SPEC_LANGUAGES = {"ruby", "javascript"}
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
    return name in CONSTRUCTORS[row["language"]] or (row["language"] == "java" and scope[-1:] == [name])


def is_magic(row: Row) -> bool:
    """A method that any class may have, such as `__str__`, `toString` or `<=>`, constructors not counted."""
    name, language = _own_name(row), row["language"]
    pattern = _MAGIC_PATTERN.get(language)
    magic = bool(pattern.fullmatch(name)) if pattern else name in MAGIC_METHODS[language]
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
_ROW_RULES = {"unparseable": does_not_parse, **CODE_RULES, **DOCUMENT_RULES}
RULES: dict[str, str] = {
    "comments": "Comments and docstrings are taken off the code; counts the rows that had some.",
    **{name: (rule.__doc__ or "").strip() for name, rule in _ROW_RULES.items()},
    "duplicates": "The same code tokens as a row before.",
    "near_duplicates": "Nearly the same code tokens as a row before.",
}
GRAPHCODEBERT_RULES = ("comments", "unparseable", *DOCUMENT_RULES)
CODESEARCHNET_RULES = (*CODE_RULES, "duplicates", "near_duplicates")


def filter_rows(dataset: Dataset, rules: Sequence[str], num_proc: int | None = None) -> tuple[Dataset, dict[str, int]]:
    """Apply `rules` to `dataset`, in the order of `RULES`; a codebase without documents has no use for those on them.

    Args:
        dataset: rows in CodeSearchNet's columns.
        rules: names from `RULES`.
        num_proc: processes of `datasets.map`; None means one a CPU core, as far as there are rows for them.

    Returns:
        The rows that stay, in order, and for each rule the number of rows that it was the first to drop (`comments`:
        the number of rows that it changed).

    Raises:
        SetupError: an unknown rule.
    """
    from soft_trainer.data.tokens import PARSED_AT_ONCE, processes_for

    if unknown := sorted(set(rules) - set(RULES)):
        raise SetupError(f"filter {unknown[0]!r}: no such rule; use {', '.join(RULES)}")
    counts = {name: 0 for name in RULES if name in rules}
    num_proc = num_proc or processes_for(len(dataset))
    if "comments" in rules:
        dataset = dataset.map(_without_comments, batched=True, num_proc=num_proc, desc="comments")
        counts["comments"] = sum(dataset.data.column("had_comments").to_pylist())
        dataset = dataset.remove_columns("had_comments")
    verdicts = dataset.map(
        _judge,
        batched=True,
        batch_size=PARSED_AT_ONCE,
        fn_kwargs={"rules": list(rules)},
        remove_columns=dataset.column_names,
        num_proc=num_proc,
        features=_verdict_features(rules),
        desc="filtering",
    )
    reasons = np.asarray(verdicts["dropped_by"][:], dtype=object)
    _mark_duplicates(verdicts, reasons)
    counts.update(Counter(reason for reason in reasons if reason))
    return dataset.select(np.flatnonzero(reasons == "")), counts


def first_broken(row: Row, rules: Iterable[str]) -> str:
    """The first of `rules` that drops `row`; empty where none does."""
    return next((name for name in rules if _ROW_RULES[name](row)), "")


def _rows(batch: dict[str, list]) -> list[Row]:
    """A batch of columns as rows."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _without_comments(batch: dict[str, list]) -> dict[str, list]:
    """The batch with `code` and `code_tokens` free of comments, and whether there were any."""
    result: dict[str, list] = {"code": [], "code_tokens": [], "had_comments": []}
    for code, tokens, language in zip(batch["code"], batch["code_tokens"], batch["language"], strict=True):
        bare = dataflow.remove_comments(code, language)
        had_comments = bare.split() != code.split()
        result["code"].append(bare if had_comments else code)
        result["code_tokens"].append(dataflow.code_tokens(bare, language) if had_comments else tokens)
        result["had_comments"].append(had_comments)
    return result


def _verdict_features(rules: Sequence[str]) -> Features:
    """The columns that `_judge` makes."""
    from datasets import Features, List, Value

    known_by = {"duplicates": {"fingerprint": Value("uint64")}, "near_duplicates": {"minhash": List(Value("uint32"))}}
    columns = {"dropped_by": Value("string")}
    for rule in known_by:
        columns |= known_by[rule] if rule in rules else {}
    return Features(columns)


def _judge(batch: dict[str, list], rules: Sequence[str]) -> dict[str, Sequence]:
    """The rule that drops each row, and by what duplicates of the others are known."""
    reasons = [first_broken(row, [rule for rule in _ROW_RULES if rule in rules]) for row in _rows(batch)]
    known_by: dict[str, Sequence] = {"dropped_by": reasons}
    if "duplicates" in rules:
        known_by["fingerprint"] = np.fromiter(map(fingerprint, batch["code_tokens"]), np.uint64)
    if "near_duplicates" in rules:
        known_by["minhash"] = [minhash(tokens) for tokens in batch["code_tokens"]]
    return known_by


def _mark_duplicates(verdicts: Dataset, reasons: np.ndarray) -> None:
    """Write the rule that drops it into `reasons` for every row left that is a duplicate of one before."""
    from soft_trainer.data.tokens import TokenColumn

    if "fingerprint" in verdicts.column_names:
        left = np.flatnonzero(reasons == "")
        fingerprints = verdicts.data.column("fingerprint").to_numpy()[left]
        reasons[left[exact_duplicates(fingerprints)]] = "duplicates"
    if "minhash" in verdicts.column_names:
        left = np.flatnonzero(reasons == "")
        signatures = TokenColumn.from_dataset(verdicts, "minhash")
        reasons[left[near_duplicates(left, signatures.__getitem__)]] = "near_duplicates"
