"""Mine rows to train on: documented functions of a source tree, or functions with the commits that changed them.

soft-trainer mine SOURCE_DIR --language go --output_dir DIR
soft-trainer mine --history REPOSITORY --language go --output_dir DIR

DIR then holds train, valid, test and codebase as .jsonl.gz, which `soft-trainer train --data_dir DIR` reads. From a
history it also holds relevance.jsonl.gz: the test queries with all their functions, for --eval_data_dir. With both a
SOURCE_DIR and --history of the same repository, training rows come from documentation and from commits.
"""

from __future__ import annotations

import argparse
import sys

from soft_trainer.cli.shared_options import to_bool
from soft_trainer.errors import UserError
from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.source_files import MAX_FILE_BYTES
from soft_trainer.mining.tree import RULES, mine_to, mining_table

_OF_HISTORY = ("max_functions", "body")
_OF_TREE = ("keep", "max_file_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("source_dir", metavar="SOURCE_DIR", nargs="?", help="root of the source tree")
    parser.add_argument("--history", metavar="REPOSITORY", help="git repository whose commits give the rows")
    parser.add_argument("--language", required=True, type=str.lower, help=", ".join(SOURCE_LANGUAGES))
    parser.add_argument("--output_dir", required=True, help="folder for train, valid, test, codebase.jsonl.gz")
    parser.add_argument("--num_workers", type=int, help="processes (default: one per CPU core)")
    functions = "--history: leave out commits that change more functions than this (default: 5)"
    parser.add_argument("--max_functions", type=int, help=functions)
    body = "--history: add the first paragraph of a commit's body to the query (default: false)"
    parser.add_argument("--body", type=to_bool, help=body)
    parser.add_argument("--keep", nargs="+", metavar="RULE", help=f"rules not to apply: {', '.join(RULES)}")
    parser.add_argument("--max_file_bytes", type=int, help=f"skip larger files (default: {MAX_FILE_BYTES:,})")


def run(arguments: argparse.Namespace) -> None:
    """Mines, and prints what became of functions or commits."""
    options = {name: value for name, value in vars(arguments).items() if value is not None}
    history = options.pop("history", None)
    unread = set(options) & set(_OF_TREE if history else _OF_HISTORY)
    if history:
        what = "a tree; --history reads no such option"
    else:
        what = "--history"
    if unread:
        raise UserError(f"{', '.join(sorted(unread))}: belongs to {what}")
    if not history and "source_dir" not in options:
        raise UserError("give a SOURCE_DIR, or a repository with --history")
    if history:
        from soft_trainer.mining.history import mine_history_to  # needs pygit2

        counts = mine_history_to(history, **options)
    else:
        counts = mine_to(**options)
    sys.stdout.write(mining_table(counts) + "\n")
