"""Fine-tune encoders that find code from a description, evaluate them, and search source code.

`soft-trainer COMMAND --help` lists a command's options. To use several processes:
`accelerate launch -m soft_trainer.cli COMMAND ...`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import sys
from collections.abc import Sequence
from types import ModuleType

import soft_trainer
from soft_trainer.errors import UserError
from soft_trainer.system.terminal import exit_on_user_error, nearest, quiet_libraries

# Each command is a module of the same name in this folder, with `add_arguments(parser)` and `run(arguments)`. Its
# docstring is the command's description. `run` returns the exit code, or None for 0. The options of `train` and
# `evaluate` are dataclasses, and their `run` receives an instance of each. A module is imported only when its command
# is run, because some imports take seconds.
COMMANDS = {
    "train": "fine-tune an encoder and evaluate it before and after",
    "evaluate": "evaluate an encoder on a data set, without training",
    "mine": "mine training rows from a source tree",
    "distil": "make a static encoder, which trains in a minute and searches without torch",
    "index": "index a source tree, to search it",
    "search": "search an index from the shell, on a web page, or from an agent",
    "evaluate-search": "evaluate search over source trees",
    "study": "run a list of configurations with several seeds",
    "report": "write a report on finished runs: tables, tests, figures",
    "compare": "compare two runs query by query",
    "push": "push a folder to the Hub",
}
PROGRAM = "soft-trainer"
LISTED = "--help lists them all"  # the end of a message about an unknown name


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises UserError instead of printing its usage and exiting."""

    def parse_known_args(self, args=None, namespace=None):
        """Parses like argparse, except that an unknown option is reported before a missing one."""
        positional = {action.dest for action in self._actions if not action.option_strings}
        for word in itertools.takewhile(lambda word: word != "--", args or ()):
            option = word.split("=")[0]
            if word.startswith("--") and option not in self._option_string_actions:
                if option.removeprefix("--") in positional:
                    raise UserError(f"{option}: give the value without the name of the option; see --help")
                raise UserError(f"unknown option {option}{nearest(option, self._option_string_actions, LISTED)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        """Raises UserError with the message."""
        raise UserError(message)


def overview() -> argparse.ArgumentParser:
    """Returns the parser that lists all commands, without their options."""
    formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)  # for the longest name
    parser = CommandParser(PROGRAM, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {soft_trainer.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    return parser


def parse_command(argv: Sequence[str]) -> tuple[ModuleType, tuple]:
    """Parses `argv`. Returns the command's module and the arguments for its `run`.

    Raises:
        UserError: the command or an option is unknown (the message suggests a similar name), or a value is invalid.
    """
    name, *words = argv
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{nearest(name, COMMANDS, LISTED)}")
    command = importlib.import_module(f"soft_trainer.cli.{name.replace('-', '_')}")
    settings = {"prog": f"{PROGRAM} {name}", "description": command.__doc__}
    if hasattr(command, "OPTIONS"):
        from soft_trainer.options.parse import parse  # not needed by every command

        if name == "evaluate":
            words = name_model(words)
        settings |= {"options": command.DEFAULTS, "check": command.check, "common": getattr(command, "COMMON", None)}
        return command, parse(command.OPTIONS, words, **settings)
    parser = CommandParser(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)
    command.add_arguments(parser)
    return command, (parser.parse_args(words),)


def name_model(words: Sequence[str]) -> list[str]:
    """Inserts --model_name_or_path before the first word that is neither an option nor the value of an option."""
    before = ""
    for number, word in enumerate(words):
        takes_value = before.startswith("-") and "=" not in before
        if not takes_value and not word.startswith("-"):
            return [*words[:number], "--model_name_or_path", *words[number:]]
        before = word
    return [*words]


def run_command(argv: Sequence[str]) -> int:
    """Runs the command in `argv` and returns the exit code. Raises UserError for errors that the user can fix."""
    if not argv or argv[0].startswith("-"):
        parser = overview()
        parser.parse_args(argv[:1])  # --help and --version end here
        sys.stderr.write(parser.format_help())
        return 2
    command, arguments = parse_command(argv)
    return command.run(*arguments) or 0


def main() -> None:
    """Runs the command in `sys.argv`. On error, prints one line to standard error and exits with code 2."""
    quiet_libraries()
    with exit_on_user_error():
        sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
