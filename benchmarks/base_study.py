"""Chooses how `base` is trained, and measures it; `base_study.md` is the protocol.

    OMP_NUM_THREADS=1 python benchmarks/base_study.py run --data DIR --work WORK 'batch=512,rate=1e-3,seed=2' ...
    OMP_NUM_THREADS=1 python benchmarks/base_study.py measure --data DIR --work WORK ENCODER...
    OMP_NUM_THREADS=1 python benchmarks/base_study.py finetune --data DIR --work WORK --encoder DIR 'rate=1e-3' ...
    OMP_NUM_THREADS=1 python benchmarks/base_study.py search --repositories DIR --queries FILE words ENCODER...

WORK is the folder of `base_encoder.py rows`, with the folder `starts/NAME` for each start. `run` trains once for
each argument, which changes the default `Settings`, and appends the MRR of every valid set to `base_study.jsonl`.
`measure` prints the MRR of encoders (folders, `base` or `bm25`) on all sets, valid and test. `finetune` trains an
encoder further on other languages, and appends to `base_further.jsonl`. `search` searches judged repositories.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from base_encoder import LANGUAGES, Settings, TrainingRows, embed, lines_of, rows_for, trained
from measuring import set_up

from soft_trainer.data.term_counts import as_arrow, bm25_weights, count_terms, split_identifiers
from soft_trainer.encoders.text_encoder import open_encoder
from soft_trainer.search import CodeIndex

RESULTS = Path(__file__).with_suffix(".jsonl")
FURTHER = Path(__file__).with_name("base_further.jsonl")
RUN = ("language", "rows", "rate", "epochs", "seed")
UNSEEN = ("php", "go", "javascript")  # not in the rows of the encoder that is trained further
EIGHT = (*LANGUAGES, "csn-ruby", "stdlib")  # the sets of the mean that chooses
DISTRACTORS = 1000  # functions next to those that experts judged
CHUNKS = 60  # enough to name ten files


def ndcg(paths: list[str], targets: set[str]) -> float:
    """Computes nDCG@10 of a list of files, each named once. Every target has gain 1."""
    named = list(dict.fromkeys(paths))[:10]
    gain = sum(1 / math.log2(rank + 2) for rank, path in enumerate(named) if path in targets)
    return gain / sum(1 / math.log2(rank + 2) for rank in range(min(10, len(targets))))


class Sets:
    """The queries, functions and relevant functions of all sets of a split, keyed by name."""

    def __init__(self, data: Path, work: Path, split: str):
        folders = {name: data / "mined" / name for name in LANGUAGES}
        folders |= {"csn-ruby": data / "csn-ruby", "stdlib": work / "stdlib"}
        self.sets = {name: _folder(folder, split) for name, folder in folders.items()}
        if split == "test":
            self.sets["cosqa"] = _cosqa(data / "cosqa")
            for language in ("python", "go"):
                self.sets[f"csn99-{language}"] = _judged(data, language)

    def ranks(self, score: Callable[[list[str], list[str]], np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the rank of each query's best relevant function, int[n], by set.

        Args:
            score: a function of queries and functions that returns the score of each pair, float[n, m].
        """
        found = {}
        for name, (queries, codes, relevant) in self.sets.items():
            found[name] = np.array([_rank(*each) for each in zip(score(queries, codes), relevant, strict=True)])
        return found


def _rank(scores: np.ndarray, relevant: list[int]) -> int:
    """Returns the best rank of the relevant functions. Ties with irrelevant functions count against us."""
    best = scores[relevant].max()
    return int((scores >= best).sum() - (scores[relevant] >= best).sum() + 1)


def _folder(folder: Path, split: str):
    corpus = list(lines_of(folder / "codebase.jsonl.gz"))
    position = {row["url"]: number for number, row in enumerate(corpus)}
    rows = list(lines_of(folder / f"{split}.jsonl.gz"))
    queries = [" ".join(row["docstring_tokens"]) for row in rows]
    return queries, [" ".join(row["code_tokens"]) for row in corpus], [[position[row["url"]]] for row in rows]


def _cosqa(folder: Path):
    with gzip.open(folder / "cosqa-retrieval-dev-500.json.gz") as file:
        rows = json.load(file)
    with gzip.open(folder / "code_idx_map.json.gz") as file:
        numbers = json.load(file)
    codes = sorted(numbers, key=numbers.get)
    position = {numbers[code]: number for number, code in enumerate(codes)}
    return [row["doc"] for row in rows], codes, [[position[row["retrieval_idx"]]] for row in rows]


def _judged(data: Path, language: str):
    corpus = list(lines_of(data / "csn99" / language / "codebase.jsonl.gz"))
    position = {row["url"]: number for number, row in enumerate(corpus)}
    others = list(lines_of(data / "mined" / language / "codebase.jsonl.gz"))[:DISTRACTORS]
    relevant: dict[str, list[int]] = {}
    for row in lines_of(data / "csn99" / language / "relevance.jsonl.gz"):
        if row["relevance"] >= 2:
            relevant.setdefault(row["query"], []).append(position[row["url"]])
    codes = [" ".join(row["code_tokens"]) for row in (*corpus, *others)]
    return list(relevant), codes, list(relevant.values())


def mrr(ranks: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the MRR of each set."""
    return {name: round(float((1 / each).mean()), 4) for name, each in ranks.items()}


def cosines(encode: Callable[[list[str], str], np.ndarray]) -> Callable[[list[str], list[str]], np.ndarray]:
    """Returns a function that scores pairs by an encoder, whose embeddings have unit length."""
    return lambda queries, codes: encode(queries, "query") @ encode(codes, "code").T


def embedder(rows: TrainingRows, vectors: np.ndarray) -> Callable[[list[str], str], np.ndarray]:
    """Returns a function that embeds texts with vectors."""
    table = torch.from_numpy(vectors)
    return lambda texts, side: embed(table, rows.weights(texts, side)).numpy()


def bm25(queries: list[str], codes: list[str]) -> np.ndarray:
    """Scores pairs by the package's BM25 over the words of identifiers."""
    texts = [as_arrow(split_identifiers(text.split()) for text in side) for side in (codes, queries)]
    code_counts, counts = count_terms(texts)
    return (counts @ bm25_weights(code_counts).T).toarray()


def settings_of(changes: str) -> Settings:
    """Returns settings: `batch=128,rate=3e-3` changes two of the defaults."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Settings)}
    given = dict(change.split("=") for change in changes.split(",") if change)
    return Settings(**{name: kinds[name](value.replace("+", ",")) for name, value in given.items()})


def run(arguments: argparse.Namespace) -> None:
    """Trains once with each of the settings, and appends the MRR on the valid sets."""
    set_up(1)
    work = Path(arguments.work)
    valid = Sets(Path(arguments.data), work, "valid")
    known: dict[tuple, TrainingRows] = {}
    for settings in map(settings_of, arguments.settings):
        needed = (settings.start, settings.without, bool(settings.weight or settings.regression))
        if needed not in known:
            known = {needed: rows_for(work, settings)}
        started = time.process_time()
        vectors = trained(known[needed], settings)
        seconds = time.process_time() - started
        found = mrr(valid.ranks(cosines(embedder(known[needed], vectors))))
        mean = round(float(np.mean(list(found.values()))), 4)
        line = dataclasses.asdict(settings) | {"seconds": round(seconds, 1), "valid": found, "mean": mean}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        if arguments.save:
            np.save(work / f"{arguments.save}_{settings.seed}.npy", vectors)


def scorer(name: str) -> Callable[[list[str], list[str]], np.ndarray]:
    """Returns the function that scores pairs by `bm25` or by an encoder."""
    if name == "bm25":
        return bm25
    return cosines(open_encoder(name).encode)


def measure(arguments: argparse.Namespace) -> None:
    """Prints the MRR of encoders, or of BM25, on all sets."""
    set_up(1)
    work = Path(arguments.work)
    for split in arguments.splits.split(","):
        sets = Sets(Path(arguments.data), work, split)
        for name in arguments.encoders:
            found = mrr(sets.ranks(scorer(name)))
            mean = round(float(np.mean([found[each] for each in EIGHT])), 4)
            print(json.dumps({"encoder": name, "split": split, "mrr": found, "mean": mean}), flush=True)


def finetune(arguments: argparse.Namespace) -> None:
    """Trains an encoder further on each number of rows, with each rate and number of epochs, and appends the MRR."""
    set_up(1)
    sets = {split: Sets(arguments.data, arguments.work, split).sets for split in arguments.splits.split(",")}
    lines = FURTHER.read_text().splitlines() if FURTHER.exists() else []
    finished = {tuple(json.loads(line)[name] for name in RUN) for line in lines}
    for language, size in itertools.product(UNSEEN, arguments.sizes.split(",")):
        read = lines_of(arguments.data / "mined" / language / "train.jsonl.gz")
        rows = TrainingRows(arguments.encoder, itertools.islice(read, int(size)))
        for changes in arguments.settings:
            settings = settings_of(f"batch=128,weight=0,{changes}")
            key = language, int(size), settings.rate, settings.epochs, settings.seed
            if key in finished and arguments.splits == "valid":
                continue
            started = time.process_time()
            vectors = trained(rows, settings)
            line = dict(zip(RUN, key, strict=True)) | {"seconds": round(time.process_time() - started, 1)}
            for split, of_split in sets.items():
                for name, table in (("before", rows.vectors), ("after", vectors)):
                    queries, codes, relevant = of_split[language]
                    scores = cosines(embedder(rows, table))(queries, codes)
                    ranks = [_rank(*each) for each in zip(scores, relevant, strict=True)]
                    line[f"{split} {name}"] = round(float((1 / np.array(ranks)).mean()), 4)
            with FURTHER.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


def search(arguments: argparse.Namespace) -> None:
    """Prints nDCG@10 of the files that a search finds, for judged queries of repositories, by words and encoders."""
    set_up(1)
    queries = list(lines_of(arguments.queries))
    for name in arguments.encoders:
        found: dict[str, list[float]] = {}
        for repository in sorted({row["repo"] for row in queries}):
            model = "" if name == "words" else name
            with tempfile.TemporaryDirectory() as folder:
                index = CodeIndex.build(arguments.repositories / repository, folder, model)
                for row in queries:
                    if row["repo"] == repository:
                        targets = {each["path"] if isinstance(each, dict) else each for each in row["relevant"]}
                        results = index.search(row["query"], CHUNKS)
                        value = ndcg([result.path for result in results], targets | set(row["secondary"]))
                        found.setdefault(repository, []).append(value)
        values = np.concatenate(list(found.values()))
        means = {each: round(float(np.mean(own)), 3) for each, own in found.items()}
        line = {"encoder": name, "mean": round(float(values.mean()), 4), "repositories": means}
        print(json.dumps(line | {"queries": values.round(4).tolist()}), flush=True)


def main() -> None:
    """Parses the command line, and calls the chosen command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.add_argument("--data", required=True)
    command.add_argument("--work", required=True)
    command.add_argument("--save", help="the name for the vectors in WORK")
    command.add_argument("settings", nargs="+", help='such as "batch=128,rate=3e-3", or "" for the defaults')
    command.set_defaults(call=run)
    command = commands.add_parser("measure")
    command.add_argument("--data", required=True)
    command.add_argument("--work", required=True)
    command.add_argument("--splits", default="valid,test")
    command.add_argument("encoders", nargs="+")
    command.set_defaults(call=measure)
    command = commands.add_parser("finetune")
    for name in ("data", "work", "encoder"):
        command.add_argument(f"--{name}", required=True, type=Path)
    command.add_argument("--splits", default="valid")
    command.add_argument("--sizes", default="300,1000,4000")
    command.add_argument("settings", nargs="+", help='such as "rate=1e-3,epochs=3,seed=2"')
    command.set_defaults(call=finetune)
    command = commands.add_parser("search")
    command.add_argument("--repositories", required=True, type=Path)
    command.add_argument("--queries", required=True, type=Path)
    command.add_argument("encoders", nargs="+")
    command.set_defaults(call=search)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
