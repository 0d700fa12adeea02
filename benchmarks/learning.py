"""Measures what `soft-trainer index --learn` gains on repositories that chose none of its settings (learning.md).

    python benchmarks/learning.py run BASE REPOSITORY...
    python benchmarks/learning.py table

BASE is the folder that `soft-trainer distil sentence-transformers/all-MiniLM-L6-v2` writes; REPOSITORY is a bare clone
in a folder named `owner+name`. `run` adds a line for each to learning.jsonl: the rule's choice, CPU seconds, and the
rank of every query (0: not found). `table` prints the table of the page.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np

from soft_trainer.evaluation.significance import paired_bootstrap
from soft_trainer.files import write_text
from soft_trainer.search.measuring.learning import BASE, LEARNED, study
from soft_trainer.search.measuring.verdict import MEMORY
from soft_trainer.terminal import table

RESULTS = Path(__file__).with_suffix(".jsonl")
SYSTEMS = {"memory": MEMORY, "base": BASE, "learned": LEARNED}


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of those that it has waited for."""
    return sum(resource.getrusage(who)[0] for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def run(base: Path, repository: Path) -> dict:
    """Learns from one repository; returns what is written of it."""
    started = cpu_seconds()
    with tempfile.TemporaryDirectory() as work:
        lesson = study(repository, base, Path(work))
    kept = "memory"
    if lesson.encoder is not None:
        kept = "base" if lesson.encoder == base else "learned"
    ranks = {}
    for name, system in SYSTEMS.items():
        ranks[name] = [round(1 / one) if one else 0 for one in lesson.ranks[system]]
    seconds = round(cpu_seconds() - started)
    return {"queries": lesson.queries, "kept": kept, "cpu_seconds": seconds, "ranks": ranks}


def reciprocal(ranks: list[int]) -> np.ndarray:
    """Returns the reciprocal of each rank, 0 where nothing right was found."""
    found = np.array(ranks, float)
    return np.divide(1, found, out=np.zeros(len(found)), where=found > 0)


def difference(gains: list[np.ndarray]) -> str:
    """Writes the mean gain over repositories, each counting the same, with its 95 % interval."""
    if len(gains) == 1:
        low, high = paired_bootstrap(gains[0])
    else:
        generator = np.random.default_rng(0)
        drawn = [[generator.choice(own, len(own)).mean() for own in gains] for _ in range(10_000)]
        low, high = np.percentile(np.mean(drawn, axis=1), [2.5, 97.5])
    mean = np.mean([own.mean() for own in gains])
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def show(results: dict[str, dict]) -> str:
    """Writes the table of all repositories, with their mean."""
    rows = []
    found = []
    for name, result in results.items():
        systems = {system: reciprocal(ranks) for system, ranks in result["ranks"].items()}
        found.append(systems)
        means = [systems[system].mean() for system in SYSTEMS]
        gains = [
            difference([systems["learned"] - systems["memory"]]),
            difference([systems["learned"] - systems["base"]]),
        ]
        rows.append([name.replace("+", "/"), result["queries"], *means, *gains, result["kept"], result["cpu_seconds"]])
    means = [np.mean([row[place] for row in rows]) for place in (2, 3, 4)]
    gains = [difference([one["learned"] - one[other] for one in found]) for other in ("memory", "base")]
    rows.append(["mean", sum(row[1] for row in rows), *means, *gains, "", round(np.mean([row[-1] for row in rows]))])
    headers = ["", "queries", *SYSTEMS, "learned - memory", "learned - base", "kept", "CPU s"]
    return table(headers, rows, floats=".3f")


def main() -> None:
    """Runs, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("base", type=Path)
    runs.add_argument("repositories", nargs="+", type=Path)
    commands.add_parser("table")
    arguments = parser.parse_args()
    results: dict[str, dict] = {}
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            results |= json.loads(line)
    if arguments.command == "table":
        sys.stdout.write(show(results) + "\n")
        return
    for repository in arguments.repositories:
        name = repository.parent.name if repository.name == "repo" else repository.name
        if name not in results:
            results[name] = run(arguments.base, repository)
            write_text(RESULTS, "".join(json.dumps({name: result}) + "\n" for name, result in results.items()))


if __name__ == "__main__":
    main()
