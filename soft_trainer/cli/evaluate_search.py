"""Evaluate search in indexed source trees: nDCG@10, MRR, time and memory.

The queries come from one of two sources:
- judged queries for several source trees (--queries, --trees);
- the documentation of a tree's functions, which must be found in a copy of the tree without comments (--folder).

soft-trainer evaluate-search --queries queries.jsonl.gz --trees DIR
soft-trainer evaluate-search --folder DIR --model outputs/encoder
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.system.files import check_writable, write_text

_MAX_QUERIES = 200
# Options that have no effect without another option.
_NEEDS = {"truncate_dim": "model", "max_queries": "folder"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer evaluate-search` to a parser."""
    add = parser.add_argument
    add("--queries", help="judged queries as JSON lines: repo, query, relevant, secondary")
    add("--trees", metavar="DIR", help="folder with a subfolder for each repo in --queries")
    add("--folder", metavar="DIR", help="one source tree; its documentation supplies the queries")
    add("--model", help="folder or Hub name of an encoder (default: search only by words)")
    add("--truncate_dim", type=int, metavar="N", help="keep the first N dimensions of each embedding")
    add("--index_dir", metavar="DIR", help="folder for the indexes (default: a temporary one)")
    add("--max_queries", type=int, help=f"maximum number of queries from --folder (default: {_MAX_QUERIES})")
    add("--output", metavar="FILE", help="write the results of each query to this file, as JSON lines")


def run(arguments: argparse.Namespace) -> None:
    """Indexes the source trees, runs the queries and prints a table of results."""
    # Imported here, so that --help does not wait for what reads source code.
    from soft_trainer.cli.search_measured import measure

    if bool(arguments.queries) != bool(arguments.trees) or bool(arguments.queries) == bool(arguments.folder):
        raise UserError("give --queries and --trees, or --folder")
    for option, needed in _NEEDS.items():
        if getattr(arguments, option) is not None and not getattr(arguments, needed):
            raise UserError(f"{option}: has no effect without --{needed}")
    if arguments.max_queries is not None and arguments.max_queries < 1:
        raise UserError(f"max_queries={arguments.max_queries}: expected 1 or more")
    arguments.max_queries = arguments.max_queries or _MAX_QUERIES
    if arguments.output:
        check_writable(Path(arguments.output).parent, f"output={arguments.output}")
    with tempfile.TemporaryDirectory(prefix="soft_trainer-") as scratch:
        text, answers = measure(arguments, scratch)
    sys.stdout.write(text + "\n")
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        write_text(arguments.output, "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))
