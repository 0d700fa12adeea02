"""Trains thirteen tiny runs and writes their losses, metrics and weights, to see whether a change moves them.

    python benchmarks/same_results.py --data_dir DIR --output before.json      # two minutes on one core
    python benchmarks/same_results.py --data_dir DIR --output after.json --compare before.json

DIR has train, valid, test and codebase as .jsonl or .jsonl.gz. The first 160 training rows train a RoBERTa of two
layers and 64 dimensions, in float32 on the CPU, from random weights. Ten runs go through `run_codesearch.py`, three
through `SoftInfoNCETrainer`. The exit code is 1 if a run differs. The weights are compared by their hash, so compare
only runs of one machine and one version of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from datasets import Dataset
from transformers import TrainingArguments

import run_codesearch
from soft_trainer import BM25Estimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder, load_rows
from soft_trainer.options.parse import as_argv
from soft_trainer.system.files import write_json

ROWS = 160
SHARED = {
    "max_train_rows": ROWS,
    "query_length": 16,
    "code_length": 48,
    "learning_rate": 1e-3,
    "max_steps": 8,
    "per_device_train_batch_size": 16,
    "logging_steps": 1,
    "warmup_steps": 0,
    "bf16": "false",
    "use_cpu": "true",
    "seed": 1,
}
SHELL = {  # name -> options beside SHARED; "START" is the encoder that the first run trains
    "bm25": {"estimator": "bm25"},
    "none": {"estimator": "none", "loss": "info_nce"},
    "weighted": {"estimator": "bm25", "loss": "weighted_info_nce"},
    "kl, cached": {"estimator": "bm25", "loss": "kl_regularization", "gradient_cache_chunk_size": 4},
    "similar, positive-aware": {
        "model_name_or_path": "START",
        "estimator": "trained_model",
        "estimator_model": "START",
        "train_sampling_strategy": "similar",
        "weighting": "positive_aware",
    },
    "cancellation, accumulation": {"estimator": "bm25", "cancel": "ratio", "gradient_accumulation_steps": 2},
    "bce": {"estimator": "bm25", "loss": "bce"},
    "no_duplicates": {"estimator": "bm25", "train_sampling_strategy": "no_duplicates"},
    "teacher": {"model_name_or_path": "START", "teacher": "START"},
    "mined negatives": {
        "model_name_or_path": "START",
        "estimator": "trained_model",
        "estimator_model": "START",
        "negatives_per_query": 2,
    },
}


def weights_of(folder: Path) -> str:
    """Returns a hash of the saved weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def losses_of(history: list[dict]) -> list[float]:
    """Returns the logged losses in the order of the steps."""
    return [entry["loss"] for entry in history if "loss" in entry]


def by_shell(options: dict, folder: Path) -> dict:
    """Runs `run_codesearch.py` in this process. Returns losses, metrics and a hash of the weights."""
    sys.argv = ["run_codesearch.py", *as_argv(options | {"output_dir": folder})]
    run_codesearch.main()
    results = json.loads((folder / "all_results.json").read_text())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    metrics = {name: value for name, value in results.items() if name.endswith(("mrr", "ndcg@10", "recall@10"))}
    return {"losses": losses_of(history), "metrics": metrics, "weights": weights_of(folder)}


def by_trainer(arguments: TrainingArguments, rows: dict, start: Path, folder: Path, callbacks: list) -> dict:
    """Trains in Python. Returns losses, metrics and a hash of the weights."""
    encoder = load_encoder(start)
    trainer = SoftInfoNCETrainer(
        model=encoder.model,
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["valid"],
        processing_class=encoder.tokenizer,
        encoder=encoder.profile,
        callbacks=callbacks,
    )
    trainer.train()
    metrics = {name: value for name, value in trainer.evaluate().items() if name.endswith("mrr")}
    trainer.save_model(str(folder))
    return {"losses": losses_of(trainer.state.log_history), "metrics": metrics, "weights": weights_of(folder)}


def run_all(data_dir: Path, work: Path) -> dict[str, dict]:
    """Trains all runs. Returns the figures of each."""
    scratch = SHARED | {"from_scratch": "64x2", "vocabulary_size": 2000, "score_function": "cosine", "score_scale": 20}
    found = {}
    start = work / "bm25"
    for name, options in SHELL.items():
        chosen = {key: str(start) if value == "START" else value for key, value in options.items()}
        shared = SHARED if "model_name_or_path" in options else scratch
        found[name] = by_shell(shared | chosen | {"data_dir": data_dir}, work / name.replace(", ", "-"))
        print(f"{name}: {found[name]['losses'][-1]:.6f}", file=sys.stderr, flush=True)
    rows = load_rows(str(data_dir))
    rows["train"] = Dataset.from_list([dict(row) for row in rows["train"].to_pairs().select(range(ROWS))])
    settings = {
        "per_device_train_batch_size": 16,
        "max_steps": 8,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
    }
    ours = SoftInfoNCETrainingArguments(str(work / "ours"), loss="soft_info_nce", **settings)
    dims = SoftInfoNCETrainingArguments(str(work / "dims"), loss="info_nce", matryoshka_dims="64,16", **settings)
    plain = TrainingArguments(str(work / "plain"), **settings)
    python = {
        "Python, BM25": (ours, [BM25Estimator()]),
        "Python, Matryoshka": (dims, []),
        "Python, plain arguments": (plain, [BM25Estimator()]),
    }
    for name, (arguments, callbacks) in python.items():
        found[name] = by_trainer(arguments, rows, start, work / name, callbacks)
        print(f"{name}: {found[name]['losses'][-1]:.6f}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Trains, writes the figures, and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="the output of an earlier call")
    arguments = parser.parse_args()
    data_dir = arguments.data_dir.resolve()
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(sys.stderr):
        found = run_all(data_dir, Path(work))
    write_json(arguments.output, found)
    if arguments.compare is None:
        return
    before = json.loads(arguments.compare.read_text())
    different = [name for name in before if found.get(name) != before[name]]
    print(f"{len(before) - len(different)} of {len(before)} runs are identical; different: {', '.join(different)}")
    sys.exit(int(bool(different)))


if __name__ == "__main__":
    main()
