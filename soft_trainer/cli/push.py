"""Push a folder to the Hub: a run's output, mined rows, or the metric.

soft-trainer push DIR USER/NAME
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.hub.push import REPO_TYPES, Repository


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer push` to a parser."""
    parser.add_argument("folder", metavar="DIR", help="folder to push, such as the output folder of a run")
    parser.add_argument("name", metavar="USER/NAME", help="the repository, created if it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch to push to (default: main)")
    parser.add_argument("--repo_type", choices=REPO_TYPES, default="model", help="default: model")
    parser.add_argument("--path_in_repo", help="folder in the repository")


def run(arguments: argparse.Namespace) -> None:
    """Pushes a folder to the Hub and prints the commit's URL."""
    options = vars(arguments)
    folder = options.pop("folder")
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder")
    sys.stdout.write(Repository(**options).push(folder) + "\n")
