"""Measures training on one GPU in parts, and compares it with sentence-transformers, within nine minutes.

    python benchmarks/gpu.py --data_dir DIR [--model FOLDER] [--output gpu.json] [--parts step,waits] [--processes N]
    python benchmarks/gpu.py --data_dir DIR --device cpu --tiny     # tries the script without a GPU

DIR has train, valid, test and codebase as .jsonl or .jsonl.gz, such as CodeSearchNet's Ruby in GraphCodeBERT's
layout. Nothing is downloaded. The encoder is a RoBERTa of 12 layers and 768 dimensions with random weights, and
`--model` measures the step of another one too. `gpu.md` beside this file explains what each part prints.

Every part is a process with a time limit. Its tables are printed, and added to the JSON file, as soon as it is done.
If a part fails or takes too long, the others run nevertheless. `--processes N` trains on N GPUs, started by
`accelerate launch`, in the parts that train with several processes. The exit code is 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_environment import one_gpu

from soft_trainer.system.files import write_json
from soft_trainer.system.terminal import table

# Name -> limit in seconds, which allows three times what we expect. The groups have limits too.
STEP = {"machine": 90, "step": 90, "loops": 100, "packed": 60, "waits": 60, "memory": 60}
STEP_OF_MODEL = {"step_of_model": 60}  # only with --model
WITH_PROCESSES = ("precisions", "processes")
MORE = {"precisions": 150, "cache": 60, "resume": 60, "processes": 90, "estimators": 90}
GROUPS = ((STEP | STEP_OF_MODEL, 300), (MORE, 240))
LOG_LINES = 15  # of a part that failed


def parts_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the time limit of each part to run, in seconds, keyed by part."""
    known = STEP | STEP_OF_MODEL | MORE
    if arguments.parts is None:
        return {name: limit for name, limit in known.items() if arguments.model or name not in STEP_OF_MODEL}
    names = arguments.parts.split(",")
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"parts={','.join(unknown)}: choose from {', '.join(known)}")
    return {name: known[name] for name in names}


def run_part(arguments: argparse.Namespace, name: str, work: Path, limit: float) -> dict:
    """Runs a part in a separate process. Returns its result with `status` and `seconds`."""
    log = work / f"{name}.log"
    result = work / f"{name}.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--work", str(work)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "cache"),
        "HF_DATASETS_CACHE": str(work / "cache" / "datasets"),
        "PYTHONUNBUFFERED": "1",
    }
    if name not in WITH_PROCESSES or arguments.processes == 1:
        environment |= one_gpu()
    start = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        code = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                end(process)
    found = json.loads(result.read_text()) if result.exists() else {}
    if code is None:
        found["status"] = f"stopped after {limit:.0f} s"
    elif code != 0:
        found["status"] = f"failed with exit code {code}"
    found.setdefault("status", "done")
    if code != 0:
        found["log"] = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return found | {"seconds": round(time.monotonic() - start, 1)}


def end(process: subprocess.Popen) -> None:
    """Ends a part and the processes that it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def show(name: str, result: dict) -> None:
    """Prints a part's tables and notes."""
    print(f"\n## {name}: {result['status']}, {result['seconds']} s\n", flush=True)
    for each in result.get("tables", ()):
        print(f"{each['title']}\n\n{table(each['headers'], each['rows'], '.4g')}\n", flush=True)
    for line in [*result.get("notes", ()), *result.get("log", ())]:
        print(line, flush=True)


def goals(parts: dict[str, dict]) -> list[list]:
    """Returns our goals for an H100 and the figures that the parts measured, as rows of name, goal and figure."""
    found = []
    for result in parts.values():
        found += result.get("goals", [])
    return found


def run(arguments: argparse.Namespace) -> int:
    """Runs the parts. Returns the exit code."""
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    parts: dict[str, dict] = {}
    page = {"arguments": vars(arguments) | {"part": None, "work": None}, "parts": parts}
    chosen = parts_of(arguments)
    with tempfile.TemporaryDirectory() as work:
        for group, seconds in GROUPS:
            until = time.monotonic() + seconds * arguments.patience
            for name in group:
                if name not in chosen:
                    continue
                limit = min(chosen[name] * arguments.patience, until - time.monotonic())
                if limit < 1:
                    parts[name] = {"status": "skipped: no time left", "seconds": 0.0}
                else:
                    parts[name] = run_part(arguments, name, Path(work), limit)
                show(name, parts[name])
                write_json(output, page)
    page["goals"] = goals(parts)
    write_json(output, page)
    print(f"\n## Goals on an H100\n\n{table(['', 'goal', 'measured'], page['goals'], '.2f', ['goal'])}\n")
    bad = [name for name, result in parts.items() if result["status"] not in ("done", "skipped: no CUDA")]
    wrong = [name for name, result in parts.items() if result.get("wrong")]
    print(f"{output}: {len(parts)} parts, {sum(result['seconds'] for result in parts.values()):.0f} s", end="")
    print(f"; not done: {', '.join(bad) or 'none'}; wrong results: {', '.join(wrong) or 'none'}")
    return int(bool(bad or wrong))


def main() -> None:
    """Runs all parts, or with `--part` one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True, help="folder with train, valid, test and codebase")
    parser.add_argument("--model", help="folder of another encoder whose step is measured too")
    parser.add_argument("--output", default="gpu.json")
    parser.add_argument("--parts", help=f"of {', '.join(STEP | STEP_OF_MODEL | MORE)} (default: all)")
    parser.add_argument("--processes", type=int, default=1, help="GPUs for the parts with several processes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny encoder and few rows, to try the script")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of all time limits")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--training", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part or arguments.training:
        from gpu_parts import run_here  # slow to import, and the parts should not share a process

        run_here(arguments)
    else:
        sys.exit(run(arguments))


if __name__ == "__main__":
    main()
