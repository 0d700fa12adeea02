"""Trains in random and in hard batches, unweighted and weighted, and compares the MRR query by query.

    python benchmarks/hard_batches.py --data_dir DIR --model ENCODER --output_dir outputs/hard [--only random,similar]

Each run is one epoch of `run_codesearch.py`: texts of 48 and 96 tokens, batches of 32, cosine x 20, learning rate
2e-5, one seed. The encoder before training finds negatives and neighbours and computes weights. Finished runs are
not repeated. The table has the MRR over the queries of valid and test together. "unweighted" is the difference from
the same batches without weights, "random" from random batches, each with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from soft_trainer.evaluation.significance import compare_paired, reciprocal_ranks
from soft_trainer.options.parse import as_argv
from soft_trainer.studies.compare import ranks_of
from soft_trainer.terminal import table

SCRIPT = Path(__file__).parents[1] / "run_codesearch.py"
COMMON = {
    "query_length": 48,
    "code_length": 96,
    "score_function": "cosine",
    "score_scale": 20,
    "per_device_train_batch_size": 32,
    "num_train_epochs": 1,
    "learning_rate": 2e-5,
    "warmup_steps": 0,
    "train_sampling_strategy": "random",
    "weighting": "linear",
    "seed": 1,
    "save_strategy": "no",
    "lexical": False,
    "model_card": False,
    "examples": 0,
    "disable_tqdm": True,
}
OWN = {"negatives_per_query": 1, "negative_candidates": 20, "negative_ranks": "0,20"}
SIMILAR = {"train_sampling_strategy": "similar"}
NONE = {"estimator": "initial_model", "loss": "info_nce"}
LINEAR = {"estimator": "initial_model", "alpha": 1.3, "beta": 0.7, "temperature": 2.0}
AWARE = {"estimator": "initial_model", "weighting": "positive_aware"}
HARD = NONE | {"cancel": "ratio", "cancel_ratio": 0.95}
# Name -> batches, weights, options. The first run of a kind of batches is the one without weights.
RUNS = {
    "random-none": ("random", "none (InfoNCE)", {"estimator": "none"}),
    "own-none": ("random + 1 of 20 mined negatives per query", "none", NONE | OWN),
    "own-linear": ("random + 1 of 20 mined negatives per query", "Eq. 4", LINEAR | OWN),
    "own-pa": ("random + 1 of 20 mined negatives per query", "positive-aware", AWARE | OWN),
    "own-hard": ("random + 1 of 20 mined negatives per query", "excluded above 95 % of the own code's", HARD | OWN),
    "similar-none": ("similar, 4 groups of 8", "none", NONE | SIMILAR),
    "similar-linear": ("similar, 4 groups of 8", "Eq. 4", LINEAR | SIMILAR),
    "similar-pa": ("similar, 4 groups of 8", "positive-aware", AWARE | SIMILAR),
    "similar32-pa": ("similar, one group of 32", "positive-aware", AWARE | SIMILAR | {"group_size": 32}),
}


def train(name: str, arguments: argparse.Namespace) -> None:
    """Makes a run, unless it is finished."""
    folder = arguments.output_dir / name
    if (folder / "run.json").exists():
        return
    paths = {"data_dir": arguments.data_dir, "language": arguments.language, "model_name_or_path": arguments.model}
    paths |= {"output_dir": folder, "estimator_cache_dir": arguments.output_dir / "rows"}
    options = as_argv(COMMON | paths | RUNS[name][2])
    subprocess.run([sys.executable, str(SCRIPT), *options], check=True)


def reciprocal(folder: Path, system: str = "trained") -> np.ndarray:
    """The reciprocal ranks of the queries of valid and test."""
    return np.concatenate([reciprocal_ranks(ranks_of(folder, split, system).ranks) for split in ("valid", "test")])


def difference(values: np.ndarray, others: np.ndarray | None) -> str | None:
    """The difference in MRR with its interval."""
    if others is None or values is others:
        return None
    compared = compare_paired(values, others)
    return f"{compared.delta:+.4f} ({compared.interval.low:+.4f} to {compared.interval.high:+.4f})"


def main() -> None:
    """Makes the runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--language", default="ruby")
    parser.add_argument("--model", required=True, help="the encoder that is trained: a Hub name or a folder")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--only", default=",".join(RUNS), help="runs to make, by comma")
    arguments = parser.parse_args()
    names = [name for name in RUNS if name in arguments.only.split(",")]
    for name in names:
        train(name, arguments)
    ranks = {name: reciprocal(arguments.output_dir / name) for name in names}
    plain = {RUNS[name][0]: ranks[name] for name in reversed(names) if RUNS[name][1].startswith("none")}
    untrained = reciprocal(arguments.output_dir / names[0], "untrained")
    lines = [["before training", None, float(untrained.mean()), None, None]]
    for name, values in ranks.items():
        batches, weights, _ = RUNS[name]
        compared = difference(values, plain.get(batches)), difference(values, ranks.get("random-none"))
        lines.append([batches, weights, float(values.mean()), *compared])
    print(table(["batches", "weights", "MRR", "against unweighted", "against random"], lines, floats=".4f"))


if __name__ == "__main__":
    main()
