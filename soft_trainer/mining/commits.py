"""Turns commit messages into queries, and detects commits that nobody would search for."""

from __future__ import annotations

import re

from soft_trainer.source.names import UNSPACED

MIN_WORDS = 3
_MAX_LENGTH = 2_000  # how many characters of a message are read; a long one could keep an expression busy

# The prefixes of conventional commits (`feat(scope)!: `), of NumPy (`ENH: `), and of similar conventions.
_PREFIX = re.compile(
    r"^(?:feat(?:ure)?|(?:bug|hot)?fix|docs?|style|refactor|perf|tests?|build|ci|chore|revert|wip|deps?|api|bug|enh|maint"
    r"|sty|tst|rel|security|improvement|misc)(?:\([^)]*\))?!?:\s*",
    re.IGNORECASE,
)
_TICKET = re.compile(r"^\[?[A-Z][A-Z0-9]+-\d+\]?:?\s+")
_CI = re.compile(r"\[[^\]]*\b(?:skip|no)[ -]\w+\]|\[\w+ (?:skip|only)\]", re.IGNORECASE)
_EMOJI = re.compile(
    r":[a-z][a-z0-9_+-]+:(?=\s|$)|[\u2300-\u23ff\u2600-\u27bf\u2b00-\u2bff\U0001f300-\U0001faff\ufe0f\u200d]"
)
_URL = re.compile(r"https?://\S+")
_EMAIL = re.compile(r"<?[\w.+-]+@[\w-]+(?:\.[\w-]+)+>?")
_WORD_OF_ISSUE = r"(?:fix(?:e[sd])?|close[sd]?|resolve[sd]?|refs?|see|issues?|pr|pull request|gh|part of|related to)"
_NUMBER = r"(?:[\w.-]+/[\w.-]+)?(?:#\d+|gh-\d+)"
_ISSUE = re.compile(
    rf"\(?\b{_WORD_OF_ISSUE}[\s:]+{_NUMBER}(?:(?:,|\s+and)\s*{_NUMBER})*\)?|\(\s*{_NUMBER}(?:[,\s]+{_NUMBER})*\s*\)"
    rf"|(?<!\w){_NUMBER}\b",
    re.IGNORECASE,
)
_EMPTY = re.compile(r"\(\s*\)|\[\s*\]")
# A word or, in a script without spaces between words, a pair of adjacent characters, as search counts them.
_WORD = re.compile(rf"[{UNSPACED}](?=[{UNSPACED}])|(?<![{UNSPACED}])[^\W\d_][^\W{UNSPACED}]*")

_REVERT = re.compile(r"(?i)^(?:revert|reapply|re-apply|back ?out|undo)\b|^(?:fixup|squash|amend)!")
# The messages of git and of hosts for merges, which a rebase or an import may leave with one parent.
_MERGE = re.compile(
    r"(?i)^merge (?:(?:remote-tracking )?branch(?:es)?|tags?|commits?) ['\"]|^merge (?:pull|merge) request [#!]?\d"
    r"|^merged? in(?:to)? \S+ \(pull request #\d"
)
_REVERTED = re.compile(r".*\n\s*This reverts commit [0-9a-f]{7,}")
# The whole subject decides: "Set the version header of every response" is no version bump.
_VERSION = re.compile(
    r"(?i)^v?\d+\.\d[\w.+-]*$"
    r"|^(?:(?:chore|build|ci)(?:\([^)]*\))?: )?"
    r"(?:(?:bump|upgrade|update|pin|unpin|downgrade|increase|change)\b.*\b(?:from|to|version|v)\s*v?\d+\.\d"
    r"|(?:update|set|increment|raise|change)\s+(?:the\s+)?(?:\w+\s+)?version\b"
    r"(?:.*\d+\.\d.*|(?:\s+(?:number|string|to|for|in|of))*(?:\s+\S+)?)$"
    r"|bump\b.*(?:\d|\bdep|requirement|submodule|\bversion)|(?:build|chore)\((?:deps|release)"
    r"|(?:prepar\w*|cut|tag|make|begin|start|new|pre|post|back)?[\s-]*(?:for|to)?\s*(?:the\s+)?(?:next\s+)?"
    r"(?:release|development|dev version|version)\b[\s:]*(?:of\s+)?(?:v?\d\S*(?:\s+\S+){0,3})?$)"
)
# A bot is known by its name, or by the address that GitHub gives to bots.
_BOT = re.compile(
    r"(?i)[^<]*\[bot\]|[^<]*<[^>]*\[bot\]@users\.noreply\.github\.com>|(?:[^<]*[\s_-])?bot <"
    r"|(?:mend )?(?:dependabot|renovate|greenkeeper|pre-commit-ci|pyup|imgbot(?:app)?|mergify|codecov|allcontributors"
    r"|(?:hosted )?weblate|github[- ]actions?|semantic-release|release-please)(?:-preview)? <"
)


def query_of(message: str) -> str:
    """Returns a commit's subject as a query, without prefixes, issue numbers, email addresses, URLs or emoji."""
    text = _EMOJI.sub(" ", _CI.sub(" ", _subject(message))).strip()
    text = _TICKET.sub("", _PREFIX.sub("", text))
    for pattern in (_URL, _EMAIL, _ISSUE, _EMPTY):
        text = pattern.sub(" ", text)
    return " ".join(text.split()).strip(" ,;:*-").rstrip(".\u3002")


def reason_against(message: str, author: str, committer: str) -> str:
    """Returns the reason to skip a commit because of its message, author or committer, or "" to keep the commit.

    Args:
        author, committer: people or bots, as `Name <email>`.
    """
    subject = _EMOJI.sub("", _subject(message)).strip()
    if _BOT.match(author) or _BOT.match(committer):
        return "bot"
    if _REVERT.search(subject) or _REVERTED.match(message.strip()[:_MAX_LENGTH]):
        return "revert"
    if _MERGE.match(subject):
        return "merge"
    if _VERSION.search(subject):
        return "version bump"
    if len(_WORD.findall(query_of(subject))) < MIN_WORDS:
        return f"subject under {MIN_WORDS} words"
    return ""


def _subject(message: str) -> str:
    """Returns a message's subject, as git defines it: the lines before the first blank line, joined by spaces."""
    paragraph = re.split(r"\n[ \t\r]*\n", message.strip()[:_MAX_LENGTH], maxsplit=1)[0]
    return " ".join(line.rstrip() for line in paragraph.split("\n"))
