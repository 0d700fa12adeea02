"""Mine documented functions from a source tree, as rows to train on.

soft-trainer mine SOURCE_DIR --language go --output_dir DIR

DIR then holds train, valid, test and codebase as .jsonl.gz, which `soft-trainer train --data_dir DIR` reads.
"""

from __future__ import annotations

import argparse
import sys

from soft_trainer.mining.languages import SOURCE_LANGUAGES
from soft_trainer.mining.source_files import MAX_FILE_BYTES
from soft_trainer.mining.tree import RULES, mine_to, mining_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("source_dir", metavar="SOURCE_DIR", help="root of the source tree")
    parser.add_argument("--language", required=True, help=", ".join(SOURCE_LANGUAGES))
    parser.add_argument("--output_dir", required=True, help="folder for train, valid, test, codebase.jsonl.gz")
    parser.add_argument("--num_workers", type=int, help="processes (default: one a CPU core)")
    parser.add_argument(
        "--keep", nargs="+", default=(), metavar="RULE", help=f"rules not to apply: {', '.join(RULES)}"
    )
    parser.add_argument("--max_file_bytes", type=int, default=MAX_FILE_BYTES, help="skip larger files (default: 1 MB)")


def run(arguments: argparse.Namespace) -> None:
    """Mine the tree and print what became of its functions."""
    sys.stdout.write(mining_table(mine_to(**vars(arguments))) + "\n")
