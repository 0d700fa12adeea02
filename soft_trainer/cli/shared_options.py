"""Adds options that several commands share to their parsers."""

import argparse

TRUE = ("true", "t", "yes", "y", "1")
FALSE = ("false", "f", "no", "n", "0")


def to_bool(word: str) -> bool:
    """Converts a word such as "true" or "no" to a bool, as the parser of `transformers` does."""
    if word.lower() not in TRUE + FALSE:
        raise argparse.ArgumentTypeError(f"{word!r}: use true or false")
    return word.lower() in TRUE


def add_overwrite(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the option `--overwrite [true|false]`. Its help is "replace {what} in the output folder"."""
    text = f"replace {what} in the output folder"
    parser.add_argument("--overwrite", type=to_bool, nargs="?", const=True, default=False, help=text)
