"""Writes the settings, times, metrics and ranks of every run of a study into one small JSON file, without any text.

    python benchmarks/study_summary.py benchmarks/recipe_study.json outputs/hard-batches [STUDY ...]

Ranks are ordered by the queries' urls, so runs on the same rows can be compared later. A run that was evaluated on
valid during training also gets its learning curve: the fraction of steps, and the MRR.
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
    """The summary of one run, or of an evaluation."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    training = record.get("training") or {}
    options = record["options"] if training else {}
    ranks = {}
    for path in sorted(folder.glob("ranks-*-trained.parquet")):
        ranked = load_ranks(path)
        ranks[path.name.split("-")[1]] = ranked.ranks[np.argsort(ranked.urls, kind="stable")].tolist()
    return {
        "loss": record.get("loss"),
        "settings": {name: options[name] for name in SETTINGS if name in options},
        "seconds": {"training": training.get("train runtime, s"), "mining": training.get("mining, s") or 0.0},
        "mrr": {
            name: {system: metrics["mrr"] for system, metrics in systems.items()}
            for name, systems in record["results"].items()
        },
        "curve": curve(folder / "trainer_state.json"),
        "ranks": ranks,
    }


def curve(state: Path) -> list[tuple[float, float]]:
    """The share of all steps and the MRR, for each ranking of valid during training."""
    if not state.exists():
        return []
    state = json.loads(state.read_text(encoding="utf-8"))
    history = (entry for entry in state["log_history"] if "eval_mrr" in entry)
    return [(entry["step"] / state["max_steps"], entry["eval_mrr"]) for entry in history]


def main() -> None:
    """Reads the runs and writes the file, a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("studies", type=Path, nargs="+")
    arguments = parser.parse_args()
    runs = {}
    for study in arguments.studies:
        for path in sorted(study.rglob("run.json")):
            runs[path.parent.relative_to(study).as_posix()] = summary(path.parent)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    write_text(arguments.output, f"{{\n{lines}\n}}\n")
    print(f"{len(runs)} runs in {arguments.output}")


if __name__ == "__main__":
    main()
