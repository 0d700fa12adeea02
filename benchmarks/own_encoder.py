"""Measures what an encoder trained on a repository's commits adds to its search (own_encoder.md).

    python benchmarks/own_encoder.py run DIR ENCODER REPOSITORY...
    python benchmarks/own_encoder.py collect DIR
    python benchmarks/own_encoder.py table

REPOSITORY is a bare clone in a folder named like an entry of the list below (`owner+name`). ENCODER is MiniLM's
folder. Finished steps in DIR are not repeated. `collect` writes the rank of every query (0: not found) and the CPU
seconds to benchmarks/own_encoder.jsonl, and `table` prints the page's tables. Run `run` with one thread
(OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from commit_memory import REPORTED, prepare, reciprocal_ranks

from soft_trainer.evaluation.significance import paired_bootstrap
from soft_trainer.files import write_json, write_text
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.measuring import judged, verdict
from soft_trainer.search.measuring.verdict import MEMORY, WORDS
from soft_trainer.terminal import table

RESULTS = Path(__file__).with_suffix(".jsonl")
REPOSITORIES = (
    "encode+starlette",
    "charmbracelet+bubbletea",
    "sinatra+sinatra",
    "jhy+jsoup",
    "nikic+PHP-Parser",
    "fastify+fastify",
)
SEEDS = (1, 2, 3)
UNTRAINED = f"{MEMORY} + MiniLM"
TRAINED = f"{MEMORY} + trained MiniLM"
PAIRS = 1000
LEVELS = ("functions", "files")


def timed(*words: str) -> float:
    """Runs a command of soft_trainer, and returns its CPU seconds."""
    before = os.times()
    program = Path(sys.executable).with_name("soft-trainer")
    subprocess.run([program, *words], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def train(repository: Path, language: str, encoder: str, folder: Path, seed: int) -> tuple[Path, float]:
    """Trains on the repository's commits unless that is done, and returns the encoder and its CPU seconds."""
    mined = folder / "mined"
    if not (mined / "train.jsonl.gz").exists():
        timed("mine", "--history", str(repository), "--language", language, "--output_dir", str(mined))
    output = folder / f"trained_{seed}"
    kept = folder / f"trained_{seed}.json"
    if not kept.exists():
        options = {
            "config": "hard_batches",
            "model_name_or_path": encoder,
            "data_dir": mined,
            "language": language,
            "false_negatives": "positives",
            "num_train_epochs": 2,
            "merge_ratio": 0.5,
            "query_length": 48,
            "code_length": 96,
            "max_train_rows": PAIRS,
            "bf16": "false",
            "seed": seed,
            "overwrite": "true",
            "output_dir": output,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        write_json(kept, {"CPU s": timed("train", *words)})
    return output, json.loads(kept.read_text())["CPU s"]


def add_encoder(index: CodeIndex, encoder: str) -> dict[str, float]:
    """Encodes the index, and returns the CPU seconds of that and of one search from the shell."""
    before = sum(os.times()[:4])
    index.encode(encoder)
    encoding = sum(os.times()[:4]) - before
    query = "retry when the connection is reset"
    searching = timed("search", "--index_dir", str(index.index_dir), "--no_update", query)
    return {"encode CPU s": encoding, "search CPU s": searching}


def run(repository: Path, name: str, encoder: str, folder: Path) -> None:
    """Measures one repository, and adds each finished system to its file."""
    place = folder / "found.json"
    found = json.loads(place.read_text()) if place.exists() else {"ranks": {}, "costs": {}}
    queries, mined = prepare(repository, folder)
    systems: dict[str, str | None] = {WORDS: None, MEMORY: None, UNTRAINED: encoder}
    systems |= {f"{TRAINED}, seed {seed}": None for seed in SEEDS}
    with CodeIndex.open(folder / "index") as index:
        for system in systems:
            if system in found["ranks"]:
                continue
            costs = {}
            if system.startswith(TRAINED):
                seed = int(system.rsplit(" ", 1)[1])
                trained, costs["train CPU s"] = train(repository, REPORTED[name], encoder, folder, seed)
                systems[system] = str(trained)
            if systems[system]:
                costs |= add_encoder(index, systems[system])
            search = verdict.search_of(index, lexical=not systems[system], commits=system != WORDS)
            measured = judged.score_search(queries, mined, search)
            ranks = {level: [round(1 / one.mrr) if one.mrr else 0 for one in measured[level]] for level in LEVELS}
            found["ranks"][system] = ranks
            found["costs"][system] = costs
            found |= {"chunks": index.statistics()["chunks"], "cut": mined.cut}
            write_json(place, found)
            sys.stdout.write(f"{name}, {system}: {costs}\n")
            sys.stdout.flush()


def values(found: dict, level: str, system: str) -> np.ndarray:
    """Returns each query's reciprocal rank, averaged over the seeds of a trained encoder."""
    names = [name for name in found["ranks"] if name == system or name.startswith(f"{system}, seed ")]
    ranks = {level: {name: {"ranks": found["ranks"][name][level]} for name in names}}
    return np.mean([reciprocal_ranks(ranks, level, name) for name in names], axis=0)


def mean_interval(deltas: list[np.ndarray]) -> str:
    """Returns the mean over the repositories, each of which counts the same, with its 95 % bootstrap interval."""
    generator = np.random.default_rng(0)
    drawn = [[generator.choice(own, len(own)).mean() for own in deltas] for _ in range(10_000)]
    low, high = np.percentile(np.mean(drawn, axis=1), [2.5, 97.5])
    return f"{np.mean([own.mean() for own in deltas]):+.3f} ({low:+.3f} to {high:+.3f})"


def show(results: dict[str, dict], level: str) -> str:
    """Writes the MRR of each system for each repository, and the differences of their means."""
    systems = (WORDS, MEMORY, UNTRAINED, TRAINED)
    rows = []
    for name, found in results.items():
        queries = len(found["ranks"][WORDS][level])
        means = [values(found, level, system).mean() for system in systems]
        gain = paired_bootstrap(values(found, level, TRAINED) - values(found, level, MEMORY))
        span = f"{means[3] - means[1]:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
        rows.append([name.partition("+")[2], queries, *means, span])
    means = np.mean([row[2:6] for row in rows], axis=0)
    pairs = ((TRAINED, MEMORY), (TRAINED, UNTRAINED), (UNTRAINED, MEMORY))
    spans = {}
    for system, other in pairs:
        deltas = [values(found, level, system) - values(found, level, other) for found in results.values()]
        spans[system, other] = mean_interval(deltas)
    rows.append(["mean", sum(row[1] for row in rows), *means, spans[TRAINED, MEMORY]])
    lines = [f"- {system} against {other}: {span}" for (system, other), span in spans.items()]
    return table(["", "queries", *systems, "trained against memory"], rows, floats=".3f") + "\n\n" + "\n".join(lines)


def costs(results: dict[str, dict]) -> str:
    """Writes the CPU seconds of each step, averaged over the seeds."""
    names = ("train CPU s", "encode CPU s", "search CPU s")
    rows = []
    for name, found in results.items():
        runs = [found["costs"][f"{TRAINED}, seed {seed}"] for seed in SEEDS]
        rows.append(
            [name.partition("+")[2], found["chunks"], *(np.mean([run[cost] for run in runs]) for cost in names)]
        )
    return table(["", "chunks", *names], rows, floats=".1f")


def main() -> None:
    """Runs, collects, or prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("work", type=Path)
    runs.add_argument("encoder")
    runs.add_argument("repositories", nargs="+", type=Path)
    collects = commands.add_parser("collect")
    collects.add_argument("work", type=Path)
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "run":
        for repository in arguments.repositories:
            name = repository.parent.name if repository.name == "repo" else repository.name
            folder = arguments.work / name
            folder.mkdir(parents=True, exist_ok=True)
            run(repository, name, arguments.encoder, folder)
    elif arguments.command == "collect":
        places = {name: arguments.work / name / "found.json" for name in REPOSITORIES}
        rows = [json.dumps({name: json.loads(place.read_text())}) for name, place in places.items() if place.exists()]
        write_text(RESULTS, "".join(f"{row}\n" for row in rows))
    else:
        results: dict[str, dict] = {}
        for line in RESULTS.read_text().splitlines():
            results |= json.loads(line)
        for level in LEVELS:
            sys.stdout.write(f"\nMRR of {level}\n\n{show(results, level)}\n")
        sys.stdout.write(f"\nCosts\n\n{costs(results)}\n")


if __name__ == "__main__":
    main()
