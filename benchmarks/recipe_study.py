"""Prints every table of benchmarks/recipe_study.md from the summary of its runs.

    python benchmarks/recipe_study.py [benchmarks/recipe_study.json]

The protocol fixes the final queries of each set: test of Ruby, valid and test of Python and Go. The Python encoders
also rank codes for CoSQA's web queries. Intervals are over seeds and queries, p values over queries. Holm's
correction covers the secondary comparisons.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from soft_trainer.evaluation.significance import difference_text, holm, reciprocal_ranks
from soft_trainer.studies.compare import PooledComparison, SetComparison, p_text
from soft_trainer.terminal import table

SUMMARY = Path(__file__).parent / "recipe_study.json"
SPLITS = {"ruby": ["test"], "python": ["valid", "test"], "go": ["valid", "test"], "cosqa": ["cosqa"]}
ALL = ("ruby", "python", "go")
# Name, sets, method, the method it is compared with.
PRIMARY = ("Ruby and Python, primary", ("ruby", "python"), "ours", "mnrl")
SECONDARY = [
    ("with Go", ALL, "ours", "mnrl"),
    ("same rate 6e-5", ALL, "ours", "mnrl-6e-5"),
    ("the batches alone, 6e-5", ALL, "similar-6e-5", "mnrl-6e-5"),
    ("the weights alone, 6e-5", ALL, "ours", "similar-6e-5"),
    ("the rate of the baseline", ALL, "mnrl-6e-5", "mnrl"),
    ("Python, same rate 2e-5", ("python",), "ours-2e-5", "mnrl"),
    ("Python, the rate of ours", ("python",), "ours", "ours-2e-5"),
    ("Ruby, one group of 32", ("ruby",), "group-32", "ours"),
    ("Ruby, one group of 32, the weights", ("ruby",), "group-32", "group-32-unweighted"),
    ("web queries", ("cosqa",), "ours", "mnrl"),
    ("web queries, same rate 6e-5", ("cosqa",), "ours", "mnrl-6e-5"),
    ("web queries, same rate 2e-5", ("cosqa",), "ours-2e-5", "mnrl"),
    ("web queries, the weights alone, 6e-5", ("cosqa",), "ours", "similar-6e-5"),
    ("web queries, the rate of the baseline", ("cosqa",), "mnrl-6e-5", "mnrl"),
]
# Not planned in the protocol, so outside of Holm's correction.
AFTERWARDS = ("web queries, the batches alone, 6e-5", ("cosqa",), "similar-6e-5", "mnrl-6e-5")


def reciprocal(runs: dict, place: str, method: str, split: str) -> np.ndarray:
    """The reciprocal ranks of a method on one set, float64[S, Q], in the order of the seeds."""
    names = [name for name in runs if name.split("/")[0] == place and name.split("/")[2] == method]
    ordered = sorted(names, key=lambda name: int(name.split("/")[1]))
    return np.stack([reciprocal_ranks(runs[name]["ranks"][split]) for name in ordered])


def compare(runs: dict, sets: tuple[str, ...], method: str, other: str) -> PooledComparison:
    """Compares two methods over some sets, with all seeds."""
    comparisons = []
    for place in sets:
        for split in SPLITS[place]:
            sides = tuple(reciprocal(runs, place, name, split) for name in (method, other))
            comparisons.append(SetComparison(f"{place}/{split}", sides))
    return PooledComparison(tuple(comparisons))


def difference(comparison: PooledComparison) -> str:
    """The difference in MRR over all sets, with its interval."""
    a, b = comparison.means
    return difference_text(a - b, comparison.interval())


def secondary(runs: dict) -> str:
    """The table of the secondary comparisons."""
    comparisons = [compare(runs, *comparison[1:]) for comparison in SECONDARY]
    rows = []
    for (name, _, method, other), each, p in zip(
        SECONDARY, comparisons, holm([each.p for each in comparisons]), strict=True
    ):
        queries = sum(part.reciprocal[0].shape[1] for part in each.sets)
        rows.append([name, f"{method} - {other}", queries, difference(each), p_text(p)])
    return table(["secondary comparison", "methods", "queries", "difference (95 %)", "p, Holm-corrected"], rows)


def untrained(runs: dict, place: str, split: str) -> np.ndarray:
    """The mean MRR before training, repeated for each query, float64[1, Q]; Q is 0 if it was not measured."""
    runs = (run for name, run in runs.items() if name.startswith(f"{place}/") and split in run["mrr"])
    measured = [(run["mrr"][split].get("untrained"), len(run["ranks"][split])) for run in runs]
    mrr, number = next((pair for pair in measured if pair[0]), (0.0, 0))
    return np.full((1, number), mrr)


def mean_mrr(runs: dict) -> str:
    """The mean MRR before training and of each method on each set, and over the queries of the three languages."""
    rows = []
    for method in ("before training", *sorted({name.split("/")[2] for name in runs if not runs[name]["curve"]})):
        means = {}
        for place, splits in SPLITS.items():
            if method == "before training":
                parts = [untrained(runs, place, split) for split in splits]
            elif any(name.startswith(f"{place}/") and name.endswith(f"/{method}") for name in runs):
                parts = [reciprocal(runs, place, method, split) for split in splits]
            else:
                continue
            if all(part.size for part in parts):
                means[place] = np.concatenate([part.mean(0) for part in parts])
        whole = np.concatenate([means[place] for place in ALL]).mean() if set(ALL) <= means.keys() else None
        rows.append([method, *(means[place].mean() if place in means else None for place in SPLITS), whole])
    return table(["method", *SPLITS, "three languages"], rows, floats=".4f")


def minutes(runs: dict, method: str = "ours", baseline: str = "mnrl") -> str:
    """The share of a method's steps, and the minutes, until it reaches the baseline's mean MRR on valid."""

    def mean(place: str, name: str, value) -> float:
        return float(np.mean([value(run) for key, run in runs.items() if key.split("/")[::2] == [place, name]]))

    rows = []
    for name, run in runs.items():
        if not run["curve"]:
            continue
        place, seed, _ = name.split("/")
        target = mean(place, baseline, lambda run: run["mrr"]["valid"]["trained"])
        own, whole = (mean(place, each, lambda run: run["seconds"]["training"] / 60) for each in (method, baseline))
        share = next((share for share, mrr in run["curve"] if mrr >= target), None)
        reached = None if share is None else share * own
        rows.append([place, seed, target, run["curve"][-1][1], share, reached, whole, reached and reached / whole])
    header = ["set", "seed", "target MRR", "last MRR", "share of steps", "minutes", "of the baseline", "ratio"]
    return table(header, rows, floats=".3f") if rows else "No run has a curve."


def main() -> None:
    """Reads the summary and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, nargs="?", default=SUMMARY)
    runs = json.loads(parser.parse_args().summary.read_text(encoding="utf-8"))
    name, *methods = PRIMARY
    primary = compare(runs, *methods)
    print(f"{name}: {difference(primary)}, MRR {primary.means[0]:.4f} and {primary.means[1]:.4f}, p {primary.p:.2g}\n")
    print(compare(runs, ALL, "ours", "mnrl").describe(), end="\n\n")
    name, *methods = AFTERWARDS
    afterwards = compare(runs, *methods)
    print(f"Not planned, {name}: {difference(afterwards)}, p {p_text(afterwards.p, '= ')}\n")
    print(secondary(runs), mean_mrr(runs), minutes(runs), sep="\n\n")


if __name__ == "__main__":
    main()
