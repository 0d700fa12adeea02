"""Measures encoders on ONNX Runtime against torch: pieces per second, CPU seconds, and the MRR of 8-bit weights.

python benchmarks/onnx_search.py speed ENCODER DATA_DIR
python benchmarks/onnx_search.py quality ENCODER DATA_DIR

ENCODER is a folder, DATA_DIR has CodeSearchNet files. Each way of running the encoder is measured in a separate
process with the same pieces. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from soft_trainer.terminal import table

WAYS = ("torch", "float32", "int8")
PIECES = 300
QUERIES = 400


def rows_of(folder: Path, split: str) -> list[dict]:
    """Reads one split."""
    with gzip.open(folder / f"{split}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def encoder_of(way: str, encoder: str):
    """Opens the encoder."""
    from soft_trainer.search.index.vectors import open_encoder

    return open_encoder(encoder, precision=way)


def speed(way: str, encoder: str, folder: Path) -> dict:
    """Encodes pieces, and then one query in a new process that does nothing else."""
    texts = [row["original_string"] for row in rows_of(folder, "codebase")[:PIECES]]
    opened = encoder_of(way, encoder)
    opened.codes(texts[:16], ["ruby"] * 16)
    wall = time.perf_counter()
    cpu = time.process_time()
    opened.codes(texts, ["ruby"] * len(texts))
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    cost = {"pieces/s": PIECES / wall, "CPU ms a piece": 1000 * cpu / PIECES}
    opening = f"open_encoder({encoder!r}, precision={way!r})"
    code = f"from soft_trainer.search.index.vectors import open_encoder; {opening}.queries(['parse a date'])"
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return cost | {"CPU s of a query": used}


def quality(way: str, encoder: str, folder: Path) -> dict:
    """Computes the MRR of queries over the whole corpus."""
    corpus = rows_of(folder, "codebase")
    queries = (rows_of(folder, "valid") + rows_of(folder, "test"))[:QUERIES]
    opened = encoder_of(way, encoder)
    codes = opened.codes([" ".join(row["code_tokens"]) for row in corpus], ["ruby"] * len(corpus))
    scores = opened.queries([" ".join(row["docstring_tokens"]) for row in queries]) @ codes.T
    place = {row["url"]: number for number, row in enumerate(corpus)}
    own = scores[np.arange(len(queries)), [place[row["url"]] for row in queries]]
    return {"MRR": float((1 / (scores >= own[:, None]).sum(1)).mean())}


def main() -> None:
    """Measures each way in a separate process, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "quality"))
    parser.add_argument("encoder")
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--one", choices=WAYS, help="measure this way, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        measure = {"speed": speed, "quality": quality}[arguments.what]
        measured = measure(arguments.one, arguments.encoder, arguments.data_dir)
        print(json.dumps(measured))
        return
    rows = []
    for way in WAYS:
        words = [sys.executable, __file__, *sys.argv[1:], "--one", way]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        rows.append([way, *measured.values()])
    print(table(["run by", *measured], rows, floats=".4g"))


if __name__ == "__main__":
    main()
