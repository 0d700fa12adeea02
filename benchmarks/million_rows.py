"""Measures the work before the first training step, stage by stage, for up to a million rows.

    python benchmarks/million_rows.py --folder DIR [--rows 100000,300000,1000000] [--stages load,tokenise_codes]

The rows are random words with Zipf's frequencies: 12 words in a query and 80 in a code. These are about 30 and 120
tokens of a tokenizer trained on the rows. One query and one code in ten repeat an earlier one.

Every stage runs in a separate process. The table has wall seconds, CPU seconds of the stage with its child
processes, and the peak memory of the process. `slope` is the exponent by which the CPU seconds grow from the
smallest to the largest number of rows; 1 is linear. "encode_batch_fast" is the time that the package `tokenizers`
alone takes for the texts, in memory, on all cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from soft_trainer.terminal import table

WORDS, QUERY_WORDS, CODE_WORDS = 50_000, 12, 80
WIDTH, NEIGHBOURS, BATCH = 384, 32, 32


def make_rows(folder: Path, rows: int) -> None:
    """Writes train.jsonl and a tokenizer, unless they are there."""
    from soft_trainer.encoders.profiles import EncoderProfile
    from soft_trainer.encoders.scratch import train_tokenizer

    path = folder / "train.jsonl"
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(letters[generator.geometric(0.12, size) % 26]) for size in generator.integers(2, 10, WORDS)]
    joined = generator.random(WORDS) < 0.3
    words = np.array([f"{word}_{words[n // 2]}" if joined[n] else word for n, word in enumerate(words)])
    chances = 1 / np.arange(1, WORDS + 1)
    chances = np.cumsum(chances / chances.sum())
    earlier: dict[str, list] = {"docstring_tokens": [], "code_tokens": []}
    with open(path.with_suffix(".tmp"), "w") as file:
        for row in range(rows):
            values = {"url": f"https://example.org/{row}"}
            for name, size in (("docstring_tokens", QUERY_WORDS), ("code_tokens", CODE_WORDS)):
                known = earlier[name]
                if known and generator.random() < 0.1:
                    values[name] = known[int(generator.integers(len(known)))]
                    continue
                values[name] = words[np.searchsorted(chances, generator.random(size))].tolist()
                if len(known) < 10_000:
                    known.append(values[name])
            file.write(json.dumps(values) + "\n")
    lines = [json.loads(line) for _, line in zip(range(5000), open(path.with_suffix(".tmp")), strict=False)]
    texts = (" ".join(line[name]) for line in lines for name in earlier)
    train_tokenizer(texts, EncoderProfile()).save_pretrained(folder)
    os.replace(path.with_suffix(".tmp"), path)


def load(folder: Path):
    from soft_trainer.data.layouts.tables import read_file

    return read_file(folder / "train.jsonl")


def _load(folder: Path) -> Callable:
    from soft_trainer.data.layouts.tables import read_file  # the import does not count

    return lambda: read_file(folder / "train.jsonl")


def _tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _tokenise(side: str) -> Callable:
    def stage(folder: Path) -> Callable:
        """Loads what the stage reads, and returns the work to measure."""
        from soft_trainer.data.tokens import token_column
        from soft_trainer.encoders.profiles import EncoderProfile

        rows, tokenizer = load(folder), _tokenizer(folder)
        return lambda: token_column(rows, side, EncoderProfile(), tokenizer)

    return stage


def _library(side: str) -> Callable:
    def stage(folder: Path) -> Callable:
        """Loads what the stage reads, and returns the work to measure."""
        from soft_trainer.data.tokens import row_texts

        texts = list(row_texts(load(folder), f"{side}_tokens"))
        backend = _tokenizer(folder).backend_tokenizer
        return lambda: [len(backend.encode_batch_fast(texts[n : n + 1000])) for n in range(0, len(texts), 1000)]

    return stage


def _text_ids(folder: Path) -> Callable:
    from soft_trainer.data.split import Split
    from soft_trainer.encoders.profiles import EncoderProfile
    from soft_trainer.training.batches import relevant_codes

    rows = load(folder)
    return lambda: relevant_codes(Split.from_pairs(rows), EncoderProfile())


def _bm25(document_column: str | None = None, neighbours: bool = False) -> Callable:
    def stage(folder: Path) -> Callable:
        """Loads what the stage reads, and returns the work to measure."""
        from soft_trainer.data.split import Split
        from soft_trainer.estimators.bm25 import BM25Estimator
        from soft_trainer.estimators.neighbours import Excluded

        split = Split.from_pairs(load(folder))
        estimator = BM25Estimator(document_column=document_column, cache_dir=None)
        if not neighbours:
            return lambda: estimator.fit(split)
        estimator.fit(split)
        return lambda: estimator.neighbours(NEIGHBOURS, Excluded(split.judgments.first_codes()))

    return stage


def _batches(strategy: str) -> Callable:
    def stage(folder: Path) -> Callable:
        """Loads what the stage reads, and returns the work to measure."""
        from soft_trainer.data.split import Split
        from soft_trainer.encoders.profiles import EncoderProfile
        from soft_trainer.training.batches import relevant_codes
        from soft_trainer.training.sampler import GlobalBatchSampler

        rows = load(folder)
        split = Split.from_pairs(rows)
        answers = relevant_codes(split, EncoderProfile())
        ids = (answers.query_texts, answers.code_texts)
        near = np.random.default_rng(0).integers(0, len(rows), (len(rows), NEIGHBOURS))
        similar = {"pairs": split.judgments.pairs(), "neighbours": near}
        sampler = GlobalBatchSampler(len(rows), BATCH, strategy, text_ids=ids, similar=similar)
        return lambda: sum(map(len, sampler))

    return stage


def _vectors(folder: Path) -> Callable:
    """Queries and codes in topics of topics, in about 50 of 384 dimensions, as encoders give them."""
    from soft_trainer.estimators.neighbours import Excluded, nearest_rows

    with open(folder / "train.jsonl") as lines:
        rows = sum(1 for _ in lines)
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32)

    basis = normal(48, WIDTH) / np.arange(1, 49, dtype=np.float32)[:, None] ** 0.5
    topics = normal(max(rows // 200, 4), 48)
    kinds = topics[generator.integers(0, len(topics), rows // 10)] + 0.8 * normal(rows // 10, 48)
    kind, sides = generator.integers(0, len(kinds), rows), []
    own = 0.5 * normal(rows, 48)
    for _ in range(2):
        side = np.empty((rows, WIDTH), np.float32)
        for start in range(0, rows, 1 << 16):
            part = slice(start, start + (1 << 16))
            values = (kinds[kind[part]] + own[part] + 0.3 * normal(len(kind[part]), 48)) @ basis
            values += 0.1 * normal(*values.shape)
            side[part] = values / np.linalg.norm(values, axis=1, keepdims=True)
        sides.append(side)
    return lambda: nearest_rows(*sides, NEIGHBOURS, Excluded(np.arange(rows)), exact_up_to=0)


# Name -> what prepares the stage and returns the call that is measured. They run in this order; the last two find the
# caches of those before them.
STAGES: dict[str, Callable[[Path], Callable]] = {
    "load": _load,
    "tokenise_queries": _tokenise("query"),
    "tokenise_codes": _tokenise("code"),
    "encode_batch_fast_queries": _library("docstring"),
    "encode_batch_fast_codes": _library("code"),
    "text_ids": _text_ids,
    "bm25_fit_queries": _bm25(),
    "bm25_fit_codes": _bm25("code_tokens"),
    "bm25_neighbours": _bm25(neighbours=True),
    "random_batches": _batches("random"),
    "no_duplicates_batches": _batches("no_duplicates"),
    "similar_batches": _batches("similar"),
    "vector_neighbours": _vectors,
    "load_again": _load,
    "tokenise_codes_again": _tokenise("code"),
}


def measure(stage: str, folder: Path) -> dict:
    """Runs a stage in this process."""
    call = STAGES[stage](folder)

    def cpu() -> float:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    start, cpu_start = time.perf_counter(), cpu()
    call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"wall": time.perf_counter() - start, "cpu": cpu() - cpu_start, "peak": peak / 2**20}


def in_new_process(stage: str, folder: Path) -> dict:
    """Runs a stage in a separate process, with its caches in the folder."""
    settings = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, __file__, "--folder", str(folder), "--stage", stage]
    done = subprocess.run(command, env=os.environ | settings, check=True, capture_output=True, text=True)
    sys.stderr.write("".join(f"{line}\n" for line in done.stderr.splitlines() if "recall" in line))
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures all stages for every number of rows, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for rows and caches; kept for the next time")
    parser.add_argument("--rows", default="100000,300000,1000000")
    parser.add_argument("--stages", default=",".join(STAGES), help="by comma")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        print(json.dumps(measure(arguments.stage, arguments.folder)))
        return
    sizes, found = [int(number) for number in arguments.rows.split(",")], {}
    for rows in sizes:
        folder = arguments.folder / str(rows)
        make_rows(folder, rows)
        for stage in arguments.stages.split(","):
            found[stage, rows] = in_new_process(stage, folder)
            sys.stderr.write(f"{rows:,} rows, {stage}: {found[stage, rows]}\n")
    lines = []
    for stage in arguments.stages.split(","):
        results = [found[stage, rows] for rows in sizes]
        cells = [f"{one['wall']:.1f} / {one['cpu']:.1f} s, {one['peak']:.1f} GiB" for one in results]
        growth = math.log(max(results[-1]["cpu"], 0.01) / max(results[0]["cpu"], 0.01))
        lines.append([stage, *cells, f"{growth / math.log(sizes[-1] / sizes[0]):.2f}" if len(sizes) > 1 else None])
    headers = ["stage", *(f"{rows:,} rows: clock / CPU, peak" for rows in sizes), "slope"]
    print(table(headers, lines))


if __name__ == "__main__":
    main()
