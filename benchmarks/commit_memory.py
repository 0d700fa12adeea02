"""Measures what the memory of commits adds to a search, by the commits that came later (docs/commit_memory.md).

    python benchmarks/commit_memory.py prepare DIR REPOSITORY...
    python benchmarks/commit_memory.py run DIR REPOSITORY... [--model MODEL]
    python benchmarks/commit_memory.py collect DIR
    python benchmarks/commit_memory.py table

REPOSITORY is a bare clone whose folder has a name of the list below (`owner+name`). `prepare` mines and indexes it in
DIR/NAME; `run` does so too, and writes what was found for every query to DIR/NAME/found.json. What is there already is
not run again. `collect` writes names, commit ids, weights and ranks (0: not found) to benchmarks/commit_memory.jsonl,
and `table` prints the tables of the page.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from soft_trainer.evaluation.significance import paired_bootstrap
from soft_trainer.files import write_json, write_text
from soft_trainer.mining.history import MinedHistory
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.measuring import judged, verdict
from soft_trainer.search.measuring.verdict import MEMORY, WORDS
from soft_trainer.terminal import table

RESULTS = Path(__file__).with_suffix(".jsonl")
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
POPULARITY = "popularity"


def popular(mined: MinedHistory) -> verdict.Search:
    """Returns a function that ignores the query and lists the most frequently changed functions."""
    earlier = Counter(row["url"] for split in ("train", "valid") for row in mined.rows[split])
    ranked = [judged.Place(*mined.places[url]) for url, _ in earlier.most_common() if url in mined.places]
    return lambda query: ranked[: judged.DEPTH]


def prepare(repository: Path, folder: Path) -> tuple[list[judged.JudgedQuery], MinedHistory]:
    """Mines the repository, indexes the tree at the cut, and reads the commits before it; puts no query."""
    kept = folder / "mined.json"
    if not kept.exists():
        queries, mined = judged.history_queries(repository, LANGUAGES[folder.name], folder / "tree")
        earlier = {split: [{"url": row["url"]} for row in mined.rows[split]] for split in ("train", "valid")}
        asked = [[query.query, sorted(query.targets)] for query in queries]
        write_json(kept, {"queries": asked, "earlier": earlier, "cut": mined.cut, "places": mined.places})
    known = json.loads(kept.read_text())
    with CodeIndex.build(folder / "tree", folder / "index") as index:
        index.remember(repository=str(repository), tip=known["cut"])
    queries = [judged.JudgedQuery("", query, frozenset(urls)) for query, urls in known["queries"]]
    return queries, MinedHistory(known["earlier"], [], known["cut"], known["places"], Counter())


def run(repository: Path, folder: Path, model: str | None) -> None:
    """Measures one repository, and adds what is not measured yet to its file."""
    place = folder / "found.json"
    found = json.loads(place.read_text()) if place.exists() else {}
    name = Path(model).name if model else WORDS
    if name in found.get("functions", {}):
        return
    queries, mined = prepare(repository, folder)
    with CodeIndex.open(folder / "index") as index:
        if model:
            index.encode(model)
        searches = {
            name: verdict.search_of(index, lexical=not model, commits=False),
            f"{name} + memory": verdict.search_of(index, lexical=not model, commits=True),
        }
        if not model:
            searches[POPULARITY] = popular(mined)
        measured = {system: judged.score_search(queries, mined, search) for system, search in searches.items()}
        counts = index.statistics()
    found |= {"queries": len(queries), "cut": mined.cut, "pieces": counts["pieces"], "commits": counts["commits"]}
    for level in ("files", "functions"):
        for system, levels in measured.items():
            ranks = [round(1 / one.mrr) if one.mrr else 0 for one in levels[level]]
            recall = [round(one.recall, 3) for one in levels[level]]
            found.setdefault(level, {})[system] = {"ranks": ranks, "recall@10": recall}
    write_json(place, found)


def differences(found: dict, level: str, system: str, other: str) -> np.ndarray:
    """Returns the difference of two systems' reciprocal ranks for each query."""
    return reciprocal_ranks(found, level, system) - reciprocal_ranks(found, level, other)


def reciprocal_ranks(found: dict, level: str, system: str) -> np.ndarray:
    """Returns a system's reciprocal rank for each query, 0 where nothing right was found."""
    ranks = np.array(found[level][system]["ranks"], float)
    return np.divide(1, ranks, out=np.zeros(len(ranks)), where=ranks > 0)


def show(results: dict[str, dict], names: list[str], level: str, system: str, other: str) -> str:
    """Writes the table of one comparison: each repository, and their mean with its interval."""
    rows = []
    strata = []
    for name in names:
        found = results[name]
        delta = differences(found, level, system, other)
        strata.append([delta])
        interval = paired_bootstrap(delta)
        means = [reciprocal_ranks(found, level, one).mean() for one in (other, system)]
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
    for name in ("prepare", "run"):
        runs = commands.add_parser(name)
        runs.add_argument("work", type=Path)
        runs.add_argument("repositories", nargs="+", type=Path)
    runs.add_argument("--model")
    collects = commands.add_parser("collect")
    collects.add_argument("work", type=Path)
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command in ("prepare", "run"):
        for repository in arguments.repositories:
            name = repository.parent.name if repository.name == "repo" else repository.name
            folder = arguments.work / name
            folder.mkdir(parents=True, exist_ok=True)
            if arguments.command == "prepare":
                prepare(repository, folder)
            else:
                run(repository, folder, arguments.model)
            used = sum(resource.getrusage(who)[0] for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            sys.stdout.write(f"{name}: done, {used:.0f} CPU s so far\n")
            sys.stdout.flush()
    elif arguments.command == "collect":
        names = [name for name in LANGUAGES if (arguments.work / name / "found.json").exists()]
        rows = [json.dumps({name: json.loads((arguments.work / name / "found.json").read_text())}) for name in names]
        write_text(RESULTS, "".join(f"{row}\n" for row in rows))
    else:
        results: dict[str, dict] = {}
        for line in RESULTS.read_text().splitlines():
            results |= json.loads(line)
        for title, part in (("chosen on", CHOSEN_ON), ("reported", REPORTED)):
            names = [name for name in part if name in results]
            for level in ("functions", "files"):
                sys.stdout.write(f"\n{title}, {level}\n\n{show(results, names, level, MEMORY, WORDS)}\n")


if __name__ == "__main__":
    main()
