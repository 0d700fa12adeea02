"""Peak memory of a step with gradient caching: a large batch in chunks, beside a small one in one piece.

    python benchmarks/memory.py --data_dir DIR [--size 256x4] [--lengths 32,64] [--small 64] [--large 4096]
        [--chunk 64] [--repetitions 2]

Every setting is a process of its own that trains for a few steps with the trainer's own loop (two with the large
batch, as many as make an eighth of that in examples with the small one); processes take turns. "peak" is the most
memory that the process held at once during its steps, libraries, memory-mapped rows, weights and optimizer included;
"beside the start" is the same less what it held before the first step. The time of an example is that of a step after
the first, without collation. Ratios are to the small batch without any chunks; by default a batch goes in chunks of
like length.
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
from start import add_encoder_options, begin, label
from transformers import TrainerCallback

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.data.codesearchnet import load_folder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.terminal import table

KEYS = ("peak", "grown", "example")


def resident(line: str) -> float:
    """MiB in a line of this process's status: VmRSS now, VmHWM at most.

    Not `getrusage`, whose maximum a process inherits from the one that started it.
    """
    values = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(values[line].split()[0]) / 1024


class Probe(TrainerCallback):
    """What was held before the first step, and how long each took."""

    def __init__(self):
        self.before, self.taken, self.start = 0.0, [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.before = resident("VmRSS")
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.taken.append(time.perf_counter() - self.start)


def train(folder: str, data_dir: str, threads: int, setting: dict) -> dict[str, float]:
    """Train with one setting in this process."""
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
            mask_duplicates=False,
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
        f"{arguments.small} in one piece": small | {"chunk_by_length": False},
        f"{arguments.small}": small,
        f"{arguments.large} in chunks of {arguments.chunk}": large | cached,
        f"{arguments.small}, checkpointing": small | checkpointed,
        f"{arguments.large} in chunks of {arguments.chunk}, checkpointing": large | cached | checkpointed,
    }


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, list[dict]]:
    """What every repetition of every setting found."""
    chosen = settings(arguments)
    found: dict[str, list[dict]] = {name: [] for name in chosen}
    for _, name in turns(list(chosen), arguments.repetitions):
        command = [sys.executable, __file__, "--data_dir", arguments.data_dir, "--threads", str(arguments.threads)]
        command += ["--folder", folder, "--one", json.dumps(chosen[name])]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[name].append(json.loads(output.splitlines()[-1]))
        sys.stderr.write(f"{name}: {found[name][-1]}\n")
    return found


def report(arguments: argparse.Namespace, found: dict[str, list[dict]]) -> None:
    """Print the table."""
    print(f"## Memory of a step: {label(arguments)}\n\n{machine()}, {arguments.repetitions} repetitions, float32\n")
    base = next(iter(found.values()))
    lines = []
    for name, results in found.items():
        columns = {key: [result[key] for result in results] for key in KEYS}
        shares = {key: ratios(columns[key], [result[key] for result in base]) for key in KEYS}
        cells = [f"{statistics.median(columns[key]):,.0f}" for key in ("peak", "grown")]
        lines.append(
            [name, cells[0], spread(shares["peak"]), cells[1], spread(shares["grown"])]
            + [f"{statistics.median(columns['example']):.2f}", spread(shares["example"])]
        )
    headers = ["batch", "peak, MiB", "times", "beside the start, MiB", "times", "ms an example", "times"]
    print(table(headers, lines))


def main() -> None:
    """Measure every setting in a process of its own; with `--one`, be that process."""
    parser = parser_of(__doc__)
    add_encoder_options(parser, lengths="32,64")
    parser.add_argument("--small", type=int, default=64)
    parser.add_argument("--large", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    if arguments.one:
        print(json.dumps(train(arguments.folder, arguments.data_dir, arguments.threads, json.loads(arguments.one))))
        return
    with tempfile.TemporaryDirectory() as folder:
        begin(arguments, folder)
        report(arguments, measure(arguments, folder))


if __name__ == "__main__":
    main()
