"""Adds options that several commands share to their parsers."""

import argparse
from collections.abc import Iterable, Mapping
from typing import get_args, get_type_hints

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


def add_shared_options(parser: argparse.ArgumentParser, shared: Mapping[type, Iterable[str]]) -> None:
    """Adds the named fields of each option dataclass to a parser, with their types, defaults and help."""
    for options, names in shared.items():
        hints = get_type_hints(options)
        fields = options.__dataclass_fields__
        for name in names:
            # The first type of a union, such as `str | None`.
            kind = (*get_args(hints[name]), hints[name])[0]
            if kind is bool:
                kind = to_bool
            text = fields[name].metadata["help"].replace("%", "%%")
            parser.add_argument(f"--{name}", type=kind, default=fields[name].default, help=text)
