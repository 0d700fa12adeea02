"""Kills training runs at random moments, resumes them, and compares the final weights bit by bit.

    python benchmarks/kill_and_resume.py --data_dir DIR [--kills 20] [--on_two 5]

Two reference runs train without a stop, on one process and on two: a small encoder with dropout, three epochs of 160
rows, a checkpoint every four steps. For each kill, a new run starts. All its processes get SIGKILL at a random
moment after the first step begins, which may be during a save or after the end. The same command then resumes the
run, and the final weights must equal the weights of the reference run.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

from soft_trainer.options.parse import as_argv
from soft_trainer.system.terminal import table

SCRIPT = Path(__file__).parents[1] / "run_codesearch.py"
STEPS, ROWS = 30, 160
FITTED = "BM25Estimator fitted"  # the last line before the first step
OPTIONS = {
    "from_scratch": "64x2",
    "vocabulary_size": 2000,
    "query_length": 16,
    "code_length": 48,
    "max_train_rows": ROWS,
    "learning_rate": 1e-3,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 4,
    "logging_steps": 1,
    "do_train": "true",
    "use_cpu": "true",
}


def argv_of(folder: Path, data: dict, processes: int) -> list[str]:
    """Creates a run's folder, and returns the script with its options."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").touch()
    batch = data["batch_size"] // processes
    options = OPTIONS | {"data_dir": data["data_dir"], "output_dir": folder, "per_device_train_batch_size": batch}
    return [str(SCRIPT), *as_argv(options)]


def start(folder: Path, data: dict, processes: int) -> psutil.Popen:
    """Starts the script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), *argv_of(folder, data, processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    with open(folder / "log.txt", "a") as log:
        return psutil.Popen(command, stdout=log, stderr=log, env=environment)


def finish(run: psutil.Popen, folder: Path) -> None:
    """Waits for the end of a run that must succeed."""
    if run.wait() != 0:
        sys.exit(f"{folder}: the run failed:\n{(folder / 'log.txt').read_text()[-3000:]}")


def weights(folder: Path) -> str:
    """Returns a digest of the final weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def wait_for_training(run: psutil.Popen, folder: Path) -> None:
    """Waits until the estimator is fitted, just before the first step, or until the run has ended."""
    log = folder / "log.txt"
    while run.poll() is None and FITTED not in log.read_text():
        time.sleep(0.005)


def kill(run: psutil.Popen) -> None:
    """Sends SIGKILL to all processes of the run at once."""
    if run.poll() is None:
        signal_all(run, "suspend")
        signal_all(run, "kill")
    run.wait()


def signal_all(run: psutil.Popen, name: str) -> None:
    """Calls a method of each process of the run, except processes that have ended."""
    processes = [run]
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += run.children(recursive=True)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            getattr(process, name)()


def seconds_of_training(folder: Path, data: dict, processes: int) -> float:
    """Trains without interruption. Returns the seconds from the first step to the end of the run."""
    run = start(folder, data, processes)
    wait_for_training(run, folder)
    begun = time.monotonic()
    finish(run, folder)
    return time.monotonic() - begun


def kill_and_resume(folder: Path, data: dict, processes: int, wait: float) -> tuple[str, str]:
    """Kills and resumes a run. Returns the moment of the kill, and the digest of the final weights."""
    run = start(folder, data, processes)
    wait_for_training(run, folder)
    time.sleep(wait)
    moment = "killed" if run.poll() is None else "ended"
    kill(run)
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    whole = [path.name for path in checkpoints if (path / "complete.json").exists()]
    broken = len(checkpoints) - len(whole)
    when = f"{moment} after {wait:.1f} s, newest checkpoint: {(whole or ['none'])[-1]}, half-written: {broken}"
    finish(start(folder, data, processes), folder)
    return when, weights(folder)


def main() -> None:
    """Trains without interruption, kills and resumes, and prints a table. The exit code is 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="train, valid, test and codebase as .jsonl or .jsonl.gz")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--on_two", type=int, default=5, help="kills of runs on two processes")
    parser.add_argument("--batch_size", type=int, default=16, help="over all processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = random.Random(options.seed)
    data = {"data_dir": options.data_dir, "batch_size": options.batch_size}
    root = Path(tempfile.mkdtemp(prefix="kill-and-resume-"))
    processes = [1] * (options.kills - options.on_two) + [2] * options.on_two
    expected = {}
    seconds = {}
    for number in sorted(set(processes)):
        folder = root / f"whole-{number}"
        seconds[number] = seconds_of_training(folder, data, number)
        expected[number] = weights(folder)
    rows = []
    for repetition, number in enumerate(processes, 1):
        folder = root / f"killed-{repetition}"
        when, digest = kill_and_resume(folder, data, number, generator.uniform(0, seconds[number]))
        rows.append([repetition, number, when, "equal" if digest == expected[number] else "DIFFERENT"])
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
        if digest == expected[number]:
            shutil.rmtree(folder)
    print(table(["kill", "processes", "moment", "final weights"], rows))
    sys.exit(any(row[-1] != "equal" for row in rows))


if __name__ == "__main__":
    main()
