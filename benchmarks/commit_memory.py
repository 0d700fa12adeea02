"""Measures what commit memory adds to a search, with later commits as queries (docs/commit_memory.md).

    python benchmarks/commit_memory.py prepare DIR REPOSITORY...
    python benchmarks/commit_memory.py run DIR REPOSITORY... [--model MODEL]
    python benchmarks/commit_memory.py collect DIR
    python benchmarks/commit_memory.py table
    python benchmarks/commit_memory.py controls DIR REPOSITORY...

REPOSITORY is a bare clone in a folder named like an entry of the lists below (`owner+name`). `prepare` mines and
indexes the repository in DIR/NAME. `run` does this too, searches for every query, and writes the ranks to
DIR/NAME/found.json. Existing results are not computed again. `collect` writes names, commit ids, weights and ranks
(0: not found) to benchmarks/commit_memory.jsonl, and `table` prints the tables of the page from that file.

`controls` searches for the same queries by words, with other votes than those of the most similar subjects:
functions shuffled among the commits, how recently a function changed, how often it changed, and memory combined with
recency.
"""

from __future__ import annotations

import argparse
import json
import resource
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from soft_trainer.evaluation.significance import Interval, difference_text, paired_bootstrap
from soft_trainer.files import write_json, write_text
from soft_trainer.mining.history import MinedHistory
from soft_trainer.search.code_index import CodeIndex
from soft_trainer.search.commits.memory import CommitMemory
from soft_trainer.search.index.store import Segments
from soft_trainer.search.measuring import judged, verdict
from soft_trainer.search.measuring.verdict import MEMORY, WORDS
from soft_trainer.search.ranking import ranking
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
CONTROLLED = {
    "psf+requests": "python",
    "psf+black": "python",
    "pylint-dev+pylint": "python",
    "pallets+flask": "python",
    "pydata+xarray": "python",
}
LANGUAGES = CHOSEN_ON | REPORTED | CONTROLLED
HALF_LIFE = {"alone": 100, "beside": 300}  # commits, for recency alone and beside memory
CONTROL_WEIGHT = 0.3  # of recency and popularity
POPULARITY = "popularity"
BESIDE = "memory + recency"


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
    found |= {"queries": len(queries), "cut": mined.cut, "chunks": counts["chunks"], "commits": counts["commits"]}
    for level in ("files", "functions"):
        for system, levels in measured.items():
            ranks = [round(1 / one.mrr) if one.mrr else 0 for one in levels[level]]
            recall = [round(one.recall, 3) for one in levels[level]]
            found.setdefault(level, {})[system] = {"ranks": ranks, "recall@10": recall}
    write_json(place, found)


class Shuffled(CommitMemory):
    """The memory of a repository whose commits each changed what another one changed."""

    def __init__(self, database: sqlite3.Connection, segments: Segments):
        super().__init__(database, segments)
        others = np.random.default_rng(0).permutation(self.numbers)
        self.other = dict(zip(self.numbers.tolist(), others.tolist(), strict=True))

    def functions(self, number: int) -> list[list[int]]:
        """Returns the chunks of the functions that another commit changed."""
        return super().functions(self.other[number])


def control_votes(memory: CommitMemory, shuffled: CommitMemory) -> dict[str, Callable[[ranking.Query], np.ndarray]]:
    """Returns a function for each system that gives each chunk's weighted votes for a query, float32[chunks]."""
    age = np.full(memory.number_of_chunks, np.inf)
    changes = np.zeros(memory.number_of_chunks)
    for commits_ago, number in enumerate(memory.numbers[::-1].tolist()):
        changed = sorted(set().union(*memory.functions(number)))
        age[changed] = np.minimum(age[changed], commits_ago)
        changes[changed] += 1
    recency = {name: CONTROL_WEIGHT * 0.5 ** (age / commits) for name, commits in HALF_LIFE.items()}
    popularity = CONTROL_WEIGHT * np.log1p(changes) / max(np.log1p(changes).max(), 1e-9)
    weight = memory.weight
    return {
        WORDS: lambda query: np.zeros(memory.number_of_chunks),
        MEMORY: lambda query: weight * memory.votes(query).shares,
        "shuffled": lambda query: weight * shuffled.votes(query).shares,
        "recency": lambda query: recency["alone"],
        POPULARITY: lambda query: popularity,
        BESIDE: lambda query: weight * memory.votes(query).shares + recency["beside"],
    }


def controls(repository: Path, folder: Path) -> dict[str, np.ndarray]:
    """Returns the reciprocal ranks of functions for each system of `control_votes`."""
    queries, mined = prepare(repository, folder)
    measured = {}
    with CodeIndex.open(folder / "index") as index, index.snapshot() as snapshot:
        segments = snapshot.segments
        systems = control_votes(snapshot.memory, Shuffled(index.database, segments))
        for name, votes in systems.items():

            def search(text: str, votes: Callable = votes) -> list[judged.Place]:
                query = ranking.parse_query(text)
                scores = ranking.with_votes(ranking.score(query, segments), segments, np.float32(votes(query)))
                chunks = ranking.order_chunks(scores, segments, None, judged.DEPTH)
                results = [snapshot.result(chunk) for chunk, _ in chunks]
                return [judged.Place(result.path, result.start_line, result.end_line) for result in results]

            found = judged.score_search(queries, mined, search)["functions"]
            measured[name] = np.array([one.mrr for one in found])
    return measured


def show_controls(measured: dict[str, dict[str, np.ndarray]]) -> str:
    """Writes the table of the controls: MRR for each repository, their mean, and the difference of the means."""
    names = list(next(iter(measured.values())))
    rows = []
    for repository, own in measured.items():
        rows.append([repository.replace("+", "/"), len(own[WORDS]), *(own[name].mean() for name in names)])
    rows.append(["mean", sum(row[1] for row in rows), *np.mean([row[2:] for row in rows], axis=0)])
    lines = [table(["repository", "queries", *names], rows, floats=".3f"), ""]
    for name, other in [(name, WORDS) for name in names[1:]] + [(MEMORY, "recency"), (BESIDE, MEMORY)]:
        low, high = mean_interval([own[name] - own[other] for own in measured.values()])
        mean = np.mean([(own[name] - own[other]).mean() for own in measured.values()])
        lines.append(f"{name} against {other}: {difference_text(mean, Interval(low, high), digits=3)}")
    return "\n".join(lines)


def mean_interval(deltas: list[np.ndarray]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of repositories. A resample draws the queries of each."""
    generator = np.random.default_rng(0)
    drawn = [[generator.choice(own, len(own)).mean() for own in deltas] for _ in range(10_000)]
    return tuple(np.percentile(np.mean(drawn, axis=1), [2.5, 97.5]))


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
        strata.append(delta)
        interval = paired_bootstrap(delta)
        means = [reciprocal_ranks(found, level, one).mean() for one in (other, system)]
        kept = found["commits"]["kept"]
        weight = found["commits"]["measured"]["weight"]
        span = f"{interval.low:+.3f} to {interval.high:+.3f}"
        rows.append([name.replace("+", "/"), LANGUAGES[name], kept, len(delta), weight, *means, delta.mean(), span])
    low, high = mean_interval(strata)  # every repository counts the same
    means = np.mean([row[5:8] for row in rows], axis=0)
    rows.append(["mean", "", "", sum(row[3] for row in rows), "", *means, f"{low:+.3f} to {high:+.3f}"])
    headers = ["repository", "language", "commits", "queries", "weight", other, system, "difference", "95 % interval"]
    return table(headers, rows, floats=".3f")


def main() -> None:
    """Runs, collects, or prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "run", "controls"):
        runs = commands.add_parser(name)
        runs.add_argument("work", type=Path)
        runs.add_argument("repositories", nargs="+", type=Path)
        if name == "run":
            runs.add_argument("--model")
    collects = commands.add_parser("collect")
    collects.add_argument("work", type=Path)
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command in ("prepare", "run", "controls"):
        controlled = {}
        for repository in arguments.repositories:
            name = repository.parent.name if repository.name == "repo" else repository.name
            folder = arguments.work / name
            folder.mkdir(parents=True, exist_ok=True)
            if arguments.command == "prepare":
                prepare(repository, folder)
            elif arguments.command == "controls":
                controlled[name] = controls(repository, folder)
            else:
                run(repository, folder, arguments.model)
            used = sum(resource.getrusage(who)[0] for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            sys.stderr.write(f"{name}: done, {used:.0f} CPU s so far\n")
        if controlled:
            sys.stdout.write(f"{show_controls(controlled)}\n")
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
