"""Compares ways to rank a corpus: ours, faiss, argsort as published, and the evaluator of sentence-transformers.

    python benchmarks/ranking.py [--queries 14918 --codes 43827 --dim 768] [--repeats 3] [--output FILE.md]

All methods get the same embeddings. Each measurement runs in a separate process; methods take turns, and the table
shows medians. A time covers the call; the peak covers the process with its libraries and the embeddings.

The methods differ in what they compute. faiss and the published script look at the first 1000 codes only. So does
the evaluator, which also computes other metrics than the MRR. Ours ranks every code, counts ties, and keeps the best
ten. faiss (`pip install faiss-cpu`) is skipped if it is not installed.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

DEPTH = 1000
ORDER = ("ours", "faiss", "argsort", "evaluator")
LABELS = {
    "ours": "`rank_codes`",
    "faiss": f"faiss `IndexFlatIP`, top {DEPTH}",
    "argsort": "NumPy argsort, as published",
    "evaluator": "`InformationRetrievalEvaluator`",
}


def make_embeddings(kind: str, queries: int, codes: int, dim: int) -> dict[str, np.ndarray]:
    """Makes normalised embeddings. `one-direction` lie near a common vector, as an encoder's do; 2 % are copies."""
    rng = np.random.default_rng(0)
    code = rng.standard_normal((codes, dim), dtype=np.float32)
    targets = rng.permutation(codes)[:queries] if queries <= codes else rng.integers(0, codes, queries)
    query = rng.standard_normal((queries, dim), dtype=np.float32)
    if kind == "one-direction":
        query += 0.2 * code[targets]
        code[: codes // 50] = code[codes // 50 : 2 * (codes // 50)]
        direction = 5 * rng.standard_normal(dim, dtype=np.float32)
        code, query = code + direction, query + direction
    for side in (code, query):
        side /= np.linalg.norm(side, axis=1, keepdims=True)
    return {"queries": query, "codes": code, "targets": targets}


def ours(queries, codes, targets):
    """Returns the call that is timed, as the functions below do. What a user prepares once is not timed."""
    import torch

    from soft_trainer.evaluation.ranking import rank_codes

    tensors = [torch.from_numpy(array) for array in (queries, codes, targets)]
    return lambda: rank_codes(*tensors).ranks.numpy()


def faiss(queries, codes, targets):
    """Searches a flat index."""
    import faiss

    index = faiss.IndexFlatIP(codes.shape[1])
    index.add(codes)
    return lambda: positions(index.search(queries, min(DEPTH, len(codes)))[1], targets)


def argsort(queries, codes, targets):
    """Sorts all scores, as the published script does."""
    return lambda: positions(np.argsort(queries @ codes.T, axis=-1)[:, ::-1][:, :DEPTH], targets)


def evaluator(queries, codes, targets):
    """Calls the evaluator of sentence-transformers on the embeddings."""
    import torch
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    class Encoded:
        """Stands in for a model that has encoded the queries."""

        def encode_query(self, texts, **_):
            return torch.from_numpy(queries)

    measure = InformationRetrievalEvaluator(
        {str(row): "" for row in range(len(queries))},
        {str(row): "" for row in range(len(codes))},
        {str(row): {str(target)} for row, target in enumerate(targets)},
        mrr_at_k=[DEPTH],
        map_at_k=[10],
        score_functions={"dot": util.dot_score},
    )
    return lambda: measure.compute_all_metrics(Encoded(), corpus_embeddings=torch.from_numpy(codes))


def positions(best: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the rank of each target among the best codes, 0 where it is missing."""
    hits = best == targets[:, None]
    return np.where(hits.any(1), hits.argmax(1) + 1, 0)


def measure(method: str, folder: Path) -> dict:
    """Runs one method in this process."""
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("queries", "codes", "targets")}
    call = globals()[method](**arrays)
    wall, cpu = time.perf_counter(), time.process_time()
    ranks = call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if isinstance(ranks, np.ndarray):
        np.save(folder / f"{method}.npy", ranks)
    return {"wall": wall, "cpu": cpu, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def wrong_ranks(method: str, folder: Path, sample: int) -> str:
    """Returns the share of wrong ranks in a sample, compared with float64 scores up to the depth."""
    if not (folder / f"{method}.npy").exists():
        return ""
    queries, codes, targets = (np.load(folder / f"{name}.npy") for name in ("queries", "codes", "targets"))
    rows = np.random.default_rng(1).permutation(len(queries))[:sample]
    codes, ranks, wrong = codes.astype(np.float64), np.load(folder / f"{method}.npy"), 0
    for part in np.array_split(rows, max(1, len(rows) // 50)):
        scores = queries[part].astype(np.float64) @ codes.T
        own = np.take_along_axis(scores, targets[part, None], 1)
        exact = (scores >= own - 1e-14).sum(1)  # copies of a code may differ in the last bit of a matrix product
        depth = len(codes) if method == "ours" else DEPTH
        wrong += (np.where(exact <= depth, exact, 0) != ranks[part]).sum()
    return f"{100 * wrong / len(rows):.1f} %"


def run(methods: list[str], arguments: argparse.Namespace, kind: str) -> list[str]:
    """Returns the table's rows for one kind of embeddings."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for array, values in make_embeddings(kind, arguments.queries, arguments.codes, arguments.dim).items():
            np.save(folder / f"{array}.npy", values)
        results = {method: [] for method in methods}
        environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "TQDM_DISABLE": "1"}
        for _ in range(arguments.repeats):
            for method in methods:
                command = [sys.executable, __file__, "--method", method, "--folder", name]
                output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
                results[method].append(json.loads(output.splitlines()[-1]))
        base = statistics.median(result["wall"] for result in results["ours"])
        return [row(kind, method, results[method], base, wrong_ranks(method, folder, 1000)) for method in methods]


def row(kind: str, method: str, results: list[dict], base: float, wrong: str) -> str:
    """Returns one line: medians, and the spread of the wall time."""
    walls = [result["wall"] for result in results]
    wall, cpu, peak = (statistics.median(result[name] for result in results) for name in ("wall", "cpu", "peak"))
    cells = [kind, LABELS[method], f"{wall / base:.2f}", f"{wall:.1f}", f"{min(walls):.1f}-{max(walls):.1f}"]
    return "| " + " | ".join([*cells, f"{cpu:.1f}", f"{peak:,.0f}", wrong]) + " |"


def main() -> None:
    """Measures the methods in turn, each in a separate process, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=14918)
    parser.add_argument("--codes", type=int, default=43827)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--methods", nargs="+", choices=ORDER, default=ORDER, help="ours is always measured")
    parser.add_argument("--kinds", nargs="+", choices=("random", "one-direction"), default=("random", "one-direction"))
    parser.add_argument("--note", default="", help="a remark for the reader, such as that the machine was busy")
    parser.add_argument("--output", type=Path, help="Markdown file to append the table to")
    parser.add_argument("--method", choices=ORDER, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        print(json.dumps(measure(arguments.method, arguments.folder)))
        return

    methods = [method for method in ORDER if method in {"ours", *arguments.methods}]
    if importlib.util.find_spec("faiss") is None:
        methods = [method for method in methods if method != "faiss"]
    title = (
        f"## Ranking {arguments.queries:,} queries x {arguments.codes:,} functions x {arguments.dim}\n\n"
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {arguments.threads} threads, "
        f"float32, median of {arguments.repeats}. {arguments.note}\n\n"
        "| embeddings | method | times ours | wall, s | spread, s | CPU, s | peak, MiB | ranks wrong |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    table = "\n".join([title, *(line for kind in arguments.kinds for line in run(methods, arguments, kind))])
    print(table)
    if arguments.output:
        with arguments.output.open("a") as file:
            file.write(f"\n{table}\n")


if __name__ == "__main__":
    main()
