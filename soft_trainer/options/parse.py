"""Reads options from the command line and from recipes into dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import sys
from collections.abc import Mapping, Sequence

from soft_trainer.errors import UserError
from soft_trainer.options.declared import declared_options
from soft_trainer.options.fields import PARTS, DataArguments, TrainingOptions
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.recipes import read_recipe, recipe_path
from soft_trainer.options.removed import refuse_removed
from soft_trainer.terminal import nearest


def parse(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    prog: str | None = None,
    options: Mapping | None = None,
) -> tuple:
    """Makes one instance of each of `dataclass_types` (of `whole` of it) from `--option value` and `--config RECIPE`.

    What stands on the command line wins over the recipe. A recipe is a flat mapping of option names; its key `base`
    names another recipe, relative to its own folder, that it changes. A file wins over the name of a recipe of the
    package. Each instance has an attribute `given`, the names of the options that somebody gave. A list is joined by
    commas for an option that takes one text.

    Args:
        options: the options of a recipe that is read already, in place of `--config`.

    Raises:
        SystemExit: `--help` or `--help_all` was printed.
        UserError: an unknown option or key (names the nearest), a value that an option does not take, a recipe that
            cannot be read.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        short_help(dataclass_types, description=description, prog=prog).print_help()
        sys.exit(0)
    parser = make_parser(tuple(dataclass_types), description=description, prog=prog)
    actions = {name.lstrip("-"): action for name, action in parser._option_string_actions.items()}
    config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config.add_argument("--config")
    config.error = _raise
    named, argv = config.parse_known_args(argv)
    recipe = named.config
    place = ""
    options = dict(options or {})
    if recipe:
        place = f"{recipe}: "
        options = read_recipe(recipe_path(recipe))
    for key, value in options.items():
        if key not in actions:
            refuse_removed([key], place)
            raise UserError(f"{place}unknown option {key!r}{nearest(key, actions)}")
        if isinstance(value, list) and actions[key].nargs is None:  # the option takes one text
            options[key] = ",".join(map(_word, value))
    argv = [*as_argv(options), *argv]
    try:
        *parsed, rest = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    except (argparse.ArgumentError, ValueError, ImportError, FileNotFoundError) as error:
        raise UserError(str(error)) from error
    if rest:
        _refuse_word(rest[0].split("=")[0], actions)
    # The parser takes --learning-rate for --learning_rate, and --epochs for --num_train_epochs.
    words = (word.removeprefix("--").split("=")[0] for word in argv if word.startswith("--"))
    given = frozenset(actions[word].dest if word in actions else word for word in words)
    for instance in parsed:
        instance.given = given
        instance.named = given
    return tuple(parsed[: len(dataclass_types)])


def _refuse_word(word: str, actions: Mapping) -> None:
    """Raises UserError for an unexpected word on the command line, and names the nearest option."""
    if not word.startswith("-"):
        raise UserError(f"unexpected {word!r}: a value follows the name of its option, as in --config quickstart")
    refuse_removed([word.lstrip("-").replace("-", "_")])
    raise UserError(f"unknown option {word}{nearest(word.lstrip('-'), actions)}")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than None, and keeps the line breaks of a description."""

    def _get_help_string(self, action):
        if action.default is None:
            return action.help
        return super()._get_help_string(action)


OF_A_RUN = (ModelArguments, DataArguments, TrainingOptions)
CONFIG = {"metavar": "FILE", "help": "YAML file or name of a recipe; options on the command line win."}


def short_help(dataclass_types: Sequence[type], prog: str | None = None, description: str | None = None):
    """Returns a parser whose help fits a screen: the options of a command, but only the common ones of a run.

    It is for printing alone, and does not import `transformers`, which takes seconds.
    """
    usage = f"{prog or '%(prog)s'} [--OPTION VALUE ...]"
    parser = argparse.ArgumentParser(usage=usage, description=description, formatter_class=_Formatter, add_help=False)
    groups: dict[str, list] = {}
    for kind in dataclass_types:
        for field in dataclasses.fields(kind):
            declared = declared_options(kind).get(field.name)
            if kind not in OF_A_RUN:
                groups.setdefault("options", []).append(field)
            elif declared is not None and declared.common:
                groups.setdefault(declared.group, []).append(field)
    for title, fields in groups.items():
        group = parser.add_argument_group(title)
        for field in fields:
            text = field.metadata["help"].replace("%", "%%")
            names = [f"--{field.name}", *field.metadata.get("aliases", ())]
            group.add_argument(*names, default=field.default, metavar="VALUE", help=text)
    group.add_argument("--config", **CONFIG)
    if any("FULL" in vars(kind) for kind in dataclass_types):
        parser.epilog = "--help_all lists all options."
    return parser


def whole(kind: type) -> type:
    """Returns the dataclass to parse for `kind`; that of training options includes those of `transformers`."""
    if "FULL" not in vars(kind):
        return kind
    return getattr(importlib.import_module("soft_trainer.options.training"), kind.FULL)


@functools.cache
def make_parser(dataclass_types: tuple[type, ...], **settings) -> argparse.ArgumentParser:
    """Returns the parser of these dataclasses and of `--config`; `settings` go to `argparse.ArgumentParser`.

    Made once: a study reads the options of hundreds of runs, and making it takes most of the time of that.
    """
    from transformers import HfArgumentParser  # imports torch, for which --help need not wait

    parser = HfArgumentParser(
        tuple(map(whole, dataclass_types)),
        formatter_class=_Formatter,
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
        **settings,
    )
    for action in parser._actions:
        if action.dest in PARTS:  # None: nobody has said whether this part of a run is wanted
            action.default = None
    parser.add_argument("--config", **CONFIG)
    parser.add_argument("--help", action="help", help="List the options that people set.")
    parser.add_argument("--help_all", action="help", help="List all options.")
    parser.error = _raise
    return parser


def as_argv(options: dict) -> list[str]:
    """Returns options as they are written on the command line; None is left out."""
    argv = []
    for key, value in options.items():
        if value is None:
            continue
        argv.append(f"--{key}")
        if isinstance(value, list):
            argv += map(_word, value)
        else:
            argv.append(_word(value))
    return argv


def _word(value) -> str:
    """Returns a value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value)


def _raise(message: str):
    raise UserError(message)
