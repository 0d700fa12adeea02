"""Converts text to terms: splits identifiers, stems words and removes stop words."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from functools import lru_cache

from soft_trainer.source.names import UNSPACED, identifier_words

WORD = re.compile(r"\w+")  # identifiers stay whole: `self.parse_url` gives `self` and `parse_url`
# Longer words without `_` are usually hashes or encoded data.
MAX_WORD = 64
_UNSPACED_RUN = re.compile(f"[{UNSPACED}]+")
_RUN = re.compile(f"[{UNSPACED}]+|[^{UNSPACED}]+")
# These words say nothing about the code, but would get a high weight, because they are rare in code.
STOP_WORDS = frozenset(
    """a an and any are as at be been but by can could did do does for from had has have how i in into is it its
    me my of on or our should so such that the their them then there these they this those to us use used uses using
    was we were what when where which who why will with would you your""".split()
)
# A table for `bytes.translate` that replaces every byte outside ASCII words with a space.
_BLANKS = bytes(byte if WORD.match(chr(byte)) else ord(" ") for byte in range(128)).ljust(256)


def composed(text: str) -> str:
    """Returns the text in Unicode's form NFC, so that an accented letter is one character however it was stored."""
    return unicodedata.normalize("NFC", text)


def source_words(source: bytes) -> list[str]:
    """Splits source code into words.

    ASCII text is split without a regular expression, which is four times as fast.
    """
    if source.isascii():
        return source.translate(_BLANKS).decode().split()
    return WORD.findall(composed(source.decode(errors="replace")))


@lru_cache(maxsize=50_000)
def terms(word: str) -> tuple[str, ...]:
    """Returns a word's terms: its parts and, if an identifier has several parts, the stem of the whole word.

    The whole word is lower-cased without underscores, so `parse_url`, `parseUrl` and `ParseURL` have the same terms.
    """
    found = parts(word)
    if len(found) < 2 or is_unspaced(word):
        return found
    return (stem(whole(word)), *found)


def parts(word: str) -> tuple[str, ...]:
    """Returns the stemmed parts of an identifier, or a word's stem.

    In a script without spaces, a "word" may be a whole sentence. Its parts are all pairs of adjacent characters.
    """
    spaced = word
    if not word.isascii():
        spaced = _UNSPACED_RUN.sub("_", word)
    if len(max(spaced.split("_"), key=len)) > MAX_WORD:
        return ()
    found = []
    for part in identifier_words(word):
        if part.isascii():
            found.append(stem(part))
            continue
        for run in _RUN.findall(part):
            if len(run) > 2 and is_unspaced(run):
                found += [run[start : start + 2] for start in range(len(run) - 1)]
            else:
                found.append(stem(run))
    return tuple(found)


def is_unspaced(text: str) -> bool:
    """Returns True if a text has characters of a script without spaces between words."""
    return not text.isascii() and _UNSPACED_RUN.search(text) is not None


def telling_terms(text: str) -> list[str]:
    """Returns a text's terms in order, without stop words."""
    found = []
    for word in WORD.findall(composed(text)):
        if word.lower() not in STOP_WORDS:
            found += terms(word)
    return found


def whole(word: str) -> str:
    """Lower-cases a word and removes its underscores."""
    return word.replace("_", "").lower()


# Endings, longest first, with the number of letters that must remain before them.
_ENDINGS = (
    ("izations", 3), ("ization", 3), ("isation", 3), ("ations", 4), ("ation", 4), ("itions", 5), ("ition", 5),
    ("ators", 4), ("ating", 4), ("ator", 4), ("ated", 4), ("ates", 4), ("ate", 4), ("ions", 4), ("ion", 4),
    ("ings", 3), ("ing", 3), ("ers", 4), ("er", 4), ("ors", 4), ("or", 4), ("ed", 3), ("es", 3), ("s", 3),
)  # fmt: skip
_BY_LAST_LETTER = defaultdict(list)
for _ending, _least in _ENDINGS:
    _BY_LAST_LETTER[_ending[-1]].append((_ending, _least))


@lru_cache(maxsize=200_000)
def stem(word: str) -> str:
    """Reduces a word to its stem: `validates`, `validating`, `validator` and `validation` all become `valid`.

    The stem need not be a word. It only has to be the same for all forms of a word. A published Python stemmer takes
    ten times as long.
    """
    if len(word) < 3 or not word.isascii():
        return word
    if word.endswith(("ies", "ied")) and len(word) > 4:
        return word[:-2]
    for _ in range(2):  # `renderer`, `rendering`, `render`
        fitting = (
            end for end, least in _BY_LAST_LETTER[word[-1]] if word.endswith(end) and len(word) - len(end) >= least
        )
        ending = next(fitting, None)
        if ending is None or (ending == "s" and word.endswith("ss")):
            break
        word = word[: len(word) - len(ending)]
        if ending.startswith("iz") or ending == "isation":
            word += "iz"
        if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiouls":
            word = word[:-1]
    for last in ("e", "s"):
        if len(word) > 3 and word[-1] == last and not word.endswith("ss"):
            word = word[:-1]
    if len(word) > 2 and word[-1] == "y":
        return word[:-1] + "i"
    return word
