"""Compares ways to score a batch of queries against each other with BM25: ours, rank_bm25, bm25s and nested loops.

    python benchmarks/bm25.py --data_dir DIR [--batch_sizes 32,64,256,1024] [--repetitions 7] [--loop_up_to 256]

Each implementation scores all pairs of queries in a random batch, in turn, with k1 1.2, b 0.75 and statistics of the
batch alone. Ours counts the tokens of all rows once ("fit"). rank_bm25 and bm25s build a new index for each batch,
as a training step would. A time is the mean over three batches; the table shows the median and range over the
repetitions. "difference" is the largest difference from our scores, with the same idf. bm25s has no such figure,
because it uses another idf and float32. It is skipped if it is not installed.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
from measuring import draw, machine, numbers, parser_of, ratios, seconds, set_up, spread, turns
from rank_bm25 import BM25Okapi

from soft_trainer import BM25Estimator
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.split import Split
from soft_trainer.terminal import table

K1, B = 1.2, 0.75
DRAWS = 3  # batches timed together


def rank_bm25(queries: list[list[str]]) -> np.ndarray:
    """Returns scores [N, N] by the package rank_bm25."""
    index = BM25Okapi(queries, k1=K1, b=B)
    return np.stack([index.get_scores(query) for query in queries])


def bm25s(queries: list[list[str]]) -> np.ndarray:
    """Returns scores [N, N] by the package bm25s."""
    import bm25s as package

    index = package.BM25(k1=K1, b=B, method="robertson")
    index.index(queries, show_progress=False)
    return np.stack([index.get_scores(query) for query in queries])


def nested_loops(queries: list[list[str]]) -> np.ndarray:
    """Returns scores [N, N], token by token. idf = ln((N - n + 0.5) / (n + 0.5)) is negative where n > N / 2."""
    having = Counter(token for query in queries for token in set(query))
    average = sum(map(len, queries)) / len(queries)
    scores = np.zeros((len(queries), len(queries)))
    for row, query in enumerate(queries):
        for column, document in enumerate(queries):
            score, norm = 0.0, K1 * (1 - B + B * len(document) / average)
            for token in query:
                idf = math.log((len(queries) - having[token] + 0.5) / (having[token] + 0.5))
                count = document.count(token)
                score += idf * count * (K1 + 1) / (count + norm)
            scores[row, column] = score
    return scores


PEERS = {"rank_bm25": rank_bm25, "bm25s": bm25s, "nested loops": nested_loops}
SAME_IDF = {"rank_bm25": "okapi", "nested loops": "robertson"}


def in_turn(call: Callable, batches: list) -> None:
    """Makes one call for each batch."""
    for batch in batches:
        call(batch)


def measure(estimators: dict[str, BM25Estimator], tokens: list, batches: list, peers: dict) -> list[list]:
    """Returns the table's rows for one batch size."""
    calls: dict[str, Callable] = {"ours": lambda rows: estimators["okapi"].similarity(rows, rows)}
    calls |= {name: lambda rows, peer=peer: peer([tokens[row] for row in rows]) for name, peer in peers.items()}
    rows = batches[0][0]
    scores = {name: call(rows) for name, call in calls.items()}
    differences = {
        name: np.abs(scores[name] - estimators[idf].similarity(rows, rows).numpy()).max()
        for name, idf in SAME_IDF.items()
        if name in calls
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repetition, name in turns(list(calls), len(batches)):
        call = partial(in_turn, calls[name], batches[repetition])
        taken[name].append(1e3 * seconds(call) / DRAWS)
    return [
        [
            len(rows),
            name,
            spread(times),
            spread(ratios(times, taken["ours"]), 1) if name != "ours" else None,
            f"up to {differences[name]:.1e}" if name in differences else None,
        ]
        for name, times in taken.items()
    ]


def main() -> None:
    """Measures every way at every batch size and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--batch_sizes", default="32,64,256,1024")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--loop_up_to", type=int, default=256, help="largest batch for the nested loops")
    arguments = parser.parse_args()
    set_up(arguments.threads)
    rows = load_folder(arguments.data_dir, ("train",))["train"]
    split = Split.from_pairs(rows)
    estimators = {idf: BM25Estimator(k1=K1, b=B, idf=idf) for idf in ("okapi", "robertson")}
    fit = seconds(lambda: estimators["okapi"].fit(split))
    estimators["robertson"].fit(split)
    tokens, generator, lines = rows["docstring_tokens"][:], np.random.default_rng(0), []
    for size in numbers(arguments.batch_sizes):
        batches = [[draw(len(rows), size, generator) for _ in range(DRAWS)] for _ in range(arguments.repetitions)]
        missing = {"bm25s"} if importlib.util.find_spec("bm25s") is None else set()
        missing |= {"nested loops"} if size > arguments.loop_up_to else set()
        lines += measure(estimators, tokens, batches, {name: PEERS[name] for name in PEERS if name not in missing})
    print(f"## BM25 similarity of a batch\n\n{machine()}, {arguments.repetitions} repetitions\n")
    print(table(["batch", "implementation", "ms", "times ours", "difference"], lines))
    print(f"\nThe fit, once for {len(rows):,} rows, takes {fit:.2f} s.")


if __name__ == "__main__":
    main()
