"""Compares the peak memory of a large batch with gradient caching and of a small batch in one packed pass.

    python benchmarks/memory.py --data_dir DIR [--size 256x4] [--lengths 32,64] [--small 64] [--large 4096]
        [--chunk 64] [--repetitions 2]

Every setting trains in a separate process, with the trainer's loop, and the processes take turns. The large batch
takes two steps. The small batch takes enough steps for an eighth of those examples. "peak" is the largest memory of
the process during its steps, with libraries, memory-mapped rows, weights and optimizer. "growth" is the peak minus
the memory before the first step. The time per example covers the steps after the first, without collation. Ratios
compare with the small batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from datasets import concatenate_datasets
from measuring import machine, parser_of, ratios, set_up, spread, turns
from starting_point import add_encoder_options, begin, label
from transformers import TrainerCallback

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.terminal import table

KEYS = ("peak", "grown", "example")


def resident(line: str) -> float:
    """The MiB in a line of this process's status: VmRSS is the present memory, VmHWM the peak.

    The maximum of `getrusage` is of no use, because a process inherits it from the process that started it.
    """
    values = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(values[line].split()[0]) / 1024


class Probe(TrainerCallback):
    """Records the memory before the first step and the seconds of each step."""

    def __init__(self):
        self.before, self.taken, self.start = 0.0, [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            self.before = resident("VmRSS")
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.taken.append(time.perf_counter() - self.start)


def train(folder: str, data_dir: str, threads: int, setting: dict) -> dict[str, float]:
    """Trains with one setting in this process."""
    set_up(threads)
    batch_size = setting["per_device_train_batch_size"]
    encoder = load_encoder(folder, device="cpu")
    rows = load_folder(data_dir, ("train",))["train"]
    rows = concatenate_datasets([rows] * -(-batch_size // len(rows)))
    probe = Probe()
    trainer = SoftInfoNCETrainer(
        model=encoder.model,
        args=SoftInfoNCETrainingArguments(
            output_dir=f"{folder}/out",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            false_negatives="ignore",
            train_sampling_strategy="random",
            **setting,
        ),
        train_dataset=rows,
        processing_class=encoder.tokenizer,
        encoder=encoder.profile,
        callbacks=[probe],
    )
    trainer.train()
    peak = resident("VmHWM")
    example = 1e3 * statistics.median(probe.taken[1:]) / batch_size
    return {"peak": peak, "grown": peak - probe.before, "example": example}


def settings(arguments: argparse.Namespace) -> dict[str, dict]:
    """Name -> training arguments."""
    small = {
        "per_device_train_batch_size": arguments.small,
        "max_steps": 1 + max(2, arguments.large // 8 // arguments.small),
    }
    large = {"per_device_train_batch_size": arguments.large, "max_steps": 2}
    cached = {"gradient_cache_chunk_size": arguments.chunk}
    checkpointed = {"gradient_checkpointing": True}
    return {
        f"{arguments.small}": small,
        f"{arguments.large} in chunks of {arguments.chunk}": large | cached,
        f"{arguments.small}, checkpointing": small | checkpointed,
        f"{arguments.large} in chunks of {arguments.chunk}, checkpointing": large | cached | checkpointed,
    }


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, list[dict]]:
    """Setting -> the results of its repetitions."""
    chosen = settings(arguments)
    results: dict[str, list[dict]] = {name: [] for name in chosen}
    for _, name in turns(list(chosen), arguments.repetitions):
        command = [sys.executable, __file__, "--data_dir", arguments.data_dir, "--threads", str(arguments.threads)]
        command += ["--folder", folder, "--setting", json.dumps(chosen[name])]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[name].append(json.loads(output.splitlines()[-1]))
        sys.stderr.write(f"{name}: {results[name][-1]}\n")
    return results


def report(arguments: argparse.Namespace, results: dict[str, list[dict]]) -> None:
    """Prints the table."""
    print(f"## Memory of a step: {label(arguments)}\n\n{machine()}, {arguments.repetitions} repetitions, float32\n")
    base = next(iter(results.values()))
    lines = []
    for name, repetitions in results.items():
        columns = {key: [result[key] for result in repetitions] for key in KEYS}
        shares = {key: ratios(columns[key], [result[key] for result in base]) for key in KEYS}
        cells = [f"{statistics.median(columns[key]):,.0f}" for key in ("peak", "grown")]
        lines.append(
            [name, cells[0], spread(shares["peak"]), cells[1], spread(shares["grown"])]
            + [f"{statistics.median(columns['example']):.2f}", spread(shares["example"])]
        )
    headers = ["batch", "peak, MiB", "times", "growth, MiB", "times", "ms per example", "times"]
    print(table(headers, lines))


def main() -> None:
    """Measures every setting in a separate process. With `--setting` this is such a process."""
    parser = parser_of(__doc__)
    add_encoder_options(parser, lengths="32,64")
    parser.add_argument("--small", type=int, default=64)
    parser.add_argument("--large", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    if arguments.setting:
        setting = json.loads(arguments.setting)
        print(json.dumps(train(arguments.folder, arguments.data_dir, arguments.threads, setting)))
        return
    with tempfile.TemporaryDirectory() as folder:
        begin(arguments, folder)
        report(arguments, measure(arguments, folder))


if __name__ == "__main__":
    main()
