# PYTHON_ARGCOMPLETE_OK
"""Fine-tune encoders that find code by its description, measure them, and study what the loss does.

`soft-trainer COMMAND --help` lists the options of a command. With several processes:
`accelerate launch -m soft_trainer.cli COMMAND ...`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

import soft_trainer
from soft_trainer.errors import UserError
from soft_trainer.terminal import exit_on_user_error, nearest

# Each command is the module of its name in this folder. It has a docstring, its description, and either
# `add_arguments(parser)` and `run(arguments)`, or OPTIONS, dataclasses of options, and `run` that takes one of each.
# `run` returns the exit code, None for 0. A module is imported when its command is run: some take seconds.
COMMANDS = {
    "train": "fine-tune an encoder and measure it before and after",
    "evaluate": "measure an encoder on a data set, without training",
    "mine": "mine documented functions from a source tree",
    "simcse": "train the sentence encoder of the SimCSE estimator",
    "study": "run a grid of runs, or print its plan",
    "report": "write a report on finished runs: tables, tests, pictures",
    "compare": "compare two runs query by query",
    "weights": "show the weights that estimators give to one batch",
    "push": "push a folder to the Hub",
}
PROGRAM = "soft-trainer"


class CommandParser(argparse.ArgumentParser):
    """A parser that raises `UserError` where argparse would print its usage and exit."""

    def parse_known_args(self, args=None, namespace=None):
        """Parses like argparse, but names an unknown option before it names a missing one."""
        options = [word.split("=")[0] for word in args or () if word.startswith("--") and word != "--"]
        for option in options:
            if option not in self._option_string_actions:
                raise UserError(f"unknown option {option}{nearest(option, self._option_string_actions)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        """Raises the message."""
        raise UserError(message)


def overview() -> argparse.ArgumentParser:
    """The parser that lists the commands, none of which is imported."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {soft_trainer.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False, parents=_completed(name))
    return parser


def run_command(argv: Sequence[str]) -> int:
    """Run the command that `argv` begins with and return its exit code.

    Raises:
        UserError: an unknown command or option, which names the nearest, or what the command raises.
    """
    if not argv:
        sys.stderr.write(overview().format_help())
        return 2
    name, *words = argv
    if name.startswith("-"):
        overview().parse_args(["--version" if name == "--version" else "--help"])
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{nearest(name, COMMANDS)}")
    command = _module(name)
    if hasattr(command, "OPTIONS"):
        from soft_trainer.arguments import parse  # imports transformers, which takes seconds

        return command.run(*parse(command.OPTIONS, words, command.__doc__, f"{PROGRAM} {name}")) or 0
    return command.run(_parser(name, command).parse_args(words)) or 0


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"soft_trainer.cli.{name.replace('-', '_')}")


def _parser(name: str, command: ModuleType, **settings) -> CommandParser:
    """The parser of a command that adds its own arguments."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(
        f"{PROGRAM} {name}", description=command.__doc__, formatter_class=formatter, allow_abbrev=False, **settings
    )
    command.add_arguments(parser)
    return parser


def _completed(name: str) -> list[argparse.ArgumentParser]:
    """The parser of the command that a shell completes now, none at any other time."""
    if name not in shlex.split(os.environ.get("COMP_LINE", "").replace("'", " "))[1:2]:
        return []
    command = _module(name)
    if hasattr(command, "OPTIONS"):
        from soft_trainer.arguments import make_parser  # imports transformers, which takes seconds

        return [make_parser(command.OPTIONS, add_help=False)]
    return [_parser(name, command, add_help=False)]


def main() -> None:
    """The command line: errors are one line on standard error, and exit code 2."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete  # the shell asks for completions, so it is installed

        argcomplete.autocomplete(overview())
    with exit_on_user_error():
        sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
