"""Measures what the memory of commits adds to a search, by the commits that came later (docs/commit_memory.md).

    python benchmarks/commit_memory.py run DIR REPOSITORY... [--model MODEL]
    python benchmarks/commit_memory.py collect DIR
    python benchmarks/commit_memory.py table

`run` takes bare clones whose folders have the names of the list below (`owner+name`), and writes what was found for
every query to DIR/NAME.json; what is there already is not run again. `collect` writes all of them to
benchmarks/commit_memory.json: names, commit ids, weights and reciprocal ranks. `table` prints the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np

from soft_trainer.files import write_json
from soft_trainer.search import evaluation, verdict
from soft_trainer.search.index import CodeIndex
from soft_trainer.search.verdict import MEMORY, POPULARITY, WORDS
from soft_trainer.studies.significance import paired_bootstrap
from soft_trainer.terminal import table

RESULTS = Path(__file__).with_suffix(".json")
# listed before any run
CHOSEN_ON = {
    "huggingface+trl": "python",
    "UKPLab+sentence-transformers": "python",
    "encode+httpx": "python",
    "pallets+click": "python",
    "junegunn+fzf": "go",
    "gin-gonic+gin": "go",
    "puma+puma": "ruby",
    "rack+rack": "ruby",
    "google+gson": "java",
    "Seldaek+monolog": "php",
    "mochajs+mocha": "javascript",
    "BurntSushi+ripgrep": "rust",
}
REPORTED = {
    "encode+starlette": "python",
    "tornadoweb+tornado": "python",
    "charmbracelet+bubbletea": "go",
    "urfave+cli": "go",
    "sinatra+sinatra": "ruby",
    "sidekiq+sidekiq": "ruby",
    "jhy+jsoup": "java",
    "mockito+mockito": "java",
    "nikic+PHP-Parser": "php",
    "twigphp+Twig": "php",
    "fastify+fastify": "javascript",
    "sharkdp+bat": "rust",
}
LANGUAGES = CHOSEN_ON | REPORTED


def run(repository: Path, work: Path, model: str | None) -> None:
    """Measures one repository, and adds what is not measured yet to its file."""
    name = repository.parent.name if repository.name == "repo" else repository.name
    place = work / f"{name}.json"
    found = json.loads(place.read_text()) if place.exists() else {}
    wanted = [f"{model.rsplit('/', 1)[-1]}{more}" for more in ("", " + memory")] if model else [WORDS]
    if all(system in found.get("functions", {}) for system in wanted):
        return
    with tempfile.TemporaryDirectory() as scratch:
        queries, mined = evaluation.history_queries(repository, LANGUAGES[name], f"{scratch}/tree")
        with CodeIndex.build(f"{scratch}/tree", f"{scratch}/index", model) as index:
            index.remember(repository=str(repository), tip=mined.cut)
            commits = index.statistics()["commits"]
            searches = {
                system: verdict.search_of(index, lexical=not model, commits=bool(place))
                for place, system in enumerate(wanted)
            }
            if not model:
                searches = {
                    WORDS: verdict.search_of(index, lexical=True, commits=False),
                    MEMORY: verdict.search_of(index, lexical=True, commits=True),
                    POPULARITY: verdict.popular(mined),
                }
            measured = {system: evaluation.measure(queries, mined, search) for system, search in searches.items()}
            pieces = index.statistics()["pieces"]
    found |= {"queries": len(queries), "cut": mined.cut, "pieces": pieces, "commits": commits}
    for level in ("files", "functions"):
        kept = found.setdefault(level, {})
        for system, levels in measured.items():
            ranks = [round(one.mrr, 6) for one in levels[level]]
            recall = [round(one.recall, 6) for one in levels[level]]
            kept[system] = {"reciprocal_ranks": ranks, "recall@10": recall}
    found["cpu seconds"] = sum(resource.getrusage(who)[0] for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    write_json(place, found)


def differences(found: dict, level: str, system: str, other: str) -> np.ndarray:
    """Returns the difference of two systems' reciprocal ranks for each query."""
    return np.subtract(found[level][system]["reciprocal_ranks"], found[level][other]["reciprocal_ranks"])


def show(results: dict[str, dict], names: list[str], level: str, system: str, other: str) -> str:
    """Writes the table of one comparison: each repository, and their mean with its interval."""
    rows = []
    strata = []
    for name in names:
        found = results[name]
        delta = differences(found, level, system, other)
        strata.append([delta])
        interval = paired_bootstrap(delta)
        means = [np.mean(found[level][one]["reciprocal_ranks"]) for one in (other, system)]
        kept = found["commits"]["kept"]
        weight = found["commits"]["measured"]["weight"]
        span = f"{interval.low:+.3f} to {interval.high:+.3f}"
        rows.append([name.replace("+", "/"), LANGUAGES[name], kept, len(delta), weight, *means, delta.mean(), span])
    # Every repository counts the same: a resample draws the queries of each.
    generator = np.random.default_rng(0)
    drawn = [[generator.choice(own[0], len(own[0])).mean() for own in strata] for _ in range(10_000)]
    low, high = np.percentile(np.mean(drawn, axis=1), [2.5, 97.5])
    means = np.mean([row[5:8] for row in rows], axis=0)
    rows.append(["mean", "", "", sum(row[3] for row in rows), "", *means, f"{low:+.3f} to {high:+.3f}"])
    headers = ["repository", "language", "commits", "queries", "weight", other, system, "difference", "95 % interval"]
    return table(headers, rows, floats=".3f")


def main() -> None:
    """Runs, collects, or prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("work", type=Path)
    runs.add_argument("repositories", nargs="+", type=Path)
    runs.add_argument("--model")
    collects = commands.add_parser("collect")
    collects.add_argument("work", type=Path)
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "run":
        arguments.work.mkdir(parents=True, exist_ok=True)
        for repository in arguments.repositories:
            run(repository, arguments.work, arguments.model)
            sys.stdout.write(f"{repository}: done\n")
            sys.stdout.flush()
    elif arguments.command == "collect":
        names = [name for name in LANGUAGES if (arguments.work / f"{name}.json").exists()]
        write_json(RESULTS, {name: json.loads((arguments.work / f"{name}.json").read_text()) for name in names})
    else:
        results = json.loads(RESULTS.read_text())
        for title, part in (("chosen on", CHOSEN_ON), ("reported", REPORTED)):
            names = [name for name in part if name in results]
            for level in ("functions", "files"):
                sys.stdout.write(f"\n{title}, {level}\n\n{show(results, names, level, MEMORY, WORDS)}\n")


if __name__ == "__main__":
    main()
