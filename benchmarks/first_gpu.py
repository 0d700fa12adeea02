"""Runs the steps of first_gpu.sh that need more than a command; each writes a JSON file, which `page` reads.

    python benchmarks/first_gpu.py rows|steps|resume|page FOLDER
    python benchmarks/first_gpu.py pushed FOLDER USER/NAME

`steps` measures the cost of the weights: it compares a Soft-InfoNCE step with an InfoNCE step on the same batch. The
result is the median over the steps, without the first ten.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from huggingface_hub import HfApi
from measuring import machine
from safetensors.torch import load_file
from transformers import TrainerCallback

from soft_trainer import load_encoder
from soft_trainer.data.load import read_source
from soft_trainer.evaluation.significance import difference_text
from soft_trainer.files import write_json, write_rows, write_text
from soft_trainer.hub.dataset import pushed_tables
from soft_trainer.studies.compare import compare_patterns
from soft_trainer.terminal import table
from soft_trainer.training.checkpoints import MARKER

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the script
import run_codesearch  # noqa: E402

# Table 1 of the paper: UniXcoder on Ruby.
PAPER = {"infonce": 0.740, "bm25": 0.753, "trained_model": 0.753, "simcse": 0.753}
SEED = "1234"
STEPS = 60
WARM = 10  # steps
TRAINING_ALONE = ["--eval_strategy", "no", "--load_best_model_at_end", "false", "--report_to", "none"]
PRIVATE = ("log.txt", "recipe.yaml", "cell.json", "ranks-", "training_args")
TEXTS = ["sort a list of numbers", "read a file line by line"]


def run_folder(folder: Path, method: str) -> Path:
    """The folder of a method's first run."""
    return folder / "runs" / f"unixcoder-{method}" / SEED


def save_rows(folder: Path) -> None:
    """Writes the rows as files, which the SimCSE encoder reads."""
    data = pushed_tables(read_source("code-search-net/code_search_net", language="ruby", check=False))
    write_rows(data, folder / "rows")
    print(table(["split", "rows"], [(split, len(rows)) for split, rows in data.items()]))


# ---- Seconds and memory ----


class Probe(TrainerCallback):
    """Records the seconds of every step, with all work of the GPU done."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = now()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(now() - self.start)


def now() -> float:
    """The time after all work that was given to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_steps(folder: Path) -> None:
    """Trains a few steps of each method on the same batches, and writes seconds and memory."""
    seconds = {}
    measured = {}
    for method in PAPER:
        probe = Probe()

        def train(trainer, *_, probe=probe):
            trainer.add_callback(probe)
            trainer.train()

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as out, mock.patch.object(run_codesearch, "train_and_measure", train):
            options = ["--output_dir", out, "--max_steps", str(STEPS), "--save_strategy", "no", *TRAINING_ALONE]
            run_codesearch.main(["--config", str(run_folder(folder, method) / "recipe.yaml"), *options])
        seconds[method] = probe.seconds[WARM:]
        ratios = [own / plain for own, plain in zip(seconds[method], seconds["infonce"], strict=True)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        step = statistics.median(seconds[method])
        measured[method] = {"step": step, "memory": peak, "share": statistics.median(ratios) - 1}
    write_json(folder / "steps.json", measured)


# ---- Resuming and pushing ----


def resume(folder: Path) -> None:
    """Stops a run by SIGTERM after a checkpoint, resumes it, and compares its weights with an undisturbed run's."""
    own = folder / "resume"
    shutil.rmtree(own, ignore_errors=True)
    recipe = run_folder(folder, "bm25") / "recipe.yaml"
    options = ["--max_steps", "200", "--save_strategy", "steps", "--save_steps", "20", *TRAINING_ALONE]

    def command(name: str) -> list[str]:
        train = [sys.executable, "-m", "soft_trainer.cli", "train", "--config", str(recipe)]
        return [*train, "--output_dir", str(own / name), *options]

    subprocess.run(command("whole"), check=True)
    stopped = subprocess.Popen(command("stopped"))
    while stopped.poll() is None and not (own / "stopped" / "checkpoint-20" / MARKER).exists():
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    code = stopped.wait()
    last = max(int(path.name.split("-")[1]) for path in (own / "stopped").glob("checkpoint-*"))
    subprocess.run(command("stopped"), check=True)
    whole, resumed = (load_file(own / name / "model.safetensors") for name in ("whole", "stopped"))
    difference = max(float((whole[name] - resumed[name]).abs().max()) for name in whole)
    write_json(folder / "resume.json", {"code": code, "step": last, "difference": difference})


def check_push(folder: Path, repository: str) -> None:
    """Loads the pushed encoder by name and compares it with the folder; looks for files that should not be there."""
    info = HfApi().model_info(repository)
    files = [file.rfilename for file in info.siblings]
    here, there = (load_encoder(name) for name in (run_folder(folder, "bm25"), repository))
    difference = float((here.encode_queries(TEXTS) - there.encode_queries(TEXTS)).abs().max())
    leaked = [file for file in files if file.startswith(PRIVATE)]
    pushed = {"private": info.private, "files": len(files), "leaked": leaked, "difference": difference}
    write_json(folder / "pushed.json", {"repository": repository, **pushed})


# ---- The page ----


def page(folder: Path) -> str:
    """The results as one page of Markdown."""
    steps, resumed, pushed = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("steps", "resume", "pushed")
    )
    rows = []
    for method, paper in PAPER.items():
        runs = sorted((folder / "runs" / f"unixcoder-{method}").glob("*/run.json"))
        records = [json.loads(path.read_text()) for path in runs]
        found = [record["results"]["test"]["trained"]["mrr"] for record in records]
        difference = None
        if method != "infonce":
            pair = [str(folder / "runs" / f"unixcoder-{name}" / "*") for name in (method, "infonce")]
            compared = compare_patterns(*pair)
            difference = difference_text(compared.means[0] - compared.means[1], compared.interval())
        own = steps[method]
        seeds = ", ".join(f"{mrr:.3f}" for mrr in found)
        memory = own["memory"] and f"{own['memory']:.1f}"
        share = f"{own['share']:+.1%}"
        rows.append([method, statistics.mean(found), seeds, paper, difference, f"{own['step']:.4f}", memory, share])
    headers = [
        "method",
        "MRR",
        "of the seeds",
        "paper",
        "- InfoNCE (95 %)",
        "s a step",
        "GiB",
        "more than InfoNCE's step",
    ]
    training = records[0]["training"]
    pool = records[0]["results"]["test"]["trained"]
    settings = [f"{name} {training[name]:g}" for name in ("epochs", "codes compared per query", "learning rate")]
    device = machine("cuda" if torch.cuda.is_available() else "cpu")
    sizes = f"{pool['queries']:,} test queries over {pool['pool_size']:,} codes"
    stop = f"stopped at step {resumed['step']} (exit code {resumed['code']}), then resumed"
    kind = "private" if pushed["private"] else "PUBLIC"
    leaks = ", ".join(pushed["leaked"]) or "none"
    return f"""# UniXcoder on CodeSearchNet's Ruby

{device}; {", ".join(settings)}; {training["precision"]}.
MRR of {sizes}; in the paper 1,261 over 4,360.

{table(headers, rows)}

Resuming: {stop}; largest difference of a weight from a run without a stop: {resumed["difference"]:.2g}.

Push: {pushed["repository"]}, {kind}, {pushed["files"]} files; files that should not be there: {leaks}; largest
difference of an embedding from the folder's, loaded by name: {pushed["difference"]:.2g}.
"""


def main() -> None:
    """Runs one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("rows", "steps", "resume", "pushed", "page"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("repository", nargs="?")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.step == "rows":
        save_rows(folder)
    elif arguments.step == "steps":
        measure_steps(folder)
    elif arguments.step == "resume":
        resume(folder)
    elif arguments.step == "pushed":
        check_push(folder, arguments.repository)
    else:
        text = page(folder)
        write_text(folder / "page.md", text)
        print(f"\n{text}\nWritten to {folder / 'page.md'}")


if __name__ == "__main__":
    main()
