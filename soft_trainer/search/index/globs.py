"""Translates path patterns into regular expressions that never backtrack exponentially.

The text between two wildcards is tried only at the first position where it matches. If the rest of the pattern fails
there, the rest also fails at every later position. An atomic group, `(?>...)`, keeps Python from trying those.
"""

from __future__ import annotations

import re
from functools import lru_cache

from soft_trainer.search.index.words import composed

# Wildcards in a list of tokens. All other tokens are expressions that match one character.
STAR = "*"  # anything but a slash
ANYTHING = "**"
FOLDERS = "**/"  # any number of whole folders
_WIDE = {ANYTHING: "(?s:.*?)", FOLDERS: "(?:[^/]*/)*?"}
_NARROW = {STAR: "[^/]*?"}


@lru_cache(maxsize=256)
def path_filter(pattern: str) -> re.Pattern[str]:
    """Compiles a path pattern, such as `src/**`, to a regular expression.

    `**` matches across folders, but `*` and `?` do not. A pattern without `/` matches a file or folder at any depth,
    and `/` at the start stands for the indexed folder. `{ts,tsx}` matches either. Brackets are ordinary characters,
    because some projects use them in folder names. The expression is for paths in Unicode's form NFC; see `composed`.
    """
    pattern = composed(pattern.removeprefix("./"))
    if braces := re.search(r"\{([^{}]*,[^{}]*)\}", pattern):
        each = (pattern[: braces.start()] + one + pattern[braces.end() :] for one in braces[1].split(","))
        return re.compile("|".join(path_filter(one).pattern for one in each))
    tokens = [] if "/" in pattern else [FOLDERS]
    pattern = pattern.removeprefix("/")
    if pattern.endswith("/"):
        pattern += "**"
    for part in re.split(r"((?:^|(?<=/))\*\*+/|\*+|\?)", pattern):
        if part == "?":
            tokens.append("[^/]")
        elif part.startswith("**"):
            tokens.append(FOLDERS if part.endswith("/") else ANYTHING)
        elif part == "*":
            tokens.append(STAR)
        else:
            tokens += map(re.escape, part)
    return re.compile(expression(tokens) + "(?s:/.*)?")


def expression(tokens: list[str], wildcards: dict[str, str] = _WIDE, at_end: bool = True) -> str:
    """Converts a pattern's tokens to a regular expression, which by default matches a whole path.

    Args:
        wildcards: the regular expression for each wildcard at which to split the tokens.
        at_end: True if the tokens extend to the end of the path, so that the last part must not be atomic.
    """
    parts = [("", [])]  # a wildcard, and the tokens after it
    for token in tokens:
        if token not in wildcards:
            parts[-1][1].append(token)
        elif parts[-1] != (token, []):  # a repeated wildcard means the same as one
            parts.append((token, []))
    written = ""
    for number, (wildcard, inner) in enumerate(parts, 1):
        last = at_end and number == len(parts)
        part = wildcards.get(wildcard, "")
        if wildcards is _WIDE:
            part += expression(inner, _NARROW, last)
        else:
            part += "".join(inner)
        written += part if last else f"(?>{part})"
    return written
