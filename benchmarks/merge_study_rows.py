"""Mines the fresh Python rows of benchmarks/merge_study.md from installed packages, into WORK/fresh-python.

    python benchmarks/merge_study_rows.py DATA WORK networkx sqlalchemy aiohttp matplotlib

Functions that are nearly equal to a training row in DATA/mined/python are dropped. Of the others, 500 become queries
and 900 more join the corpus. Every package may contribute the same number of functions at most.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from merge_study import FRESH, read_rows

from soft_trainer.mining.duplicates import minhash, near_duplicates

QUERIES, OTHERS = 500, 900


def mined(package: str, folder: Path) -> list[dict]:
    """The documented functions of an installed package."""
    source = importlib.util.find_spec(package).submodule_search_locations[0]
    command = [sys.executable, "-m", "soft_trainer.cli", "mine", source, "--language", "python"]
    subprocess.run([*command, "--output_dir", str(folder), "--num_workers", "1", "--overwrite"], check=True)
    return [row for part in ("train", "valid", "test") for row in read_rows(folder / f"{part}.jsonl.gz")]


def fresh(rows: list[dict], training: list[dict]) -> list[dict]:
    """The rows that are nearly equal to no training row and to no earlier one."""
    signatures = [minhash(row["code"].split()) for row in (*training, *rows)]
    near = near_duplicates(range(len(signatures)), signatures.__getitem__)[len(training) :]
    return [row for row, dropped in zip(rows, near, strict=True) if not dropped]


def main() -> None:
    """Reads the command line, mines, and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("packages", nargs="+")
    arguments = parser.parse_args()
    share, generator, chosen = -(-(QUERIES + OTHERS) // len(arguments.packages)), np.random.default_rng(0), []
    training = read_rows(arguments.data / "mined" / "python" / "train.jsonl.gz")
    for package in arguments.packages:
        with tempfile.TemporaryDirectory() as folder:
            rows = fresh(mined(package, Path(folder)), training)
        chosen += [
            rows[place] | {"url": f"{package}/{rows[place]['url']}"}
            for place in generator.permutation(len(rows))[:share]
        ]
        print(f"{package}: {min(share, len(rows)):,} of {len(rows):,} functions")
    chosen = [chosen[place] for place in generator.permutation(len(chosen))][: QUERIES + OTHERS]
    for name, part in (("valid", []), ("test", chosen[:QUERIES]), ("codebase", chosen)):
        path = arguments.work / FRESH / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)


if __name__ == "__main__":
    main()
