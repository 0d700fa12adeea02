"""Measures how many pairs a second a static encoder trains on, the memory that this takes, and what limits it.

    OMP_NUM_THREADS=1 python benchmarks/static.py --data_dir DIR [DIR ...] --model FOLDER
        [--batch_sizes 512,1024,4096] [--estimators none,bm25] [--steps 12]

`soft-trainer distil` or `soft-trainer train --from_scratch 256x0` writes such a FOLDER. Every line of the table is a
process. Seconds are its CPU seconds, from the end of the third step to the end of the last: collation, both passes,
weights, loss, clipping and optimizer. Another process repeats the training under cProfile and lists the functions that
take most of that time themselves. On one busy core, rows of four languages and 256 dimensions: 5,900 pairs a second in
batches of 512 with BM25 weights (0.84 GiB; 1,300 before a batch was one chunk, when the gradient of the vocabulary for
every chunk took 87 % of the time), 2,100 in batches of 4,096 (1.68 GiB; the weights and scores of 4,096 x 4,096
pairs). The memory is the process's peak, and how much of it training added.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from datasets import concatenate_datasets
from measuring import machine, numbers, set_up
from transformers import TrainerCallback

from soft_trainer import BM25Estimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.terminal import table

WARM_UP = 3  # steps before the clock starts: they allocate memory and load kernels
SHOWN = 4  # functions of a profile


class Clock(TrainerCallback):
    """Takes the time of the processor between the end of the warm-up and the last step, and profiles it if asked."""

    def __init__(self, profile: bool):
        self.seconds = 0.0
        self.profile = None
        if profile:
            self.profile = cProfile.Profile()

    def on_step_end(self, args, state, control, **kwargs):
        """Starts after the warm-up, and stops after the last step."""
        if state.global_step == WARM_UP:
            self.seconds = -time.process_time()
            if self.profile is not None:
                self.profile.enable()
        if state.global_step == state.max_steps:
            self.seconds += time.process_time()
            if self.profile is not None:
                self.profile.disable()


def peak_memory() -> float:
    """Returns the largest memory that this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(arguments: argparse.Namespace) -> dict:
    """Trains with one batch size and one estimator."""
    rows = concatenate_datasets([load_folder(folder, ("train",))["train"] for folder in arguments.data_dir])
    encoder = load_encoder(arguments.model, device="cpu")
    (size,) = numbers(arguments.batch_sizes)
    estimators = {"none": None, "bm25": BM25Estimator()}
    clock = Clock(arguments.profile)
    with tempfile.TemporaryDirectory() as folder:
        args = SoftInfoNCETrainingArguments(
            folder,
            loss="info_nce" if arguments.estimators == "none" else "soft_info_nce",
            learning_rate=1e-3,
            max_steps=WARM_UP + arguments.steps,
            per_device_train_batch_size=size,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        callbacks = [callback for callback in (clock, estimators[arguments.estimators]) if callback is not None]
        trainer = SoftInfoNCETrainer(
            encoder.model,
            args,
            rows,
            processing_class=encoder.tokenizer,
            encoder=encoder.profile,
            callbacks=callbacks,
        )
        before = peak_memory()
        trainer.train()
    memory = peak_memory()
    measured = {"rate": size * arguments.steps / clock.seconds, "memory": memory, "added": memory - before}
    if clock.profile is not None:
        measured["limits"] = limits(clock.profile)
    return measured


def limits(profile: cProfile.Profile) -> str:
    """Names the functions that take most of the time themselves, with their shares."""
    timings = pstats.Stats(profile).stats
    whole = sum(timing[2] for timing in timings.values())
    largest = sorted(timings, key=lambda function: -timings[function][2])[:SHOWN]
    named = []
    for path, line, name in largest:
        place = f"{Path(path).name}:{line} {name}" if line else name.split(" object")[0]
        named.append(f"{place} {timings[path, line, name][2] / whole:.0%}")
    return ", ".join(named)


def in_another_process(arguments: list[str]) -> dict:
    """Measures in a separate process, whose peak memory is that of one training."""
    command = [sys.executable, __file__, "--one", *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Prints the table, or in a child process the figures of one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", nargs="+", required=True, help="folders with train.jsonl or train.jsonl.gz")
    parser.add_argument("--model", required=True, help="folder of a static encoder")
    parser.add_argument("--batch_sizes", default="512,1024,4096")
    parser.add_argument("--estimators", default="none,bm25")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_up(1)
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    shared = ["--data_dir", *arguments.data_dir, "--model", arguments.model, "--steps", str(arguments.steps)]
    lines = []
    for size in numbers(arguments.batch_sizes):
        for estimator in arguments.estimators.split(","):
            options = [*shared, "--batch_sizes", str(size), "--estimators", estimator]
            timed = in_another_process(options)
            profiled = in_another_process([*options, "--profile"])
            memory = f"{timed['memory']:.2f} GiB, {timed['added']:.2f} of them by training"
            lines.append([size, estimator, f"{timed['rate']:,.0f}", memory, profiled["limits"]])
    print(machine())
    print(table(["batch", "weights", "pairs a second", "peak memory", "largest shares of the time"], lines))


if __name__ == "__main__":
    main()
