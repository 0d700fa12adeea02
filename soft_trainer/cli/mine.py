"""Mine training rows: the documented functions in a source tree.

soft-trainer mine SOURCE_DIR --output_dir DIR

The rows are written to DIR as train, valid, test and codebase (.jsonl.gz), for `soft-trainer train --data_dir DIR`.
"""

from __future__ import annotations

import argparse
import sys

from soft_trainer.cli.shared_options import add_overwrite
from soft_trainer.mining.tree import PAIR_RULES, mine_to, mining_table, tree_language
from soft_trainer.source.languages import SOURCE_LANGUAGES
from soft_trainer.source.source_files import source_folder
from soft_trainer.system.files import ROW_FILES, check_free


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer mine` to a parser."""
    add = parser.add_argument
    add("source_dir", metavar="SOURCE_DIR", help="root of the source tree, or stdlib or installed")
    add("--language", type=str.lower, help=f"default: the most common one; {', '.join(SOURCE_LANGUAGES)}")
    add("--output_dir", required=True, help="folder for the rows")
    add("--num_workers", type=int, help="number of processes (default: one per CPU core)")
    add_overwrite(parser, "earlier rows")
    add("--keep", nargs="+", metavar="RULE", help=f"rules to ignore: {', '.join(PAIR_RULES)}")


def run(arguments: argparse.Namespace) -> None:
    """Mines rows, and prints how many functions became rows and how many each rule dropped."""
    options = {name: value for name, value in vars(arguments).items() if value is not None}
    if not options.pop("overwrite"):
        check_free(arguments.output_dir, ROW_FILES)
    options["source_dir"] = source_folder(options["source_dir"])
    if "language" not in options:
        options["language"] = tree_language(options["source_dir"])
        sys.stdout.write(f"language: {options['language']}, the most common one\n")
    mined = mine_to(**options)
    sys.stdout.write(mining_table(mined) + "\n")
    folder = options["output_dir"]
    sys.stdout.write(f"Written to {folder}; to train on it: soft-trainer train --data_dir {folder}\n")
