"""Compares training on own rows alone, merged halfway, and with general rows; `source_mix.md` has the protocol.

python benchmarks/source_mix.py MODEL OWN GENERAL COSQA > source_mix.jsonl
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

SETTINGS = {
    "loss": "info_nce",
    "estimator": "none",
    "per_device_train_batch_size": 64,
    "num_train_epochs": 3,
    "learning_rate": 3e-3,
    "save_strategy": "no",
    "lexical": False,
    "use_cpu": True,
}
ARMS = {
    "own rows alone": {},
    "merged halfway": {"merge_ratio": 0.5},
    "general rows, share 0.2": {"source_sampling": "{general}=0.2"},
    "general rows, share 0.5": {"source_sampling": "{general}=0.5"},
}
SEEDS = (1, 2, 3)


def measure(arm: str, seed: int, options: argparse.Namespace) -> dict:
    """Trains one arm with one seed. Returns the MRR before and after on the own test set and on CoSQA."""
    given = SETTINGS | {"seed": seed, "model_name_or_path": options.model, "eval_data_dir": options.cosqa}
    given["data_dir"] = options.own
    test = "test"
    for name, value in ARMS[arm].items():
        given[name] = value
        if name == "source_sampling":
            given[name] = value.format(general=Path(options.general).name)
            given["data_dir"] = f"{options.own},{options.general}"
            test = f"test-{Path(options.own).name}"
    words = []
    for name, value in given.items():
        words += [f"--{name}", str(value)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "soft_trainer.cli", "train", *words, "--output_dir", folder]
        subprocess.run(command, check=True, stdout=sys.stderr)
        results = json.loads((Path(folder) / "all_results.json").read_text())
    row = {"arm": arm, "seed": seed}
    for title, name in (("own test", test), ("CoSQA", Path(options.cosqa).name)):
        row[f"{title} before"] = results[f"{name}_untrained_mrr"]
        row[title] = results[f"{name}_mrr"]
    return row


def main() -> None:
    """Runs all arms and seeds. Prints one line of JSON each, and the table at the end on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "own", "general", "cosqa"):
        parser.add_argument(name)
    options = parser.parse_args()
    rows = []
    for arm in ARMS:
        for seed in SEEDS:
            rows.append(measure(arm, seed, options))
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
    by_arm = pd.DataFrame(rows).drop(columns="seed").groupby("arm", sort=False)
    sys.stderr.write(by_arm.agg(["mean", "std"]).to_string(float_format="%.4f") + "\n")


if __name__ == "__main__":
    main()
