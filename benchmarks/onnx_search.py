"""Compares encoders on ONNX Runtime with torch: speed, memory, and what 8-bit weights cost in MRR and nDCG@10.

    python benchmarks/onnx_search.py speed ENCODER DATA_DIR
    python benchmarks/onnx_search.py quality ENCODER DATA_DIR
    python benchmarks/onnx_search.py judged ENCODER TREES --queries QUERIES

ENCODER is a folder. DATA_DIR has rows with a valid split, such as CodeSearchNet or CoSQA. TREES and QUERIES have the
format of `soft-trainer evaluate-search`. Each runtime is measured in a separate process with the same texts. Run
`speed` while nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from soft_trainer import load_rows
from soft_trainer.encoders import onnx
from soft_trainer.search import CodeIndex
from soft_trainer.search.measuring import judged
from soft_trainer.terminal import table

WAYS = ("torch", "float32", "int8")
CHUNKS = 300
QUERIES = 400


def encoder_of(way: str, encoder: str):
    """Opens the encoder."""
    from soft_trainer.encoders.text_encoder import open_encoder

    return open_encoder(encoder, light=way != "torch", int8=way == "int8")


def speed(way: str, encoder: str, folder: Path) -> dict:
    """Encodes chunks, and then one query in a new process that does nothing else."""
    texts = load_rows(folder)["valid"].corpus["code"][:CHUNKS]
    opened = encoder_of(way, encoder)
    opened.encode(texts[:16], "code")
    wall = time.perf_counter()
    cpu = time.process_time()
    opened.encode(texts, "code")
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    cost = {"chunks/s": CHUNKS / wall, "CPU ms a chunk": 1000 * cpu / CHUNKS}
    opening = f"open_encoder({encoder!r}, light={way != 'torch'}, int8={way == 'int8'})"
    code = f"from soft_trainer.encoders.text_encoder import open_encoder; {opening}.encode(['parse a date'], 'query')"
    before = os.times()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    after = os.times()
    assert status == 0, "the query failed"
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return cost | {"CPU s of a query": used, "MiB of a query": usage.ru_maxrss / 1024}


def quality(way: str, encoder: str, folder: Path) -> dict:
    """Computes the MRR of valid's first queries over the whole corpus."""
    valid = load_rows(folder)["valid"]
    opened = encoder_of(way, encoder)
    codes = opened.encode(texts_of(valid.corpus, "code_tokens"), "code")
    scores = opened.encode(texts_of(valid.queries, "docstring_tokens")[:QUERIES], "query") @ codes.T
    right = valid.judgments.first_codes()[:QUERIES]
    own = scores[np.arange(len(scores)), right]
    return {"queries": len(scores), "codes": len(codes), "MRR": float((1 / (scores >= own[:, None]).sum(1)).mean())}


def texts_of(rows, column: str) -> list[str]:
    """Returns texts of which only the tokens count."""
    return [" ".join(tokens) for tokens in rows[column]]


def judge(way: str, encoder: str, trees: Path, queries: Path) -> dict:
    """Computes the nDCG@10 of a search by words and meaning, over all judged queries."""
    onnx.LEAST_COSINE = {"torch": 2, "float32": 2, "int8": -1}[way]  # the weights are chosen here, not by a sample
    outcomes = []
    by_repository: dict[str, list] = {}
    for query in judged.read_queries(queries):
        by_repository.setdefault(query.tree, []).append(query)
    for repository, own in by_repository.items():
        with tempfile.TemporaryDirectory() as scratch:
            index = CodeIndex.build(trees / repository, scratch, encoder)
            outcomes += judged.ask(index, own, lexical=False)
    ndcg = np.mean([outcome.measures.ndcg for outcome in outcomes])
    return {"queries": len(outcomes), "nDCG@10": float(ndcg)}


def main() -> None:
    """Measures each way in a separate process, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "quality", "judged"))
    parser.add_argument("encoder")
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--queries", type=Path)
    parser.add_argument("--one", choices=WAYS, help="measure this way, and print it as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        measure = {"speed": speed, "quality": quality, "judged": partial(judge, queries=arguments.queries)}
        measured = measure[arguments.what](arguments.one, arguments.encoder, arguments.data_dir)
        print(json.dumps(measured))
        return
    rows = []
    for way in WAYS if arguments.what == "speed" else WAYS[1:]:  # float32 gives torch's embeddings
        words = [sys.executable, __file__, *sys.argv[1:], "--one", way]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        rows.append([way, *measured.values()])
    print(table(["run by", *measured], rows, floats=".4g"))


if __name__ == "__main__":
    main()
