"""Parses options from the command line and from recipes into dataclasses."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from soft_trainer.errors import UserError
from soft_trainer.options.fields import PARTS, STEPS, DataArguments, TrainingOptions, check_steps
from soft_trainer.options.model import ModelArguments
from soft_trainer.options.recipes import read_recipe, recipe_path
from soft_trainer.options.spec import check_values, option_specs
from soft_trainer.system.terminal import nearest, one_line_errors


def parse(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None = None,
    description: str | None = None,
    prog: str | None = None,
    options: Mapping | None = None,
    check: Callable | None = None,
    common: Collection[str] | None = None,
) -> tuple:
    """Creates option dataclasses from the command line and from the recipe that `--config` selects.

    The command line takes precedence over the recipe. If it turns on LoRA, a rate in the recipe for training all
    weights is not used. A recipe is a flat mapping from options to values. The key
    `base` may give the path of another recipe, relative to the recipe's folder. This base recipe supplies the options
    that the recipe does not set. If the value of `--config` is both a file and the name of one of the package's
    recipes, the file is read. A list is joined with commas if the option takes a single string.

    The package's options are read first, so that mistakes in them show before torch is imported, which takes seconds.

    Args:
        dataclass_types: the dataclasses. `TrainingOptions` becomes `SoftInfoNCETrainingArguments`.
        options: the options of a recipe that has already been read. Ignored if the command line has `--config`.
        check: called with an instance of each dataclass before torch is imported, to check what they refer to.
        common: the options that `--help` lists. By default, those declared as common.

    Returns:
        One instance of each dataclass. Their attribute `named` has the names of all options on the command line and in
        the recipe, and `from_command_line` is True.

    Raises:
        SystemExit: `--help` or `--help_all` was printed.
        UserError: an option is unknown, a value is invalid, or the recipe cannot be read. For an unknown option, the
            message suggests the most similar one.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--help" in argv or "-h" in argv:
        short_help(dataclass_types, prog, description, common).print_help()
        sys.exit(0)
    selector = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    selector.add_argument("--config")
    selector.error = _raise
    selected, words = selector.parse_known_args(argv)
    source = ""
    if selected.config:
        source = f"{selected.config}: "
        options = read_recipe(recipe_path(selected.config))
    options = dict(options or {})
    for whole in (False, True) if TrainingOptions in dataclass_types else (True,):
        parser = make_parser(tuple(dataclass_types), whole, description=description, prog=prog)
        actions = {name.lstrip("-"): action for name, action in parser._option_string_actions.items()}
        for name, value in options.items():
            if whole and name not in actions:
                raise UserError(f"{source}unknown option {name!r}{_near(name, actions)}")
            if isinstance(value, list) and name in actions and actions[name].nargs is None:
                options[name] = ",".join(map(_word, value))
        in_shell = _named_options(words, actions)
        if "lora_r" in in_shell and "lora_r" not in options:
            options.pop("learning_rate", None)  # the recipe's rate is for training all weights
        argv = [*as_argv(options), *words]
        with one_line_errors():
            try:
                *parsed, others, rest = parser.parse_args_into_dataclasses(
                    argv, return_remaining_strings=True, look_for_args_file=False
                )
            except argparse.ArgumentError as error:
                raise UserError(str(error)) from error
        named = _named_options(argv, actions)
        for instance in parsed:
            instance.named = named
            instance.from_command_line = True
        if not whole:
            for instance in parsed:
                check_values(instance)
            check_steps(vars(others))
            if check is not None:
                with one_line_errors():
                    check(*parsed)
    if rest:
        word = rest[0].split("=")[0]
        if word.startswith("-"):
            raise UserError(f"unknown option {word}{_near(word.lstrip('-'), actions)}")
        raise UserError(f"unexpected {rest[0]!r}: write options as --NAME VALUE, such as --config quickstart")
    return tuple(parsed)


def _named_options(argv: Sequence[str], actions: Mapping) -> frozenset[str]:
    """Returns the names of the options on a command line: `num_train_epochs` for `--epochs 3`."""
    words = [word.removeprefix("--").partition("=")[0] for word in argv if word.startswith("--")]
    # The parser also accepts --learning-rate for --learning_rate, and --epochs for --num_train_epochs.
    return frozenset(actions[word].dest if word in actions else word for word in words)


def _near(name: str, actions: Mapping) -> str:
    """Returns the end of a message about an unknown option, with similar names: "; did you mean 'epochs'?"."""
    names = [known for known in actions if "-" not in known]  # the parser knows --learning-rate too
    return nearest(str(name).replace("-", "_"), names, "--help_all lists all options", number=3)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the description's line breaks and does not repeat defaults in the help text."""

    def _get_help_string(self, action):
        if action.default is None or "Default:" in action.help:
            return action.help
        return super()._get_help_string(action)


OF_A_RUN = (ModelArguments, DataArguments, TrainingOptions)
CONFIG = {"metavar": "FILE", "help": "YAML file or name of a recipe. Options on the command line take precedence."}


def short_help(
    dataclass_types: Sequence[type],
    prog: str | None = None,
    description: str | None = None,
    common: Collection[str] | None = None,
):
    """Returns a parser that only prints `--help`, which lists only the common options.

    The parser does not import `transformers`, which would take seconds.
    """
    usage = f"{prog or '%(prog)s'} [--OPTION VALUE ...]"
    parser = argparse.ArgumentParser(usage=usage, description=description, formatter_class=_Formatter, add_help=False)
    parser.add_argument_group("recipe").add_argument("--config", **CONFIG)
    groups = {}
    for kind in dataclass_types:
        for name, declared in option_specs(kind).items():
            listed = declared.common if common is None else name in common
            if listed:
                if declared.group not in groups:
                    groups[declared.group] = parser.add_argument_group(declared.group)
                field = kind.__dataclass_fields__[name]
                text = field.metadata["help"].replace("%", "%%")
                names = [f"--{name}", *field.metadata.get("aliases", ())]
                groups[declared.group].add_argument(*names, default=field.default, metavar="VALUE", help=text)
    parser.epilog = "--help_all lists all options, such as --resume_from_checkpoint and --hub_model_id."
    return parser


@functools.cache
def make_parser(dataclass_types: tuple[type, ...], whole: bool = True, **settings) -> argparse.ArgumentParser:
    """Returns a parser for these dataclasses and `--config`. The parser is cached, because building it is slow.

    Args:
        whole: False for a parser that does not import torch: of the options of `transformers`, it has only `STEPS`.
        settings: keyword arguments for `argparse.ArgumentParser`.
    """
    from transformers import HfArgumentParser  # --help does not wait for it

    if whole and TrainingOptions in dataclass_types:
        from soft_trainer.options.training import SoftInfoNCETrainingArguments  # imports torch, which takes seconds

        dataclass_types = tuple(
            SoftInfoNCETrainingArguments if kind is TrainingOptions else kind for kind in dataclass_types
        )
    parser = HfArgumentParser(
        dataclass_types,
        formatter_class=_Formatter,
        allow_abbrev=False,
        exit_on_error=False,
        add_help=False,
        **settings,
    )
    for action in parser._actions:
        if action.dest in PARTS:  # None means that this part of a run was neither turned on nor off
            action.default = None
    parser.add_argument("--config", **CONFIG)
    if whole:
        parser.add_argument("--help", action="help", help="List the common options.")
        parser.add_argument("--help_all", action="help", help="List all options.")
    else:
        for name, (strategy, default) in STEPS.items():
            parser.add_argument(f"--{name}", type=float)
            parser.add_argument(f"--{strategy}", default=default)
    parser.error = _raise
    return parser


def as_argv(options: dict) -> list[str]:
    """Converts options to command-line arguments: `{"epochs": 3, "lr": None}` becomes `["--epochs", "3"]`."""
    argv = []
    for key, value in options.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        argv += [f"--{key}", *map(_word, values)]
    return argv


def _word(value) -> str:
    """Converts a value to a command-line argument: True becomes `true`, and a dict becomes JSON."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value)


def _raise(message: str):
    raise UserError(message)
