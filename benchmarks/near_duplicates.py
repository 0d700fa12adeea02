"""Trains on rows that each have three near-duplicates, and prints a table that compares weights and batches.

    python benchmarks/near_duplicates.py MODEL ROWS OTHER > near_duplicates.jsonl

MODEL is a static encoder (`soft-trainer distil all-MiniLM-L6-v2`). ROWS and OTHER have CodeSearchNet's layout.

Protocol, written before the runs. The first 5,000 functions of the training rows of ROWS and OTHER get four variants
each. One is the function itself. In the other three, its name has another ending, its code has other numbers, and
its query has additional words for the ending. That makes 20,000 pairs, each with three near-duplicates. Batches of
512, two epochs, Adam at 3e-3, seeds 1 and 2. Arms: InfoNCE, Soft-InfoNCE with BM25's weights, positive-aware weights
of the encoder before training, and InfoNCE in batches of similar rows. Valid and test come from ROWS, without
variants.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

FUNCTIONS = 5_000
VARIANTS = (("", ""), ("_from_text", "from text"), ("_as_json", "as JSON"), ("_without_cache", "without the cache"))
SETTINGS = {
    "per_device_train_batch_size": 512,
    "num_train_epochs": 2,
    "learning_rate": 3e-3,
    "distill_weight": 0,
    "save_strategy": "no",
    "eval_strategy": "epoch",
    "lexical": False,
    "use_cpu": True,
}
SIMILAR = {"train_sampling_strategy": "similar"}
ARMS = {
    "InfoNCE": {"loss": "info_nce", "estimator": "none"},
    "BM25 weights": {"estimator": "bm25"},
    "positive-aware weights": {"estimator": "initial_model", "weighting": "positive_aware"},
    "InfoNCE, similar batches": {"loss": "info_nce", "estimator": "initial_model"} | SIMILAR,
}
SEEDS = (1, 2)


def variants(row: dict) -> list[dict]:
    """Returns a row's variants. The first is the row itself."""
    name = row["func_name"].split(".")[-1]
    found = []
    for number, (ending, words) in enumerate(VARIANTS):
        code = re.sub(rf"\b{re.escape(name)}\b", name + ending, row["code"])
        code = re.sub(r"\b\d+\b", lambda digits, add=number: str(int(digits[0]) + add), code)
        query = f"{row['docstring']} {words}".strip()
        changed = {"code": code, "original_string": code, "docstring": query, "url": f"{row['url']}{ending}"}
        tokens = {"docstring_tokens": [*row["docstring_tokens"], *words.split()], "code_tokens": code.split()}
        found.append(row | changed | tokens)
    return found


def write_rows(folders: list[Path], target: Path) -> None:
    """Writes the training rows with their variants, and copies the other splits."""
    rows = []
    for folder in folders:
        with gzip.open(folder / "train.jsonl.gz", "rt") as lines:
            rows += map(json.loads, lines)
    with gzip.open(target / "train.jsonl.gz", "wt") as file:
        for row in rows[:FUNCTIONS]:
            file.writelines(json.dumps(variant) + "\n" for variant in variants(row))
    for split in ("valid", "test", "codebase"):
        shutil.copy(folders[0] / f"{split}.jsonl.gz", target)


def measure(arm: str, seed: int, model: str, rows: Path) -> dict:
    """Trains one arm with one seed, and returns its MRR on valid and test."""
    given = SETTINGS | ARMS[arm] | {"seed": seed, "model_name_or_path": model, "data_dir": rows}
    words = []
    for name, value in given.items():
        words += [f"--{name}", str(value)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "soft_trainer.cli", "train", *words, "--output_dir", folder]
        subprocess.run(command, check=True, stdout=sys.stderr)
        results = json.loads((Path(folder) / "all_results.json").read_text())
    return {"arm": arm, "seed": seed} | {name: results[name] for name in ("valid_mrr", "test_mrr")}


def main() -> None:
    """Runs all arms and seeds. Prints one line of JSON each, and the table at the end on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", nargs=2, type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_rows(options.rows, Path(folder))
        for seed in SEEDS:
            for arm in ARMS:
                found.append(measure(arm, seed, options.model, Path(folder)))
                sys.stdout.write(json.dumps(found[-1]) + "\n")
                sys.stdout.flush()
    by_arm = pd.DataFrame(found).pivot(index="arm", columns="seed", values=["valid_mrr", "test_mrr"])
    sys.stderr.write(by_arm.to_string(float_format="%.4f") + "\n")


if __name__ == "__main__":
    main()
