"""Turns a doc comment into a query: removes delimiters, tags and markup, keeps the first paragraph."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc

# As in CodeSearchNet, `snake_case` is one token and `f()` three.
_TOKEN = re.compile(r"\w+|[^\w\s]")

# The example that follows "... For example:" is not part of the summary.
_LEAD_IN = re.compile(r"(?i)(?<=[.!?)])\s+(for (example|instance)|examples?|usage|e\.g\.|as follows)\s*:+\s*$")

Substitution = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


@dataclass(frozen=True)
class DocStyle:
    """The markup of one ecosystem's documentation.

    `substitutions` remove markup, in order. The summary ends before the first line that matches `stop`, and leaves out
    lines that match `skip`.
    """

    substitutions: tuple[Substitution, ...]
    stop: re.Pattern[str]
    skip: re.Pattern[str] = re.compile(r"(?!)")


def summary(docstring: str, style: DocStyle) -> str:
    """The first paragraph of `docstring` as plain text, empty if it holds tags alone."""
    for pattern, replacement in style.substitutions:
        docstring = pattern.sub(replacement, docstring)
    lines: list[str] = []
    for line in cleandoc(docstring).splitlines():
        text = line.strip()
        if style.stop.match(line) or (lines and not text):
            break
        if text and not style.skip.match(line):
            lines.append(text)
    return _LEAD_IN.sub("", "\n".join(lines))


def document_tokens(text: str) -> list[str]:
    """The words and signs of `text`, in order."""
    return _TOKEN.findall(text)


def strip_block(comment: str) -> str:
    """The text of a `/** ... */` or `/* ... */` comment, without the stars in front of its lines."""
    body = re.sub(r"^/\*+|\*+/$", "", comment)
    return cleandoc("\n".join(re.sub(r"^\s*\*(?!\*\w) ?", "", line) for line in body.splitlines()))


def strip_line_comments(comment: str, sign: str) -> str:
    """The text of line comments that begin with `sign` (`//`, `#`), without their common indentation."""
    lines = (re.sub(rf"^\s*{sign}+", "", line) for line in comment.splitlines())
    return cleandoc("\n" + "\n".join(lines))


def strip_java(comment: str) -> str:
    """The text of a Javadoc comment, `/** ... */` or lines of `///`."""
    return strip_block(comment) if comment.startswith("/*") else strip_line_comments(comment, "/")


def strip_go(comment: str) -> str:
    """The text of a Go doc comment, without directives such as `//go:noinline` and `//nolint`."""
    if comment.startswith("/*"):
        return strip_block(comment)
    lines = (
        line for line in comment.splitlines() if not re.match(r"\s*//(go:|export |line |nolint|#|\s*\+build)", line)
    )
    return strip_line_comments("\n".join(lines), "//")


def strip_ruby(comment: str) -> str:
    """The text of a Ruby doc comment (`#` lines or `=begin` to `=end`), without linter and type directives."""
    if comment.startswith("=begin"):
        return cleandoc("\n".join(comment.splitlines()[1:-1]))
    directive = re.compile(r"\s*#(:|\s*(rubocop:|frozen_string_literal:|encoding:|-\*-|typed:|@api |!))")
    lines = (line for line in comment.splitlines() if not directive.match(line))
    text = strip_line_comments("\n".join(lines), "#")
    # RDoc ignores the text from `#--` to `#++`.
    return re.sub(r"(?ms)^--\s*$.*?(^\+\+\s*$|\Z)", "", text).strip()


def strip_python(literal: str) -> str:
    """The text of a Python docstring literal."""
    return cleandoc(re.sub(r"""(?s)^[a-zA-Z]*("{3}|'{3}|"|')(.*)\1$""", r"\2", literal)).strip()


_BLOCK_TAGS = "p|br|hr|pre|ul|ol|li|dl|dt|dd|div|table|tr|td|th|h[1-6]|blockquote|example|summary|para|remarks"
_INLINE_TAGS = (
    "a|abbr|b|big|c|cite|code|del|em|font|i|img|ins|kbd|nobr|q|s|samp|small|span|strike|strong|sub|sup|tt|u|var"
)


def _link(match: re.Match[str]) -> str:
    """The label of an inline link such as `{@link Map#get(Object) label}`, or its target."""
    target, label = match["target"], match["label"].strip(" |")
    return label or target.lstrip("#").replace("#", ".")


_HTML: tuple[Substitution, ...] = (
    (re.compile(r"(?s)<!--.*?-->"), ""),
    (re.compile(rf"(?i)</?({_BLOCK_TAGS})\b[^<>]*>"), "\n\n"),
    (re.compile(rf"(?i)</?({_INLINE_TAGS})(\s[^<>]*)?/?>"), ""),
    (re.compile(r"&(#\d+|#x[\da-fA-F]+|[A-Za-z]\w*);"), lambda match: html.unescape(match[0])),
)
_QUOTES: tuple[Substitution, ...] = ((re.compile(r"`([\w.:\- ]+)'(?!\w)"), r"'\1'"),)
_MARKDOWN: tuple[Substitution, ...] = (
    *_QUOTES,
    (re.compile(r"(?<![\w\])])!?\[([^\]\n]+)\](\([^)\s]*\)|\[[^\]\n]*\])"), r"\1"),
    (re.compile(r"(?<!`)`{1,2}(?!`)([^`]+)`{1,2}(?!`)"), r"\1"),
    (re.compile(r"(?<![\w*])\*{1,2}(?=\w)([^*\n]+?)\*{1,2}(?![\w*])"), r"\1"),
)
_BRACED = r"((?:[^{}]|\{[^{}]*\})*)\}"
_JAVADOC: tuple[Substitution, ...] = (
    (re.compile(r"(?i)\{@inheritdoc\}"), ""),
    (re.compile(r"\{@(?:link|linkplain|see|value)\s+(?P<target>[^\s({}|]*(?:\([^)]*\))?)(?P<label>[^{}]*)\}"), _link),
    (re.compile(rf"\{{@(?!return\b)\w+\s*{_BRACED}"), r"\1"),
    (re.compile(rf"\{{@return\s+{_BRACED}"), r"Returns \1"),
)
_TAG_LINE = r"\s*@\w"
# an indented line, in languages where it is a block of code
_INDENTED = r"(\t| {2,})\s*\S"
_UNDERLINE = r"\s*(?P<sign>[-=~^*#_])(?P=sign){2,}\s*$"

JAVADOC = DocStyle(_JAVADOC + _HTML + _QUOTES, stop=re.compile(_TAG_LINE))
PHPDOC = DocStyle(_JAVADOC + _HTML + _MARKDOWN, stop=re.compile(_TAG_LINE))
JSDOC = DocStyle(
    ((re.compile(r"(?m)^\s*@(description|desc|summary|classdesc)\b\s*"), ""), *_JAVADOC, *_HTML, *_MARKDOWN),
    stop=re.compile(rf"{_TAG_LINE}|\s*```|{_UNDERLINE}|\s*#+ (Examples?|Usage|Params?)"),
)
GO = DocStyle(
    ((re.compile(r"\[\*?([A-Za-z_][\w./]*)\]"), r"\1"), *_MARKDOWN),
    stop=re.compile(rf"\s*(Deprecated:|#\s)|{_INDENTED}"),
    skip=re.compile(r"\s*(TODO|FIXME|XXX|BUG)\b"),
)
# Rustdoc's sections are headings; KDoc has Javadoc's tags and Markdown
RUST = DocStyle(GO.substitutions, stop=re.compile(r"\s*#+ |\s*```"))
KDOC = DocStyle(GO.substitutions, stop=re.compile(rf"{_TAG_LINE}|\s*```"))
PYTHON = DocStyle(
    (
        (re.compile(r":[\w:.+-]+:`[~!]?([^`<]*?)(\s*<[^`>]*>)?`"), r"\1"),
        (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_+"), r"\1"),
        *_MARKDOWN,
        (re.compile(r"(?m)::[ \t]*$"), ":"),
    ),
    stop=re.compile(
        rf"{_TAG_LINE}|\s*:\w[^:]*:(\s|$)|\s*>>>|\s*\.\. \w|{_UNDERLINE}"
        r"|\s*(Args|Arguments|Params|Parameters|Keyword Args|Keywords|Returns?|Yields|Raises|Throws|Examples?|Usage"
        r"|Notes?|See Also|Attributes|Warnings?)\s*:?\s*$"
    ),
)
RUBY = DocStyle(
    (
        (re.compile(r"(?m)^\s*:?call-seq:.*\n(([ \t]+.*)?\n)*"), ""),
        (
            re.compile(
                r":(nodoc|doc|yields?|args?|notnew|(stop|start)doc|include|section|category|(singleton-)?method):.*"
            ),
            "",
        ),
        (re.compile(r"\{(?P<target>[A-Z#.][\w:#.?!=]*(?:\([^)]*\))?)(?P<label>(?:\s+[^{}=]*)?)\}(?!\[)"), _link),
        (re.compile(r"\{([^{}]+)\}\[[^\]\s]*\]"), r"\1"),
        (re.compile(r"(?<!\w)\+([^\s+]+)\+(?!\w)"), r"\1"),
        (re.compile(r"(?<!\w)_([A-Za-z]\w*?)_(?!\w)"), r"\1"),
        (re.compile(r"(?<!\\)\\(?=[A-Za-z_#:])"), ""),
        *_HTML,
        *_MARKDOWN,
    ),
    stop=re.compile(
        rf"{_TAG_LINE}|{_INDENTED}|=+ |\S+::(\s|$)|{_UNDERLINE}|(Examples?|Usage|Options|Parameters|Returns):+\s*$"
    ),
    skip=re.compile(r"\s*(TODO|FIXME|XXX)\b"),
)
