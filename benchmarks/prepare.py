"""Measures the speed and memory of the preparations for training: reading, filtering, tokenising, data flow.

    python benchmarks/prepare.py --data_dir DIR [--rows 10000,50000] [--num_proc 2]

The rows are repeated up to `--rows`. Every name and word of four letters or more gets the number of the copy, so no
copy is a near duplicate, and caches help as little as possible. Each number of rows is measured in a separate process
with an empty cache. Twenty times a second the memory of that process and its children is added up. "peak" counts all
pages, shared ones once. "own" excludes the pages of memory-mapped files, which the system can take back. "per row"
is the own memory that a further row adds, from the smallest number of rows to this one, and about 0 if memory is
constant. Filters keep eight bytes a band to find duplicates. The trainer and BM25 keep the results of the last two
stages in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from datasets import Dataset
from measuring import machine, numbers, parser_of, set_up

from soft_trainer import BM25Estimator
from soft_trainer.data.filtering import filter_rows
from soft_trainer.data.layouts.codesearchnet import load_folder, load_jsonl
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import SIDES, column_of, column_texts, text_ids, tokenized
from soft_trainer.encoders.loading import load_tokenizer
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.encoders.scratch import train_tokenizer
from soft_trainer.mining.rules import CODESEARCHNET_RULES, GRAPHCODEBERT_RULES
from soft_trainer.terminal import table

PLAIN, GRAPH = PROFILES["auto"], PROFILES["graphcodebert"]
PAUSE = 0.05  # seconds between two measurements of memory
MIB = 1024  # KiB
WORD = re.compile(r"\b[A-Za-z_]{4,}\b")
KEYWORDS = set(
    "abstract alias assert async await begin boolean break byte case catch chan char class const continue debugger "
    "declare default defer defined delete double echo elif else elsif enum ensure except export extends fallthrough "
    "false final finally float foreach from function global goto import implements include instanceof interface "
    "lambda long main module namespace native next none nonlocal null package pass private protected public raise "
    "range redo require rescue retry return self short static string struct super switch synchronized then this "
    "throw throws trait transient true type typeof undef union unless until using volatile when while with yield "
    "None True False".split()
)


def renamed(value, copy: int):
    """A text, or a list of texts, with the number of the copy in its words."""
    if isinstance(value, list):
        return [renamed(part, copy) for part in value]
    return WORD.sub(lambda word: word[0] if word[0] in KEYWORDS else f"{word[0]}{copy}", value)


def write_rows(rows: Dataset, count: int, path: Path) -> None:
    """Writes JSON lines of `count` rows, all different."""
    changed = {"original_string", "code", "code_tokens", "docstring", "docstring_tokens", "func_name"}
    with path.open("w") as lines:
        for number in range(count):
            copy, row = divmod(number, len(rows))
            values = {name: renamed(value, copy) if name in changed else value for name, value in rows[row].items()}
            lines.write(json.dumps(values | {"url": f"{values['url']}#{copy}"}) + "\n")


def stages(path: Path, num_proc: int | None) -> dict[str, Callable]:
    """Name -> a call that takes the rows, and returns new rows or None."""
    tokenizer = load_tokenizer(path.parent / "tokenizer", GRAPH)

    def both_sides(rows):
        for side in SIDES:
            tokenized(rows, side, PLAIN, tokenizer)

    def numbered(rows):
        for name in ("docstring_tokens", "code_tokens"):
            text_ids(column_texts(rows, name))

    return {
        "read": lambda _: load_jsonl(path),
        "filter: graphcodebert": lambda rows: filter_rows(rows, GRAPHCODEBERT_RULES, num_proc)[0],
        "filter: codesearchnet": lambda rows: filter_rows(rows, CODESEARCHNET_RULES, num_proc)[0],
        "tokenise": both_sides,
        "data flow": lambda rows: column_of(rows, "code", GRAPH, tokenizer) and None,
        "equal texts": numbered,
        "BM25 counts": lambda rows: BM25Estimator().fit(Split.from_pairs(rows)),
    }


def prepare(path: Path, num_proc: int | None) -> list[dict]:
    """Runs all stages in this process. Returns the start, the end and the number of rows of each stage."""
    rows, done = None, []
    for name, stage in stages(path, num_proc).items():
        before, start = rows, time.monotonic()
        made = stage(rows)
        rows = rows if made is None else made
        done.append({"name": name, "start": start, "end": time.monotonic(), "rows": len(rows if not done else before)})
    return done


def held(process: psutil.Process) -> tuple[float, float]:
    """The MiB of a process and its children: all pages, and the pages that belong to no file."""
    peak = own = 0.0
    for pid in [process.pid, *(child.pid for child in process.children(recursive=True))]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # the process has ended
        values = dict(re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE))
        peak += int(values.get("Pss", 0)) / MIB
        own += int(values.get("Pss_Anon", 0)) / MIB
    return peak, own


def watch(path: Path, arguments: argparse.Namespace) -> list[dict]:
    """Runs `prepare` in a separate process. Returns its result, with the memory during each stage."""
    environment = os.environ | {
        "HF_DATASETS_CACHE": str(path.parent / "cache"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, __file__, "--data_dir", arguments.data_dir, "--path", str(path)]
    command += ["--threads", str(arguments.threads)]
    command += ["--num_proc", str(arguments.num_proc)] if arguments.num_proc else []
    samples = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        process = psutil.Process(running.pid)
        while running.poll() is None:
            try:
                samples.append((time.monotonic(), *held(process)))
            except psutil.NoSuchProcess:
                break
            time.sleep(PAUSE)
        output = running.stdout.read()
    if running.returncode:
        raise SystemExit(f"preparing {path} failed")
    done = json.loads(output.splitlines()[-1])
    for stage in done:
        nearest = min(samples, key=lambda sample: abs(sample[0] - stage["end"]))
        inside = [sample[1:] for sample in samples if stage["start"] <= sample[0] <= stage["end"]] or [nearest[1:]]
        stage["peak"], stage["own"] = (max(column) for column in zip(*inside, strict=True))
    return done


def report(arguments: argparse.Namespace, results: dict[int, list[dict]]) -> None:
    """Prints the table."""
    lines, (least, base) = [], next(iter(results.items()))
    for count, done in results.items():
        for stage, first in zip(done, base, strict=True):
            taken = stage["end"] - stage["start"]
            more = 1024 * (stage["own"] - first["own"]) / (count - least) if count > least else None
            lines.append([count, stage["name"], stage["rows"], round(stage["rows"] / taken), f"{taken:.1f} s"])
            lines[-1] += [round(stage["peak"]), round(stage["own"]), None if more is None else f"{more:.2f} KiB"]
    processes = f"{arguments.num_proc} processes" if arguments.num_proc else "a process a core"
    print(f"## Preparing rows\n\n{machine()}; filters in {processes}, data flow in a process a core\n")
    headers = ["rows", "stage", "rows in", "rows/s", "time", "peak, MiB", "own, MiB", "per row"]
    print(table(headers, lines))


def main() -> None:
    """Measures every number of rows in a separate process. With `--path` this is such a process."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", default="10000,50000", help="numbers of rows, the smallest first")
    parser.add_argument("--num_proc", type=int, help="processes of the filters (default: one a core, like load_data)")
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    set_up(arguments.threads)
    if arguments.path:
        print(json.dumps(prepare(arguments.path, arguments.num_proc)))
        return
    rows, results = load_folder(arguments.data_dir, ("train",))["train"], {}
    for count in numbers(arguments.rows):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows.jsonl")
            write_rows(rows, count, path)
            train_tokenizer(map(" ".join, rows["code_tokens"]), GRAPH).save_pretrained(path.parent / "tokenizer")
            results[count] = watch(path, arguments)
        sys.stderr.write(f"{count:,} rows are prepared\n")
    report(arguments, results)


if __name__ == "__main__":
    main()
