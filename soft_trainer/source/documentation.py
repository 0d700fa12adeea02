"""Turns a doc comment into a query: the comment's first paragraph, without delimiters, tags or markup."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc

# As in CodeSearchNet, `snake_case` is one token and `f()` is three.
_TOKEN = re.compile(r"\w+|[^\w\s]")

# The example that follows "... For example:" is not part of the summary.
_LEAD_IN = re.compile(r"(?i)(?<=[.!?)])\s+(for (example|instance)|examples?|usage|e\.g\.|as follows)\s*:+\s*$")

# Tags of Doxygen, JSDoc and TSDoc for a comment that belongs to its file, or to nothing that stands in the code.
_OTHER_SUBJECT = re.compile(
    r"(?m)^[\s/*!]*[@\\](file|fileoverview|overview|module|packageDocumentation|mainpage|page|defgroup|addtogroup"
    r"|weakgroup|typedef|callback|event|external)(?![\w:])|^[\s/*!]*SECTION:"
)
# Doxygen's commands that name what they document: the last word before the parameters.
_SUBJECT = re.compile(r"(?m)^[\s/*!]*[@\\](?:fn|def|var|struct|union)[ \t][^(\n]*?(\w+)[^\w(\n]*(?:\(|$)")
_LICENCE = re.compile(r"(?i)\bcopyright\b|\blicen[cs]ed?\b|\(c\)")

Substitution = tuple[str, str | Callable[[re.Match[str]], str]]


def strip_comment(comment: str, directive: str = "(?!)") -> str:
    """Returns a doc comment's text without delimiters, leading stars or common indentation.

    Args:
        comment: a `/** ... */` or `/*! ... */` comment, or `//`, `///`, `//!` or `#` lines.
        directive: a pattern for line comments to skip.
    """
    if comment.startswith("/*"):
        body = re.sub(r"^/\*+!?|\*+/$", "", comment)
        return cleandoc(re.sub(r"(?m)^[^\S\n]*\*(?!\*\w) ?", "", body))
    lines = [re.sub(r"^\s*(/+!?|#+)", "", line) for line in comment.splitlines() if not re.match(directive, line)]
    return cleandoc("\n" + "\n".join(lines))


def strip_ruby(comment: str) -> str:
    """Returns a Ruby doc comment's text, without directives for linters or type checkers.

    The comment consists of `#` lines, or of the lines from `=begin` to `=end`.
    """
    if comment.startswith("=begin"):
        return cleandoc("\n".join(comment.splitlines()[1:-1]))
    directive = r"\s*#(:|\s*(:nocov:|rubocop:|frozen_string_literal:|encoding:|-\*-|typed:|@api |!))"
    # RDoc ignores the text from `#--` to `#++`.
    return re.sub(r"(?ms)^--\s*$.*?(^\+\+\s*$|\Z)", "", strip_comment(comment, directive)).strip()


@dataclass(frozen=True)
class DocStyle:
    """The markup of one documentation format, such as Javadoc or Rustdoc.

    Attributes:
        substitutions: patterns that match markup, and their replacements, in the order in which they are applied.
        stop: a pattern for lines that end the summary.
        skip: a pattern for lines to skip in the summary.
        strip: a function that removes a doc comment's delimiters.
    """

    substitutions: tuple[Substitution, ...]
    stop: str
    skip: str = "(?!)"
    strip: Callable[[str], str] = strip_comment


def summary(docstring: str, style: DocStyle) -> str:
    """Returns the first paragraph of a docstring as plain text, or "" if the docstring has only tags."""
    for pattern, replacement in style.substitutions:
        docstring = re.sub(pattern, replacement, docstring)
    lines = []
    for line in cleandoc("\n" + docstring).splitlines():
        text = line.strip()
        if re.match(style.stop, line) or (lines and not text):
            break
        if text and not re.match(style.skip, line):
            lines.append(text)
    return _LEAD_IN.sub("", "\n".join(lines))


def is_about_another(comment: str, code: str, begins_file: bool) -> bool:
    """Returns True if a doc comment is a licence, or describes its file or something else than the code below it.

    Args:
        code: the beginning of the code below the comment.
        begins_file: True if the comment is the first thing in its file, and a blank line follows.
    """
    named = _SUBJECT.search(comment)
    if named and not re.search(rf"\b{named[1]}\b", code):
        return True
    return bool(_OTHER_SUBJECT.search(comment)) or (begins_file and bool(_LICENCE.search(comment)))


def document_tokens(text: str) -> list[str]:
    """Returns the words and punctuation of `text`, in order."""
    return _TOKEN.findall(text)


_BLOCK_TAGS = "p|br|hr|pre|ul|ol|li|dl|dt|dd|div|table|tr|td|th|h[1-6]|blockquote|example|summary|para|remarks"
_INLINE_TAGS = (
    "a|abbr|b|big|c|cite|code|del|em|font|i|img|ins|kbd|nobr|q|s|samp|small|span|strike|strong|sub|sup|tt|u|var"
)


def _link(match: re.Match[str]) -> str:
    """Returns an inline link's label, such as `label` for `{@link Map#get(Object) label}`, or its target."""
    target = match["target"]
    label = match["label"].strip(" |")
    return label or target.lstrip("#").replace("#", ".")


_HTML = (
    (r"(?s)<!--.*?-->", ""),
    (rf"(?i)</?({_BLOCK_TAGS})\b[^<>]*>", "\n\n"),
    (rf"(?i)</?({_INLINE_TAGS})(\s[^<>]*)?/?>", ""),
    (r"&(#\d+|#x[\da-fA-F]+|[A-Za-z]\w*);", lambda match: html.unescape(match[0])),
)
_QUOTES = ((r"`([\w.:\- ]+)'(?!\w)", r"'\1'"),)
_MARKDOWN = (
    *_QUOTES,
    (r"(?<![\w\])])!?\[([^\]\n]+)\](\([^)\s]*\)|\[[^\]\n]*\])", r"\1"),
    (r"(?<!`)`{1,2}(?!`)([^`]+)`{1,2}(?!`)", r"\1"),
    (r"(?<![\w*])\*{1,2}(?=\w)([^*\n]+?)\*{1,2}(?![\w*])", r"\1"),
)
_BRACED = r"((?:[^{}]|\{[^{}]*\})*)\}"
_DESCRIPTION = r"(?i:description|desc|summary|classdesc)\b"
_DESCRIBED = (
    (rf"(?ms)\A\s*@.*?(?=^\s*@{_DESCRIPTION})", ""),
    (rf"(?m)^\s*@{_DESCRIPTION}[:\s]*", ""),
)
_JAVADOC = (
    (r"\{@snippet\b(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}", ""),
    (r"(?i)\{@inheritdoc\}", ""),
    (r"\{@(?:link|linkplain|see|value)\s+(?P<target>[^\s({}|]*(?:\([^)]*\))?)(?P<label>[^{}]*)\}", _link),
    (rf"\{{@(?!return\b)\w+\s*{_BRACED}", r"\1"),
    (rf"\{{@return\s+{_BRACED}", r"Returns \1"),
)
_TAG_LINE = r"\s*@\w"
# An indented line is a block of code in some languages.
_INDENTED = r"(\t| {2,})\s*\S"
_UNDERLINE = r"\s*(?P<sign>[-=~^*#_])(?P=sign){2,}\s*$"

# Doxygen's commands begin with `@` or `\`. These name what is documented, and their line is not part of the summary.
_NAMING = (
    "addtogroup|class|cond|copybrief|copydetails|copydoc|def|defgroup|endcond|enum|extends|file|fn|headerfile|implements"
    "|ingroup|interface|internal|memberof|name|namespace|overload|private|property|protected|public|pure|related"
    "|relatedalso|relates|relatesalso|static|struct|typedef|union|var|weakgroup"
)
# These end the summary even in the middle of a line.
_SECTIONS = (
    "arg|attention|author|authors|bug|code|copyright|date|deprecated|dot|exception|image|include|invariant|li|msc|note"
    "|par|param|post|pre|remark|remarks|result|return|returns|retval|sa|see|since|snippet|test|throw|throws|todo|tparam"
    "|verbatim|version|warning"
)
_SIGN = r"(?<![^\s(])[@\\]"
# Paragraphs of sections before the description.
_LEADING_SECTIONS = (
    rf"\A(?:\s*[@\\](?!(?:code|dot|msc|verbatim)\b)(?:{_SECTIONS})\b.*(?:\n[ \t]*\S.*)*\n[ \t]*(?:\n|\Z))+"
    r"(?=\s*\S)"
)
_DOXYGEN = (
    (_LEADING_SECTIONS, ""),
    (rf"{_SIGN}(brief|short)\b\s*", ""),
    (rf"{_SIGN}details\b", "\n\n"),
    (rf"{_SIGN}(?=({_SECTIONS})\b)", "\n@"),
    (r"[@\\]link\s+(?P<target>\S+)(?P<label>[^@\\]*)[@\\]endlink\b", _link),
    (rf'{_SIGN}(ref|subpage)\s+\S+\s+"([^"\n]*)"', r"\2"),
    (rf"{_SIGN}(a|b|c|cite|e|em|p|ref|subpage)\s+(?=\S)", ""),
    (r"[@\\]f[$\[\]]|(?<!\S)[@\\]n\b|(?<![^\s(])%(?=[A-Za-z])", ""),
    (r"\\([@\\&$#<>%])", r"\1"),
)
_XML = (
    (r"(?s)\A.*?<summary>", ""),
    (r"<(param|typeparam|returns|value|exception|permission|seealso|code|list)\b", r"\n@\1 "),
    (r"</?inheritdoc\b[^<>]*>", ""),
    *_HTML,
    (
        r"<(?:see|paramref|typeparamref)\s+\w+\s*=\s*[\"'](?:[A-Z]:)?([^\"'<>]*)[\"']\s*/>",
        lambda match: match[1].replace("{", "<").replace("}", ">"),
    ),
    (r"<see\s[^<>]*>([^<>]*)</see>", r"\1"),
)

JAVADOC = DocStyle(_DESCRIBED + _JAVADOC + _HTML + _QUOTES, stop=_TAG_LINE)
# gtk-doc begins with the function's name and its parameters.
_GTK_DOC = (
    r"\A\s*[A-Za-z_][\w:.-]*:[ \t]*(?:\([^\n]*\))?[ \t]*(?:\n|\Z)"
    r"(?:[ \t]*@[\w.]+[ \t]*:[^\n]*(?:\n|\Z)(?:(?![ \t]*(?:@|\n))[^\n]+(?:\n|\Z))*)*"
)
DOXYGEN = DocStyle(
    ((_GTK_DOC, ""), *_JAVADOC, *_DOXYGEN, *_HTML, *_MARKDOWN),
    stop=rf"\s*[@\\](?!({_NAMING})\b)\w",
    skip=r"\s*[@\\][\w{}]",
)
CSHARP = DocStyle(_XML + _QUOTES, stop=_TAG_LINE)
PHPDOC = DocStyle(_JAVADOC + _HTML + _MARKDOWN, stop=_TAG_LINE)
JSDOC = DocStyle(
    _DESCRIBED + PHPDOC.substitutions,
    stop=rf"{_TAG_LINE}|\s*```|{_UNDERLINE}|\s*#+ (Examples?|Usage|Params?)",
)
GO = DocStyle(
    ((r"(?<![\w\])])\[\*?([A-Za-z_][\w./]*)\]", r"\1"), *_MARKDOWN),
    stop=rf"\s*(Deprecated:|#\s)|{_INDENTED}",
    skip=r"\s*(TODO|FIXME|XXX|BUG)\b",
    # `isDirective` in go/ast, and older forms.
    strip=partial(strip_comment, directive=r"\s*//((line|extern|export) |[a-z0-9]+:[a-z0-9]|nolint|#|\s*\+build)"),
)
# Sections of Rustdoc are headings. KDoc has Javadoc's tags, and Markdown.
RUST = DocStyle(GO.substitutions, stop=r"\s*#+ |\s*```")
KDOC = DocStyle(GO.substitutions, stop=rf"{_TAG_LINE}|\s*```")
# The signature of a function in C, which `help` would not show otherwise.
_SIGNATURES = r"\A(?:\s*[A-Za-z_][\w.]*\((?:[^()\n]|\([^()\n]*\))*\)(?:[ \t]*->.*)?[ \t]*\n)+(?=\s*\S)"
PYTHON = DocStyle(
    (
        (_SIGNATURES, ""),
        (r":[\w:.+-]+:`[~!]?([^`<]*?)(\s*<[^`>]*>)?`", r"\1"),
        (r"`([^`<]+?)\s*<[^`>]*>`_+", r"\1"),
        *_MARKDOWN,
        (r"(?m)::[ \t]*$", ":"),
    ),
    stop=(
        rf"{_TAG_LINE}|\s*:\w[^:]*:(\s|$)|\s*>>>|\s*\.\. \w|{_UNDERLINE}"
        r"|\s*(Args|Arguments|Params|Parameters|Keyword Args|Keywords|Returns?|Yields|Raises|Throws|Examples?|Usage"
        r"|Notes?|See Also|Attributes|Warnings?)\s*:?\s*$"
    ),
)
RUBY = DocStyle(
    (
        (r"(?m)^@!?\w.*(\n[ \t]+.*|\n(?=\n[ \t]+\S))*", "\n"),  # YARD's tags and directives, with their lines
        (r"\A(\s*=+ .*\n)+", ""),
        (r"(?m)^\s*:?call-seq:.*\n(([ \t]+.*)?\n)*", ""),
        (r":(nodoc|doc|yields?|args?|notnew|(stop|start)doc|include|section|category|(singleton-)?method):.*", ""),
        (r"\{(?P<target>[A-Z#.][\w:#.?!=]*(?:\([^)]*\))?)(?P<label>(?:\s+[^{}=]*)?)\}(?!\[)", _link),
        (r"\{([^{}]+)\}\[[^\]\s]*\]", r"\1"),
        (r"(?<!\w)\+([^\s+]+)\+(?!\w)", r"\1"),
        (r"(?<!\w)_([A-Za-z]\w*?)_(?!\w)", r"\1"),
        (r"(?<!\\)\\(?=[A-Za-z_#:])", ""),
        *_HTML,
        *_MARKDOWN,
    ),
    stop=(rf"{_TAG_LINE}|{_INDENTED}|=+ |\S+::(\s|$)|{_UNDERLINE}|(Examples?|Usage|Options|Parameters|Returns):+\s*$"),
    skip=r"\s*(TODO|FIXME|XXX)\b",
    strip=strip_ruby,
)
