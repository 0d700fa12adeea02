"""Times the search of one tree: index, update, change check and queries. Compares with ripgrep and rank_bm25.

    python benchmarks/search.py --folder DIR [--model NAME] [--rank_bm25]

Times are wall times. Indexing and queries also have CPU seconds, for use on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

from soft_trainer.search import CodeIndex
from soft_trainer.search.index.words import WORD, terms

QUERIES = 60
SENTENCES = (
    "how are command line arguments parsed", "open a connection to a server", "where is the cache invalidated",
    "read a configuration file and return its settings", "convert a date to a string in ISO format",
    "retry a request after an error with a delay", "write rows to a CSV file", "handler", "parse_date", "HTTPServer",
)  # fmt: skip


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="tree to index; one of its files is touched for the update")
    parser.add_argument("--model", help="encoder for the second half of the table")
    parser.add_argument("--rank_bm25", action="store_true", help="rank_bm25 over blocks of 50 lines too")
    parser.add_argument("--index_dir", help="keep the index here and use it again")
    arguments = parser.parse_args()
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(arguments.index_dir or f"{scratch}/index")
        index = timed(rows, "index", lambda: CodeIndex.build(arguments.folder, path))
        counts = index.statistics()
        rows.append(("files, chunks", f"{counts['files']:,}, {counts['chunks']:,}"))
        rows.append(("bytes on disk a chunk", f"{counts['bytes'] / max(counts['chunks'], 1):,.0f}"))
        timed(rows, "change check, nothing changed", index.update)
        update_one(rows, index)
        rows.append(("query, lexical: p50, p95", latency(index, lexical=True)))
        rows.append(("ripgrep, the same words: p50, p95", ripgrep(arguments.folder)))
        rows.append(("whole command from cold, lexical", cold(path, "--lexical")))
        if arguments.rank_bm25:
            rows.append(("rank_bm25: index, p50", rank_bm25(arguments.folder, index)))
        if arguments.model:
            index = timed(
                rows, "index with embeddings", lambda: CodeIndex.build(arguments.folder, path, arguments.model)
            )
            rows.append(("query with embeddings: p50, p95", latency(index, lexical=False)))
            rows.append(("whole command from cold, with embeddings", cold(path)))
        rows.append(("peak memory, MiB", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f}"))
        print(tabulate(rows, ["", arguments.folder], "pipe", disable_numparse=True))


def timed(rows: list, name: str, call):
    """Returns the result of a call, and adds its seconds to the table."""
    start, cpu = time.perf_counter(), cpu_seconds()
    value = call()
    rows.append((f"{name}, s (CPU s)", f"{time.perf_counter() - start:.2f} ({cpu_seconds() - cpu:.2f})"))
    return value


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def update_one(rows: list, index: CodeIndex) -> None:
    """Changes one file, updates the index, and changes the file back."""
    name = index.database.execute("SELECT path FROM files WHERE language = 'python' LIMIT 1").fetchone()[0]
    path = Path(index.folder, name)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy2(path, scratch)
        try:
            path.write_text(path.read_text() + "\n\ndef added_by_the_benchmark():\n    return 1\n")
            timed(rows, "index again, one file changed", index.update)
        finally:
            shutil.copy2(Path(scratch, path.name), path)
    index.update()


def latency(index: CodeIndex, lexical: bool) -> str:
    """Measures queries to an open index: p50 and p95 of wall time, and p50 of CPU time, in ms."""
    index.search("warm up", lexical=lexical)
    taken, cpu = [], []
    for query in random.Random(0).choices(SENTENCES, k=QUERIES):
        start, begin = time.perf_counter(), time.process_time()
        index.search(query, lexical=lexical)
        taken.append(1000 * (time.perf_counter() - start))
        cpu.append(1000 * (time.process_time() - begin))
    return f"{percentiles(taken)} (CPU {percentiles(cpu)})"


def percentiles(taken: list[float]) -> str:
    """Formats p50 and p95."""
    taken = sorted(taken)
    return f"{taken[len(taken) // 2]:.1f} ms, {taken[int(0.95 * (len(taken) - 1))]:.1f} ms"


def ripgrep(folder: str) -> str:
    """Measures p50 and p95 of ripgrep for any word of a query."""
    if shutil.which("rg") is None:
        return "not installed"
    taken = []
    for query in SENTENCES:
        start = time.perf_counter()
        subprocess.run(["rg", "-c", "-i", "|".join(WORD.findall(query)), folder], stdout=subprocess.DEVNULL)
        taken.append(1000 * (time.perf_counter() - start))
    return percentiles(taken)


def cold(path: Path, *options: str) -> str:
    """Returns the shortest of three runs of the whole command, in seconds."""
    code = (
        "import argparse, sys; from soft_trainer.cli import search; p = argparse.ArgumentParser();"
        "search.add_arguments(p); search.run(p.parse_args(sys.argv[1:]))"
    )
    taken, cpu = [], []
    for _ in range(3):
        start, begin = time.perf_counter(), cpu_seconds()
        command = [sys.executable, "-c", code, "parse a date", "--index_dir", str(path), *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        taken.append(time.perf_counter() - start)
        cpu.append(cpu_seconds() - begin)
    return f"{min(taken):.2f} s (CPU {min(cpu):.2f} s)"


def rank_bm25(folder: str, index: CodeIndex) -> str:
    """Measures rank_bm25 over blocks of 50 lines: seconds to index, and ms per query."""
    from rank_bm25 import BM25Okapi

    paths = [row[0] for row in index.database.execute("SELECT path FROM files")]
    start = time.perf_counter()
    blocks = []
    for path in paths:
        lines = (index.text_of(path) or "").split("\n")
        blocks += ["\n".join(lines[first : first + 50]) for first in range(0, len(lines), 50)]
    model = BM25Okapi([[term for word in WORD.findall(block) for term in terms(word)] for block in blocks])
    taken = time.perf_counter() - start
    times = []
    for query in SENTENCES:
        begin = time.perf_counter()
        model.get_scores([term for word in WORD.findall(query) for term in terms(word)])
        times.append(1000 * (time.perf_counter() - begin))
    return f"{taken:.1f} s, {sorted(times)[len(times) // 2]:.0f} ms"


if __name__ == "__main__":
    main()
