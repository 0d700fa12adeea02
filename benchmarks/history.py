"""Measures what a repository's history teaches an encoder, with later commits as queries (docs/history.md).

    python benchmarks/history.py run REPOSITORY --name trl --language python --model MODEL --work DIR --seed 1
    python benchmarks/history.py collect DIR
    python benchmarks/history.py table

`run` mines the repository into DIR/NAME once, trains with each of --methods, and writes the reciprocal rank of every
query to DIR/NAME/METHOD-SEED.json. Existing results are not computed again. `collect` writes the ranks of all runs
to benchmarks/history.json. `table` reads that file and prints the tables of history.md: the mean over seeds for each
repository, and differences between systems with intervals over seeds and queries.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from measuring import machine

from soft_trainer import load_encoder, merge_encoders
from soft_trainer.cli.__main__ import run_command
from soft_trainer.estimators.bm25 import as_arrow, bm25_weights, count_terms, split_identifiers
from soft_trainer.evaluation.significance import difference_text
from soft_trainer.files import write_json, write_rows, write_text
from soft_trainer.mining.history import mine_history_to
from soft_trainer.studies.compare import PooledComparison, SetComparison
from soft_trainer.terminal import table

RANKS = Path(__file__).with_suffix(".json")
MAX_ROWS = {"history": 640, "documentation": 320}  # the newest pairs of commits; what two shared cores can train on
TRAINING = {
    "score_function": "cosine", "score_scale": 20, "query_length": 48, "code_length": 96,
    "estimator": "initial_model", "train_sampling_strategy": "similar", "weighting": "positive_aware",
    "false_negatives": "positives", "learning_rate": 6e-5, "num_train_epochs": 2, "warmup_steps": 0.1,
    "per_device_train_batch_size": 32, "use_cpu": "true", "do_train": "true", "eval_strategy": "no",
    "save_strategy": "no", "lexical": "false", "model_card": "false", "overwrite": "true", "report_to": "none",
}  # fmt: skip
METHODS = ("before", "commits", "documentation", "both")
# Shown as differences: name, system, the system that it is compared with.
COMPARED = [
    ("commits, alone", "commits", "before"),
    ("documentation, alone", "documentation", "before"),
    ("both, alone", "both", "before"),
    ("commits x 0.5, alone", "commits x 0.5", "before"),
    ("commits, with BM25", "commits + BM25", "before + BM25"),
    ("documentation, with BM25", "documentation + BM25", "before + BM25"),
    ("both, with BM25", "both + BM25", "before + BM25"),
    ("commits x 0.5, with BM25", "commits x 0.5 + BM25", "before + BM25"),
]


def read(path: Path) -> list[dict]:
    """The rows of a file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prepare(arguments: argparse.Namespace, folder: Path) -> Path:
    """Mines the repository into `folder/mined`, and writes each method's training rows to `folder`."""
    mined = folder / "mined"
    if not (mined / "relevance.jsonl.gz").exists():
        options = {"source_dir": arguments.repository, "num_workers": 1}
        counts = mine_history_to(arguments.repository, arguments.language, mined, **options).commits
        write_json(folder / "counts.json", counts)
    rows = read(mined / "train.jsonl.gz")
    parts = {source: [row for row in rows if row["source"] == source][:most] for source, most in MAX_ROWS.items()}
    parts = {"commits": parts["history"], "documentation": parts["documentation"]}
    parts["both"] = parts["commits"] + parts["documentation"]
    for name, part in parts.items():
        write_rows({"train": part}, folder / name)
    write_json(folder / "rows.json", {name: len(part) for name, part in parts.items()})
    return mined


def train(arguments: argparse.Namespace, folder: Path, method: str) -> Path:
    """Trains on the rows of a method, and returns the encoder's folder."""
    output = folder / f"{method}-{arguments.seed}"
    if not (output / "model.safetensors").exists():
        given = {"data_dir": folder / method, "language": arguments.language}
        given |= {"model_name_or_path": arguments.model, "output_dir": output, "seed": arguments.seed}
        given |= TRAINING | {"bf16": arguments.bf16}
        words = (word for name, value in given.items() for word in (f"--{name}", str(value)))
        run_command(["train", *words])
        merge_encoders(arguments.model, [output], 0.5, f"{output}-merged")
    return output


def standardised(scores: np.ndarray) -> np.ndarray:
    """Scores of each query with mean 0 and deviation 1 over the corpus."""
    return (scores - scores.mean(1, keepdims=True)) / np.maximum(scores.std(1, keepdims=True), 1e-9)


def reciprocal(scores: np.ndarray, answers: list[set[int]]) -> list[float]:
    """1 / rank of each query's best answer. Ties with wrong functions count against it."""
    found = []
    for row, right in zip(scores, answers, strict=True):
        best = max(row[list(right)])
        wrong = np.delete(row, list(right))
        found.append(1 / (1 + int((wrong >= best).sum())))
    return found


def lexical(corpus: list[dict], queries: list[str]) -> np.ndarray:
    """BM25 of the words of a function's path, name and code, float64[Q, C]."""
    texts = ([row["path"], row["func_name"], *row["code_tokens"]] for row in corpus)
    sides = (texts, ([query] for query in queries))
    codes, counts = count_terms([as_arrow(map(split_identifiers, side)) for side in sides])
    return (counts @ bm25_weights(codes, "lucene").T).toarray()


def by_encoder(encoder_name: str | Path, corpus: list[dict], queries: list[str]) -> np.ndarray:
    """Cosines of queries and codes, float64[Q, C]."""
    settings = {name: TRAINING[name] for name in ("score_function", "score_scale", "query_length", "code_length")}
    encoder = load_encoder(str(encoder_name))
    encoder = replace(encoder, profile=encoder.profile.replace(**settings))
    codes = encoder.encode_codes([" ".join(row["code_tokens"]) for row in corpus])
    return encoder.score(encoder.encode_queries(queries), codes).double().numpy()


class Queries:
    """The test queries of a mined folder, with their answers in the corpus."""

    def __init__(self, mined: Path):
        self.corpus = read(mined / "codebase.jsonl.gz")
        place = {row["url"]: number for number, row in enumerate(self.corpus)}
        answers: dict[str, set[int]] = {}
        for judged in read(mined / "relevance.jsonl.gz"):
            answers.setdefault(judged["query"], set()).add(place[judged["url"]])
        self.texts, self.answers = list(answers), list(answers.values())
        earlier = (row for split in ("train", "valid") for row in read(mined / f"{split}.jsonl.gz"))
        changed = Counter(row["url"] for row in earlier if row["source"] == "history")
        self.frequency = np.array([[changed[row["url"]] for row in self.corpus]] * len(self.texts), float)
        self.words = lexical(self.corpus, self.texts)

    def ranks(self, systems: dict[str, np.ndarray]) -> dict[str, list[float]]:
        """Reciprocal ranks by system, of scores float64[Q, C]."""
        return {name: reciprocal(scores, self.answers) for name, scores in systems.items()}

    def ranks_of(self, name: str, encoder: str | Path) -> dict[str, list[float]]:
        """Reciprocal ranks of an encoder, alone and with BM25."""
        scores = by_encoder(encoder, self.corpus, self.texts)
        return self.ranks({name: scores, f"{name} + BM25": standardised(scores) + standardised(self.words)})


def run(arguments: argparse.Namespace) -> None:
    """One repository with one seed."""
    folder = Path(arguments.work) / arguments.name
    mined = prepare(arguments, folder)
    queries = Queries(mined)
    for method in arguments.methods.split(","):
        seed = 0 if method == "before" else arguments.seed
        results_file = folder / f"{method}-{seed}.json"
        if results_file.exists():
            continue
        if method == "before":
            ranks = queries.ranks({"functions by number of changes": queries.frequency, "BM25": queries.words})
            ranks |= queries.ranks_of(method, arguments.model)
        else:
            output = train(arguments, folder, method)
            ranks = queries.ranks_of(method, output) | queries.ranks_of(f"{method} x 0.5", f"{output}-merged")
        write_json(results_file, ranks)
        print(table(["system", "MRR"], [[name, float(np.mean(values))] for name, values in ranks.items()]), flush=True)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(machine(), f"{sum(each.ru_utime + each.ru_stime for each in usage):.0f} s of CPU time")


def collect(arguments: argparse.Namespace) -> None:
    """Writes the ranks of every query by repository and system, one list for each seed."""
    found: dict[str, dict[str, list]] = {}
    for path in sorted(Path(arguments.work).glob("*/*-[0-9].json")):
        for system, values in json.loads(path.read_text()).items():
            found.setdefault(path.parent.name, {}).setdefault(system, []).append(
                [round(1 / value) for value in values]
            )
    write_text(RANKS, json.dumps(found) + "\n")


def difference(found: dict[str, dict[str, np.ndarray]], system: str, other: str) -> dict[str, str]:
    """The difference of two systems in every repository that has both, and over all of them."""
    sets = []
    for name, own in found.items():
        if system in own and other in own:
            sides = np.broadcast_arrays(own[system], own[other])
            sets.append(SetComparison(name, tuple(sides)))
    whole = PooledComparison(tuple(sets))
    cells = {each.name: difference_text(float(each.differences.mean()), whole.interval([each])) for each in sets}
    return cells | {"all": difference_text(float(np.subtract(*whole.means)), whole.interval())} if sets else {}


def show(_: argparse.Namespace) -> None:
    """Prints the tables of the page, and how many seeds each row has."""
    found = {
        name: {system: 1 / np.array(seeds) for system, seeds in own.items()}
        for name, own in json.loads(RANKS.read_text()).items()
    }
    names = list(found)
    queries = {name: own["BM25"].shape[1] for name, own in found.items()}
    systems = dict.fromkeys(system for own in found.values() for system in own)
    means = [
        [
            system,
            min(len(own[system]) for own in found.values() if system in own),
            *(float(own[system].mean()) if system in own else None for own in found.values()),
        ]
        for system in systems
    ]
    print(table(["MRR", "seeds", *(f"{name}, {count} queries" for name, count in queries.items())], means), "\n")
    lines = []
    for title, system, other in COMPARED:
        cells = difference(found, system, other)
        lines.append([title, *(cells.get(name) for name in [*names, "all"])])
    print(table(["difference", *names, "all"], lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("repository")
    for option in ("name", "language", "model", "work"):
        one.add_argument(f"--{option}", required=True)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--bf16", choices=("true", "false"), default="true", help="false where bfloat16 is emulated")
    one.add_argument("--methods", default=",".join(METHODS), help="by comma (default: all)")
    one.set_defaults(run=run)
    collected = commands.add_parser("collect")
    collected.add_argument("work")
    collected.set_defaults(run=collect)
    commands.add_parser("table").set_defaults(run=show)
    parsed = parser.parse_args()
    parsed.run(parsed)
