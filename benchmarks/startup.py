"""Measures the seconds from the command to the first training step, and the seconds that `--help` takes.

    python benchmarks/startup.py [--repetitions 3] [--recipe recipes/quickstart.yaml]

The recipe logs a line every step and is killed at the first line, so the time includes that step. "cold" has no cache
except the interpreter's bytecode: rows are mined or read, the tokenizer is trained and texts are tokenised. "warm" is
the same command once more. "imports" is the import of the script's libraries alone, without this project.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import machine, parser_of, spread

from soft_trainer.terminal import table

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "run_codesearch.py")
LIBRARIES = "import torch, datasets, transformers.modeling_utils; from transformers import AutoModel, Trainer"
FIRST_STEP = "{'loss'"


def seconds_to(words: str | None, command: Sequence[str], home: str) -> float:
    """Seconds until the command prints `words` and is killed, or until it ends. Bytecode and caches stay."""
    start = time.perf_counter()
    environment = os.environ | {"HF_HOME": home, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams) as running:
        for line in running.stdout:
            if words and words in line:
                taken = time.perf_counter() - start
                os.killpg(running.pid, signal.SIGKILL)  # with the children of a launcher
                return taken
    if words or running.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with {running.returncode} before it printed {words!r}")
    return time.perf_counter() - start


def commands(recipe: str, output_dir: str) -> dict[str, list[str]]:
    """Name -> command."""
    options = ["--config", recipe, "--output_dir", output_dir, "--logging_steps", "1", "--disable_tqdm", "true"]
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    return {
        "imports": [sys.executable, "-c", LIBRARIES],
        "--help": [sys.executable, SCRIPT, "--help"],
        "first step, python, cold": [sys.executable, SCRIPT, *options],
        "first step, python, warm": [sys.executable, SCRIPT, *options],
        "first step, accelerate launch, warm": [*launcher, SCRIPT, *options],
    }


def main() -> None:
    """Measures every command in turn and prints the table."""
    parser = parser_of(__doc__, rows=False)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "quickstart.yaml"))
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {}
    for _ in range(arguments.repetitions):
        with tempfile.TemporaryDirectory() as home:
            for name, command in commands(arguments.recipe, f"{home}/out").items():
                words = FIRST_STEP if "step" in name else None
                taken.setdefault(name, []).append(seconds_to(words, command, home))
        sys.stderr.write(f"{ {name: round(times[-1], 1) for name, times in taken.items()} }\n")
    print(f"## Start of a run\n\n{machine()}, {arguments.repetitions} repetitions\n")
    print(table(["", "s"], [[name, spread(times, 1)] for name, times in taken.items()]))


if __name__ == "__main__":
    main()
