"""Tells the search page whether a piece starts inside a docstring or a comment, so that it is coloured correctly."""

from __future__ import annotations

import re
from collections import deque

_STRINGS = r"""|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?"""
_PYTHON = re.compile(r'#[^\n]*|("""|\'\'\')(?:\\.|(?!\1)[^\\])*(\1)?' + _STRINGS, re.DOTALL)
_WITH_BLOCKS = re.compile(r"//[^\n]*|(/\*).*?(?:(\*/)|\Z)|`(?:\\.|[^`\\])*`?" + _STRINGS, re.DOTALL)
_BLOCK_LANGUAGES = frozenset(
    "c cpp csharp css dart go java javascript kotlin php rust scala swift tsx typescript zig".split()
)


def open_at(text: str, language: str, line: int) -> str:
    """Returns the delimiter that closes the docstring or comment open at the start of a line.

    If none is open, this is "".
    """
    if language != "python" and language not in _BLOCK_LANGUAGES:
        return ""
    before = "".join(f"{one}\n" for one in text.split("\n")[: line - 1])
    strings = _PYTHON if language == "python" else _WITH_BLOCKS
    last = deque(strings.finditer(before), maxlen=1)
    if not last or not last[0][1] or last[0][2]:
        return ""
    begun = last[0][1]
    return begun.replace("/*", "*/")
