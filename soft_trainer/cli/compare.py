"""Compare two runs query by query: how much better one run ranks, how certain that is, and which queries changed most.

soft-trainer compare RUN_A RUN_B

RUN_A and RUN_B are output folders of runs, or files of ranks in them. Positive differences favour RUN_A. To compare
methods over several seeds, use `soft-trainer report`.
"""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `soft-trainer compare` to a parser."""
    add = parser.add_argument
    add("run_a", metavar="RUN_A", help="output folder of a run, or a file ranks-*.parquet")
    add("run_b", metavar="RUN_B", help="the run to compare it with; positive differences favour RUN_A")
    add("--split", default="test", help="split to compare (default: test)")
    add("--system", default="trained", help="trained (the default), untrained (before training), lexical or combined")
    add("--number", type=int, default=5, help="number of queries to show, largest changes first (default: 5)")


def run(arguments: argparse.Namespace) -> None:
    """Prints a comparison of two runs, and the queries whose reciprocal ranks differ most."""
    # Imported here, so that --help does not wait for torch.
    from soft_trainer.studies.compare import Pairing, describe, ranks_of, verdict

    a = ranks_of(arguments.run_a, arguments.split, arguments.system)
    b = ranks_of(arguments.run_b, arguments.split, arguments.system)
    pairing = Pairing([a], [b])
    comparison = pairing.compare()
    means = (float(reciprocal.mean()) for reciprocal in pairing.reciprocal)
    sys.stdout.write(f"{verdict(*means, comparison)}\n\n")
    for name, ranks, reciprocal in zip("AB", (a, b), pairing.reciprocal, strict=True):
        sys.stdout.write(f"{name} = {ranks.path}: MRR {reciprocal.mean():.4f}\n")
    sys.stdout.write(describe(comparison) + "\n")
    if changes := pairing.changes(arguments.number):
        sys.stdout.write(f"\nThe {len(changes)} largest changes of a query's reciprocal rank:\n\n")
        sys.stdout.write("\n\n".join(changes) + "\n")
