"""Searches SWE-bench repositories with whole issues, for the files that the fixes changed (docs/search.md).

    git clone --bare https://github.com/sympy/sympy CLONES/sympy+sympy      # and so on, for each repository
    python benchmarks/swe_bench.py ISSUES CLONES WORK --part seen

ISSUES is JSON lines with `id repo commit issue files roust seen`: `issue` is the text, `files` are the files that
the fix changed, and `roust` the files found by roust, a localizer without a model. The ranking was chosen on the
issues marked `seen`. WORK gets an index of the tree at each commit, once.
Only Python files are ranked; tests are dropped from all lists, except in rows that keep them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from soft_trainer.evaluation.significance import difference_text, paired_bootstrap
from soft_trainer.search import CodeIndex
from soft_trainer.search.index.words import WORD
from soft_trainer.source.names import is_test_path
from soft_trainer.system.files import read_json_lines, write_text
from soft_trainer.system.terminal import table

DEPTH = 200  # chunks, whose files are ranked
ISSUE = "whole issue"
KEPT = "whole issue, tests kept"
BASE = "whole issue, words and base"
FIRST = "its first line"
ONE_QUERY = "its first 64 words in one line"  # as all queries were cut before
ROUST = "roust"


def index_issue(row: dict, clones: Path, work: Path) -> Path:
    """Indexes the tree of an issue's commit, unless it is indexed already. Returns the folder of the index."""
    folder = work / row["id"]
    if (folder / "done").exists():
        return folder
    clone = clones / row["repo"].replace("/", "+")
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", clone, scratch], check=True)
        subprocess.run(["git", "-C", scratch, "checkout", "-q", row["commit"]], check=True)
        CodeIndex.build(scratch, folder).close()
    (folder / "done").touch()
    return folder


def rank_files(index: CodeIndex, query: str, lexical: bool = True) -> list[str]:
    """Returns the Python files of the results, best first."""
    results = index.search(query, DEPTH, language="python", lexical=lexical)
    return list(dict.fromkeys(result.path for result in results))


def search_issue(index: CodeIndex, text: str) -> dict[str, list[str]]:
    """Returns the files that each way of asking finds."""
    whole = rank_files(index, text)
    first = rank_files(index, text.strip().partition("\n")[0])
    one_query = rank_files(index, " ".join(WORD.findall(text)[:64]))
    return {
        ISSUE: without_tests(whole),
        KEPT: whole,
        BASE: without_tests(rank_files(index, text, lexical=False)),
        FIRST: without_tests(first),
        ONE_QUERY: without_tests(one_query),
        f"{ONE_QUERY}, tests kept": one_query,
    }


def without_tests(paths: list[str]) -> list[str]:
    """Drops tests."""
    return [path for path in paths if not is_test_path(path, "python")]


def rank_of(paths: list[str], targets: list[str]) -> list[int]:
    """Returns the rank of each target, or 0 if it is not found."""
    return [paths.index(target) + 1 if target in paths else 0 for target in targets]


def measures(ranks: list[int]) -> tuple[float, float, float, float]:
    """Returns the reciprocal rank of the first target, and whether all are among the first 1, 5 and 10."""
    found = [rank for rank in ranks if rank]
    reciprocal = 1 / min(found) if found else 0.0
    within = [all(0 < rank <= depth for rank in ranks) for depth in (1, 5, 10)]
    return (reciprocal, *map(float, within))


def main() -> None:
    """Indexes, searches and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("issues", type=Path)
    parser.add_argument("clones", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--part", choices=["seen", "unseen", "all"], default="all")
    parser.add_argument("--output", type=Path, help="write the ranks")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    ranks: dict[str, dict[str, list[int]]] = {}
    seconds = []
    for _, row in read_json_lines(arguments.issues):
        if arguments.part != "all" and row["seen"] != (arguments.part == "seen"):
            continue
        folder = index_issue(row, arguments.clones, arguments.work)
        with CodeIndex.open(folder) as index:
            started = time.process_time()
            found = search_issue(index, row["issue"])
            seconds.append(time.process_time() - started)
        found[ROUST] = without_tests(row["roust"])
        ranks[row["id"]] = {name: rank_of(paths, row["files"]) for name, paths in found.items()}
        sys.stderr.write(f"{row['id']} {ranks[row['id']]}\n")
    if arguments.output:
        write_text(arguments.output, "".join(f"{json.dumps({name: own})}\n" for name, own in ranks.items()))
    print_table(ranks)
    sys.stdout.write(f"\n{np.mean(seconds):.2f} CPU s for four queries, {max(seconds):.2f} at most\n")


def print_table(ranks: dict[str, dict[str, list[int]]]) -> None:
    """Prints the means of each system, and the paired differences of the whole issue from the others."""
    systems = list(next(iter(ranks.values())))
    found = {name: np.array([measures(own[name]) for own in ranks.values()]) for name in systems}
    rows = []
    for name in systems:
        row = [name, len(ranks), *found[name].mean(0)]
        for column in (0, 3):
            differences = found[ISSUE][:, column] - found[name][:, column]
            text = difference_text(differences.mean(), paired_bootstrap(differences), digits=3)
            row.append("" if name == ISSUE else text)
        rows.append(row)
    headers = ["searched by", "issues", "MRR", "in 1", "in 5", "in 10", "whole issue against it: MRR", "in 10"]
    sys.stdout.write(table(headers, rows, floats=".3f") + "\n")


if __name__ == "__main__":
    main()
