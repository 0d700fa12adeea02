"""Measures the functions a second, on one core, of data flow and of GraphCodeBERT's input.

    python benchmarks/dataflow.py --data_dir DIR [--max_rows 2000] [--tokenizer microsoft/graphcodebert-base]

DIR holds one folder a language in GraphCodeBERT's layout (`DIR/ruby/train.jsonl.gz`). Without `--tokenizer` one is
trained on the rows. The seconds are processor time of this process, so other work on the machine matters less.
"""

import argparse
import gzip
import json
import os
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoTokenizer

from soft_trainer.dataflow import DATA_FLOW_LANGUAGES, extract_data_flow
from soft_trainer.dataflow.inputs import graph_features, pad_graph_features
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.encoders.scratch import train_tokenizer

BATCH = 32


def read_functions(path: Path, max_rows: int) -> list[str]:
    """The source of the first rows of a file of JSON lines."""
    with gzip.open(path, "rt") as lines:
        return [json.loads(line)["original_string"] for line, _ in zip(lines, range(max_rows), strict=False)]


def timed(work, items: list) -> tuple[float, float]:
    """The items a second of `work(item)`, and the milliseconds of the slowest item."""
    times = []
    for item in items:
        start = time.process_time()
        work(item)
        times.append(time.process_time() - start)
    return len(items) / sum(times), 1e3 * max(times)


def measure(language: str, functions: list[str], tokenizer) -> tuple:
    """A row of the table."""
    flow, slowest = timed(lambda code: extract_data_flow(code, language), functions)
    rows = []
    features, _ = timed(lambda code: rows.append(graph_features(code, language, tokenizer)), functions)
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    padding, _ = timed(lambda batch: pad_graph_features(batch, tokenizer.pad_token_id), batches)
    nodes = sum(len(row["node_starts"]) for row in rows)
    code = sum(len(row["input_ids"]) for row in rows) - nodes
    return language, len(rows), code / len(rows), nodes / len(rows), flow, slowest, features, padding * BATCH


def main() -> None:
    """Measures every language and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help="one folder a language")
    parser.add_argument("--split", default="train", help="file of each folder")
    parser.add_argument("--max_rows", type=int, default=2000, help="functions a language")
    parser.add_argument("--tokenizer", help="folder or Hub name of a RoBERTa's tokenizer")
    arguments = parser.parse_args()

    print("| language | functions | code tokens | nodes | data flow/s | slowest, ms | input/s | padded, masked/s |")
    print("|---|---|---|---|---|---|---|---|")
    for language in DATA_FLOW_LANGUAGES:
        functions = read_functions(arguments.data_dir / language / f"{arguments.split}.jsonl.gz", arguments.max_rows)
        if arguments.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        else:
            tokenizer = train_tokenizer(functions, PROFILES["graphcodebert"])
        row = measure(language, functions, tokenizer)
        print("| " + " | ".join(value if isinstance(value, str) else f"{value:.0f}" for value in row) + " |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
