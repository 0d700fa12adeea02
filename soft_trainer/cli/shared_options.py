"""Options that a command shares with training, by name."""

import argparse
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import get_args, get_type_hints

from transformers.hf_argparser import string_to_bool


def add_shared_options(parser: argparse.ArgumentParser, shared: Mapping[type, Iterable[str]]) -> None:
    """Adds the named fields of each dataclass to a command's parser, with their types, defaults and help."""
    for options, names in shared.items():
        hints, fields = get_type_hints(options), options.__dataclass_fields__
        for name in names:
            kind = next(kind for kind in get_args(hints[name]) or (hints[name],) if kind is not NoneType)
            parser.add_argument(
                f"--{name}",
                type=string_to_bool if kind is bool else kind,
                default=fields[name].default,
                help=fields[name].metadata["help"].replace("%", "%%"),
            )
