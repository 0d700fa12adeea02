"""Trains all weights, a LoRA adapter, and Matryoshka embeddings, and compares MRR, time, memory and file sizes.

    python benchmarks/adapters.py --data_dir DIR --model ENCODER --output_dir outputs/adapters [--only full,lora]

Each run is one epoch of `run_codesearch.py` with InfoNCE, batches of 32, cosine x 20, one seed and one thread. Texts
have 48 and 96 tokens unless `--lengths` sets other numbers. Finished runs are not repeated. Each encoder is then
evaluated by its first dimensions. Times are CPU seconds; the MRR is over the test queries.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import run_codesearch
from soft_trainer import SoftInfoNCETrainer
from soft_trainer.cli.__main__ import run_command
from soft_trainer.evaluation.retrieval import shorter_metric
from soft_trainer.files import write_json
from soft_trainer.options.parse import as_argv
from soft_trainer.terminal import table

COMMON = {
    "score_function": "cosine",
    "score_scale": 20,
    "per_device_train_batch_size": 32,
    "num_train_epochs": 1,
    "learning_rate": 2e-5,
    "warmup_steps": 0,
    "estimator": "none",
    "do_train": True,
    "seed": 1,
    "save_strategy": "no",
    "lexical": False,
    "model_card": False,
    "examples": 0,
    "disable_tqdm": True,
}
DIMS = (384, 128, 32)
LORA = {"lora_r": 16, "learning_rate": 5e-4}
# Name -> title, options.
RUNS = {
    "full": ("all weights, 2e-5", {}),
    "lora": ("LoRA r 16, 5e-4", LORA),
    "lora-linear": ("LoRA r 16 on all linear layers, 5e-4", LORA | {"lora_target_modules": "all-linear"}),
    "matryoshka": ("all weights, Matryoshka 384, 128, 32", {"matryoshka_dims": "384,128,32"}),
}
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def train(name: str, arguments: argparse.Namespace) -> None:
    """Makes a run in this process, and writes the CPU seconds per step and the peak memory."""
    torch.set_num_threads(1)
    folder, untouched = arguments.output_dir / name, SoftInfoNCETrainer.train

    def measured(trainer, *args, **kwargs):
        """Trains as before, and writes what it cost."""
        start = time.process_time()
        output = untouched(trainer, *args, **kwargs)
        step = (time.process_time() - start) / trainer.state.global_step
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        write_json(folder / "cost.json", {"seconds": step, "peak": peak, "steps": trainer.state.global_step})
        return output

    SoftInfoNCETrainer.train = measured
    paths = {"data_dir": arguments.data_dir, "language": "ruby", "model_name_or_path": arguments.model}
    paths |= {"output_dir": folder, "max_steps": arguments.max_steps} | lengths(arguments)
    run_codesearch.main(as_argv(COMMON | paths | RUNS[name][1]))


def lengths(arguments: argparse.Namespace) -> dict[str, str]:
    """The options of the lengths of queries and codes."""
    return dict(zip(("query_length", "code_length"), arguments.lengths.split(","), strict=True))


def evaluate(model: Path | str, folder: Path, arguments: argparse.Namespace) -> None:
    """Evaluates an encoder by its first dimensions, as training evaluates it."""
    torch.set_num_threads(1)
    names = ("score_function", "score_scale", "lexical", "disable_tqdm")
    options = (
        lengths(arguments) | {name: COMMON[name] for name in names} | {"matryoshka_dims": ",".join(map(str, DIMS))}
    )
    options |= {"data_dir": arguments.data_dir, "language": "ruby", "output_dir": folder}
    run_command(["evaluate", str(model), *as_argv(options)])


def mrr(folder: Path, metric: str) -> float:
    """The MRR of the queries of test."""
    return json.loads((folder / "all_results.json").read_text())[f"test_{metric}"]


def in_process(function, *given) -> None:
    """Calls a function in a separate process, so that its peak memory can be measured."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=given)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)


def main() -> None:
    """Makes the runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--model", required=True, help="the encoder that is trained: a Hub name or a folder")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--only", default=",".join(RUNS), help="runs to make, by comma")
    parser.add_argument("--lengths", default="48,96", help="tokens of a query and of a function")
    parser.add_argument("--max_steps", type=int, default=-1, help="steps of every run; -1 is one epoch")
    arguments = parser.parse_args()
    folders = {"untrained": arguments.output_dir / "untrained-dimensions"}
    if not folders["untrained"].exists():
        in_process(evaluate, arguments.model, folders["untrained"], arguments)
    names = [name for name in RUNS if name in arguments.only.split(",")]
    for name in names:
        folder, folders[name] = arguments.output_dir / name, arguments.output_dir / f"{name}-dimensions"
        if not (folder / "run.json").exists():
            in_process(train, name, arguments)
        if not folders[name].exists():
            in_process(evaluate, folder, folders[name], arguments)
    metrics = ["mrr", *map(shorter_metric, DIMS[1:])]
    lines = [["before training", *(mrr(folders["untrained"], metric) for metric in metrics), None, None, None, None]]
    for name in names:
        folder = arguments.output_dir / name
        cost = json.loads((folder / "cost.json").read_text())
        size = sum((folder / file).stat().st_size for file in WEIGHTS if (folder / file).exists()) / 1e6
        values = [mrr(folders[name], metric) for metric in metrics]
        lines.append([RUNS[name][0], *values, cost["steps"], cost["seconds"], cost["peak"], size])
    header = ["trained", *(f"MRR by {dim}" for dim in DIMS), "steps", "s per step", "peak memory, MiB", "weights, MB"]
    print(table(header, lines, floats=".3f"))


if __name__ == "__main__":
    main()
