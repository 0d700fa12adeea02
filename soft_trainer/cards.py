"""Tells whether somebody has edited a card, and keeps an edited card's text when a new version is pushed."""

from __future__ import annotations

import re

from huggingface_hub import CardData, RepoCard

from soft_trainer.fingerprints import fingerprint

_SIGNATURE = re.compile(r"\n<!-- unedited: (\w+) -->\n*\Z")
_RESULTS = re.compile(r"^## Results\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_HEADER_RESULTS = "model-index"


def sign(card: str) -> str:
    """Returns a card with a hash of its text in a comment at the end, so that an edit can be noticed."""
    text = _SIGNATURE.sub("\n", card).rstrip("\n")
    return f"{text}\n\n<!-- unedited: {fingerprint(text)[:16]} -->\n"


def is_signed(card: str) -> bool:
    """Returns True if nobody has edited a card since `sign`."""
    return _SIGNATURE.search(card) is not None and sign(card) == card.rstrip("\n") + "\n"


def updated(present: str, new: str) -> str:
    """Returns the card to push in place of a present one that somebody has edited: its text, with the new results.

    A card without text, such as the Hub makes for a license, only adds its fields to the new header.
    """
    theirs = RepoCard(present)
    ours = RepoCard(new)
    if not theirs.text.strip():
        ours.data = CardData(**theirs.data.to_dict() | ours.data.to_dict())
        return sign(str(ours))
    theirs.data.pop(_HEADER_RESULTS, None)
    if results := ours.data.get(_HEADER_RESULTS):
        theirs.data[_HEADER_RESULTS] = results
    section = _RESULTS.search(ours.text)
    theirs.text = _RESULTS.sub(lambda _: section[0] if section else "", theirs.text)
    return str(theirs)
