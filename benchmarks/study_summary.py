"""Writes the settings, times, metrics and ranks of every run of a study into one small JSON file, without any text.

    python benchmarks/study_summary.py outputs/hard-batches benchmarks/recipe_study.json

Ranks stand in the order of the queries' urls, so that runs on the same rows can be compared again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from soft_trainer.evaluation.results import load_ranks
from soft_trainer.files import write_text

SETTINGS = ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "seed", "score_scale", "warmup_steps")


def summary(folder: Path) -> dict:
    """The summary of one run."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    training = record["training"]
    ranks = {}
    for path in sorted(folder.glob("ranks-*-trained.parquet")):
        ranked = load_ranks(path)
        ranks[path.name.split("-")[1]] = ranked.ranks[np.argsort(ranked.urls, kind="stable")].tolist()
    return {
        "loss": record["loss"],
        "settings": {name: record["options"][name] for name in SETTINGS},
        "seconds": {"training": training["train runtime, s"], "mining": training.get("mining, s", 0.0)},
        "mrr": {name: systems["trained"]["mrr"] for name, systems in record["results"].items()},
        "ranks": ranks,
    }


def main() -> None:
    """Reads the runs and writes the file, a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    folders = sorted(path.parent for path in arguments.study.rglob("run.json"))
    runs = {folder.relative_to(arguments.study).as_posix(): summary(folder) for folder in folders}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    write_text(arguments.output, f"{{\n{lines}\n}}\n")
    print(f"{len(runs)} runs in {arguments.output}")


if __name__ == "__main__":
    main()
