"""Options from the command line and from a YAML recipe, and errors as one line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from soft_trainer.errors import SetupError

if TYPE_CHECKING:
    from transformers import HfArgumentParser

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parse(dataclass_types: Sequence[type], argv: Sequence[str] | None = None, description: str | None = None) -> tuple:
    """One instance of each of `dataclass_types` from `--option value` and `--config FILE.yaml`.

    What stands on the command line wins over the recipe. A recipe is a flat mapping of option names; its key `base`
    names another recipe, relative to its own folder, that it changes.

    Raises:
        SetupError: an unknown option or key (names the nearest), a value that an option does not take, a recipe that
            cannot be read.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(tuple(dataclass_types), description)
    known = {option.lstrip("-") for option in parser._option_string_actions}
    recipe = _take_config(argv)
    options = read_recipe(recipe) if recipe else {}
    for key in options:
        if key not in known:
            raise SetupError(f"{recipe}: unknown option {key!r}{_nearest(str(key), known)}")
    try:
        *parsed, rest = parser.parse_args_into_dataclasses(
            [*as_argv(options), *argv], return_remaining_strings=True, look_for_args_file=False
        )
    except (argparse.ArgumentError, ValueError, ImportError) as error:
        raise SetupError(str(error)) from error
    if rest:
        raise SetupError(f"unknown option {rest[0]}{_nearest(rest[0].lstrip('-').split('=')[0], known)}")
    return tuple(parsed[: len(dataclass_types)])


@functools.cache
def _parser(dataclass_types: tuple[type, ...], description: str | None) -> HfArgumentParser:
    """Made once: a study reads the options of hundreds of runs, and making it takes most of the time of that."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(dataclass_types, description=description, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", help="YAML recipe of options; those on the command line win.")
    parser.error = _raise
    return parser


def read_recipe(path: str | Path, readers: tuple[Path, ...] = ()) -> dict:
    """The options of a recipe, those of its `base` first; `readers` are the recipes that it is a base of."""
    path = Path(path)
    if path.resolve() in readers:
        raise SetupError(f"{path}: is its own base")
    try:
        options = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise SetupError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SetupError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise SetupError(f"{path}: a mapping of options is expected")
    base = options.pop("base", None)
    return {**(read_recipe(path.parent / base, (*readers, path.resolve())) if base else {}), **options}


@contextlib.contextmanager
def errors_for_people() -> Iterator[None]:
    """Turn a SetupError, or a full disk, into one line on standard error and exit code 2."""
    try:
        yield
    except (SetupError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL_DISK:
            raise
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)


def _take_config(argv: list[str]) -> str | None:
    """Remove `--config FILE` from `argv` and return FILE."""
    for place, word in enumerate(argv):
        if word == "--config":
            if place + 1 == len(argv):
                raise SetupError("--config: name a YAML file")
            del argv[place]
            return argv.pop(place)
        if word.startswith("--config="):
            return argv.pop(place).partition("=")[2]
    return None


def as_argv(options: dict) -> list[str]:
    """Options as they are written on the command line; None is left out."""
    argv = []
    for key, value in options.items():
        if value is not None:
            argv += [f"--{key}", *(_word(item) for item in (value if isinstance(value, list) else [value]))]
    return argv


def _word(value) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _nearest(key: str, known: set[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; --help lists them all"


def _raise(message: str):
    raise SetupError(message)
