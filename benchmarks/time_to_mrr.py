"""Prints when the runs of a study reach the final MRR of another method on valid, in steps and in minutes.

    python benchmarks/time_to_mrr.py outputs/hard-batches-time outputs/hard-batches [--method ours] [--baseline mnrl]

The runs of the first study rank the valid queries during training. Those of the second are the final runs of both
methods. The target is the baseline's mean MRR over seeds. The minutes are those of a final run of the method, times
the share of its steps, so they hold no rankings.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from soft_trainer.terminal import table


def finals(study: Path, place: str, method: str, metric: str) -> float:
    """The mean over seeds of `mrr` on valid, or of `minutes` of training."""
    values = []
    for path in sorted(study.glob(f"{place}/*/{method}/run.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        minutes = record["training"]["train runtime, s"] / 60
        values.append({"minutes": minutes, "mrr": record["results"]["valid"]["trained"]["mrr"]}[metric])
    return float(np.mean(values))


def curve(folder: Path) -> tuple[list[float], list[float]]:
    """The share of all steps at each ranking, and the MRR."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    points = [
        (entry["step"] / state["max_steps"], entry["eval_mrr"])
        for entry in state["log_history"]
        if "eval_mrr" in entry
    ]
    return tuple(zip(*points, strict=True))


def main() -> None:
    """Reads both studies and prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path)
    parser.add_argument("finals", type=Path)
    parser.add_argument("--method", default="ours")
    parser.add_argument("--baseline", default="mnrl")
    options = parser.parse_args()
    rows = []
    for folder in sorted(options.curves.glob(f"*/*/{options.method}")):
        place, seed = folder.parts[-3:-1]
        target = finals(options.finals, place, options.baseline, "mrr")
        minutes, whole = (
            finals(options.finals, place, method, "minutes") for method in (options.method, options.baseline)
        )
        shares, mrr = curve(folder)
        reached = next((share for share, value in zip(shares, mrr, strict=True) if value >= target), None)
        share = None if reached is None else reached * minutes / whole
        rows.append([place, seed, target, mrr[-1], reached, reached and reached * minutes, whole, share])
    header = ["set", "seed", "target MRR", "last MRR", "share of steps", "minutes", "minutes of baseline", "ratio"]
    print(table(header, rows, floats=".3f"))


if __name__ == "__main__":
    main()
