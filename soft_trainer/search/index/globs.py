"""Translates path patterns into regular expressions that never backtrack exponentially.

The text between two wildcards is tried only at the first position where it matches: if the rest of the pattern fails
there, it fails at every later position as well. An atomic group, `(?>...)`, stops Python from trying them.
"""

from __future__ import annotations

import re
import string
from functools import lru_cache

# Wildcards in a list of tokens. All other tokens are expressions that match one character.
STAR = "*"  # anything but a slash
ANYTHING = "**"
FOLDERS = "**/"  # any number of whole folders
_WIDE = {ANYTHING: "(?s:.*?)", FOLDERS: "(?:[^/]*/)*?"}
_NARROW = {STAR: "[^/]*?"}

_PRINTED = "".join(map(chr, range(33, 127)))
_NAMED_SETS = {
    "alnum": string.ascii_letters + string.digits,
    "alpha": string.ascii_letters,
    "blank": " \t",
    "cntrl": "".join(map(chr, [*range(32), 127])),
    "digit": string.digits,
    "graph": _PRINTED,
    "lower": string.ascii_lowercase,
    "print": _PRINTED + " ",
    "punct": string.punctuation,
    "space": " \t\n\r",
    "upper": string.ascii_uppercase,
    "xdigit": string.hexdigits,
}
_STARS = re.compile(r"\*+")
_NAMED_SET = re.compile(r"\[:([^\]]*)\]")


@lru_cache(maxsize=256)
def path_filter(pattern: str) -> re.Pattern[str]:
    """Compiles a path pattern.

    `**` matches across folders; `*` and `?` do not. A pattern without `/` matches a file or folder at any depth.
    Brackets are ordinary characters, because some projects use them in folder names.
    """
    pattern = pattern.removeprefix("./")
    tokens = [] if "/" in pattern else [FOLDERS]
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


def git_tokens(pattern: str, has_slash: bool) -> list[str]:
    """Splits a git pattern into tokens. It must not include a leading `!` or slashes at either end.

    Raises:
        LookupError: the pattern is malformed, so it matches nothing.
    """
    tokens = []
    place = 0
    while place < len(pattern):
        if pattern[place] == "*":
            token, place = _git_wildcard(pattern, place, has_slash)
        elif pattern[place] == "[":
            token, place = _git_set(pattern, place + 1)
        elif pattern[place] == "?":
            token = "[^/]"
            place += 1
        else:
            place += pattern[place] == "\\"
            token = re.escape(pattern[place])
            place += 1
        tokens.append(token)
    return tokens


def _git_wildcard(pattern: str, start: int, has_slash: bool) -> tuple[str, int]:
    """Reads `*`, `**` or `**/`. Returns its token and the position after it."""
    end = _STARS.match(pattern, start).end()
    # git first cuts off the part without wildcards, so it treats `**` right after that part as the start of a name.
    starts_name = pattern[start - 1 : start] in ("", "/") or not re.search(r"[*?[\\]", pattern[:start])
    if not has_slash or end - start == 1 or not starts_name:
        return STAR, end
    if pattern.startswith("/", end):
        return FOLDERS, end + 1
    if end == len(pattern) or pattern.startswith("\\/", end):
        return ANYTHING, end
    return STAR, end


def _git_set(pattern: str, place: int) -> tuple[str, int]:
    """Reads a set such as `[a-z]`, starting after its bracket. Returns its token and the position after it."""
    negated = pattern[place] in "!^"
    place += negated
    members: set[str] = set()
    first = place
    lowest = ""  # the last single member, which may be the start of a range
    while place == first or pattern[place] != "]":
        named = _NAMED_SET.match(pattern, place)
        if pattern[place] == "-" and lowest and pattern[place + 1] != "]":
            place += 1 + (pattern[place + 1] == "\\")
            members.update(map(chr, range(ord(lowest), ord(pattern[place]) + 1)))
            lowest = ""
        elif named and named[1].endswith(":"):
            members.update(_NAMED_SETS[named[1][:-1]])
            lowest = ""
            place = named.end() - 1
        else:
            place += pattern[place] == "\\"
            lowest = pattern[place]
            members.add(lowest)
        place += 1
    listed = "".join(map(re.escape, sorted(members - {"/"})))
    if negated:
        return f"[^/{listed}]", place + 1
    return f"[{listed}]" if listed else "(?!)", place + 1


def expression(tokens: list[str], wildcards: dict[str, str] = _WIDE, at_end: bool = True) -> str:
    """Returns a regular expression for tokens, by default for a whole path.

    Args:
        wildcards: the wildcards to split the tokens at, with their expressions.
        at_end: True if the tokens extend to the end of the path. The last part is then not atomic.
    """
    parts = _split(tokens, wildcards)
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


def _split(tokens: list[str], wildcards: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Splits tokens at wildcards. Returns each wildcard with the tokens that follow it. The first one is ""."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    for token in tokens:
        if token not in wildcards:
            parts[-1][1].append(token)
        elif parts[-1] != (token, []):  # a repeated wildcard means the same as one
            parts.append((token, []))
    return parts
