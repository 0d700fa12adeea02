"""Trains `base` with hard negatives and their scores in several ways; `scores_study.md` is the protocol.

    OMP_NUM_THREADS=1 python benchmarks/scores_study.py prepare --data DIR --scorer FOLDER --work WORK
    OMP_NUM_THREADS=1 python benchmarks/scores_study.py run --data DIR --work WORK
    python benchmarks/scores_study.py table

`prepare` mines the rows with sentence-transformers and writes them to WORK. `run` tunes every method, then trains the
other seeds, and skips runs that are in `scores_study.jsonl`. Each line of that file is a run: its settings, MRR on
valid, CPU seconds, and the rank of every test query.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from datasets import Dataset
from measuring import set_up
from static_study import SEEDS, Task, counts, reciprocal
from teacher_study import difference, key_of, mean_of

from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.load import training_split
from soft_trainer.data.tokens import encoder_texts
from soft_trainer.estimators.scores import ScoresEstimator
from soft_trainer.terminal import table as markdown

RESULTS = Path(__file__).with_suffix(".jsonl")
LANGUAGES = ("go", "java", "javascript", "php", "python", "ruby")
PAIRS = 1000  # the first training pairs of each language
NEGATIVES = 4
LENGTH = 128  # the most tokens of a text that the scorer reads
ROWS = "rows.jsonl"
RATES = (1e-3, 3e-4)
WEIGHTS = (0.3, 1.0)
BASELINE = "named negatives"

KL = {"weight": WEIGHTS}
AWARE = {"loss": "soft_info_nce", "weighting": "positive_aware"}
# Name -> the options, and the values of the method's own settings. The first runs use the first values.
METHODS: dict[str, tuple[dict, dict]] = {
    "in-batch negatives alone": ({"loss": "info_nce", "negatives_per_query": 0}, {}),
    "named negatives": ({"loss": "info_nce"}, {}),
    "named negatives, weights": (AWARE, {}),
    "named negatives, KL": ({"loss": "info_nce"}, KL),
    "named negatives, weights and KL": (AWARE, KL),
}


def prepare(arguments: argparse.Namespace) -> None:
    """Mines four negatives for each query among the functions of its language, with the scores of the scorer."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    set_up(1)
    work = Path(arguments.work)
    work.mkdir(parents=True, exist_ok=True)
    scorer = SentenceTransformer(arguments.scorer, device="cpu")
    scorer.max_seq_length = LENGTH
    profile = load_encoder("base", device="cpu").profile
    started = time.process_time()
    mined = []
    for language in LANGUAGES:
        rows = load_folder(Path(arguments.data) / "mined" / language)["train"]
        rows = rows.select(range(min(PAIRS, len(rows))))
        texts = {
            "query": list(encoder_texts(rows, "query", profile)),
            "code": list(encoder_texts(rows, "code", profile)),
        }
        mined += mine_hard_negatives(
            Dataset.from_dict(texts),
            scorer,
            num_negatives=NEGATIVES,
            output_format="n-tuple",
            output_scores=True,
            verbose=False,
            cache_folder=str(work / "embeddings"),
        ).to_list()
        print(language, f"{time.process_time() - started:.0f} CPU s", flush=True)
    Dataset.from_list(mined).to_json(work / ROWS)
    scores = np.array([row["scores"] for row in mined])
    above = (scores[:, 1:] >= scores[:, :1]).mean()
    print(f"{len(mined):,} rows; {above:.1%} of the negatives score at least as high as the positive")


class ScoresStudy:
    """The rows and the tasks of all runs."""

    def __init__(self, data: Path, work: Path):
        self.start = load_encoder("base", device="cpu")
        self.rows = training_split(Dataset.from_json(str(work / ROWS)), ROWS)
        self.tasks = {"valid": {}, "test": {}}
        for language in LANGUAGES:
            splits = load_folder(data / "mined" / language)
            for split, tasks in self.tasks.items():
                tasks[language] = self.task(splits[split], splits["codebase"])

    def task(self, queries: Dataset, corpus: Dataset) -> Task:
        """Makes the task of a split: its queries over the language's corpus."""
        position = {url: number for number, url in enumerate(corpus["url"])}
        sides = []
        for rows, side in ((queries, "query"), (corpus, "code")):
            sides.append(counts(self.start, list(encoder_texts(rows, side, self.start.profile))))
        return Task(*sides, np.array([position[url] for url in queries["url"]]))

    def train(self, method: str, settings: dict, seed: int, folder: str) -> np.ndarray:
        """Trains with a method and returns the vectors of the tokens."""
        options, _ = METHODS[method]
        options = options | {"learning_rate": settings["rate"], "seed": seed}
        if "weight" in settings:
            options["distill_weight"] = settings["weight"]
        callbacks = []
        if options["loss"] != "info_nce" or "weight" in settings:
            callbacks.append(ScoresEstimator())
        encoder = load_encoder("base", device="cpu")
        unchanging = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        args = SoftInfoNCETrainingArguments(folder, **options, **unchanging)
        trainer = SoftInfoNCETrainer(
            encoder.model,
            args,
            self.rows,
            processing_class=encoder.tokenizer,
            encoder=encoder.profile,
            callbacks=callbacks,
        )
        trainer.train()
        return encoder.model.word_embedding.weight.numpy(force=True)


def finished() -> dict[str, dict]:
    """Reads the finished runs by method, settings and seed."""
    if not RESULTS.exists():
        return {}
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {key_of(run["method"], run["settings"], run["seed"]): run for run in runs}


def tuned(method: str, valid_of) -> dict:
    """Returns the settings of a method with the best MRR on valid: the rate, and then its own settings.

    Args:
        valid_of: returns the MRR on valid of the run with some settings and seed 1.
    """
    own = METHODS[method][1]
    settings = {"rate": RATES[0]} | {name: values[0] for name, values in own.items()}
    for name, values in ({"rate": RATES} | own).items():
        settings = max([settings | {name: value} for value in values], key=valid_of)
    return settings


def run(arguments: argparse.Namespace) -> None:
    """Makes the runs that are missing: tunes all methods first, then one seed of all methods after the other."""
    set_up(1)
    study = ScoresStudy(Path(arguments.data), Path(arguments.work))
    chosen = {}
    for method in METHODS:
        chosen[method] = tuned(method, lambda settings, method=method: make(study, method, settings, 1)["valid"])
        print(method, chosen[method], flush=True)
    for seed in SEEDS[1:]:
        for method in METHODS:
            make(study, method, chosen[method], seed)


def make(study: ScoresStudy, method: str, settings: dict, seed: int) -> dict:
    """Makes a run, unless it is finished, and appends its line."""
    done = finished().get(key_of(method, settings, seed))
    if done is not None:
        return done
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        vectors = study.train(method, settings, seed, folder)
    line = {"method": method, "settings": settings, "seed": seed}
    line["seconds"] = round(time.process_time() - started, 1)
    valid = [float((1 / task.ranks(vectors)).mean()) for task in study.tasks["valid"].values()]
    line["valid"] = round(float(np.mean(valid)), 5)
    line["ranks"] = {name: " ".join(map(str, task.ranks(vectors))) for name, task in study.tasks["test"].items()}
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(method, settings, seed, line["valid"], line["seconds"], flush=True)
    return line


def table(arguments: argparse.Namespace) -> None:
    """Prints the MRR of every method with its tuned settings, and its difference from negatives without scores."""
    runs = finished()
    seeds_of = {}
    for method in METHODS:
        try:
            best = tuned(method, lambda settings, method=method: runs[key_of(method, settings, 1)]["valid"])
        except KeyError:
            continue  # not all of its tuning has been done
        keys = {seed: key_of(method, best, seed) for seed in SEEDS}
        seeds_of[method] = {seed: runs[key] for seed, key in keys.items() if key in runs}
    lines = []
    for method, own in seeds_of.items():
        settings = ", ".join(f"{name} {value:g}" for name, value in own[1]["settings"].items())
        every = own.values()
        line = [method, settings, len(own), float(np.mean([each["valid"] for each in every]))]
        line.append(float(np.median([each["seconds"] for each in every])))
        line.append(float(np.concatenate([mean_of(own, name) for name in LANGUAGES]).mean()))
        of_seeds = [np.concatenate([reciprocal(each, name) for name in LANGUAGES]).mean() for each in every]
        line.append(f"{min(of_seeds):.3f} to {max(of_seeds):.3f}")
        line.append("" if method == BASELINE else difference(own, seeds_of[BASELINE], LANGUAGES))
        lines.append(line)
    headers = ["method", "settings", "seeds", "valid", "CPU s", "test", "test by seed", f"test - {BASELINE}"]
    print(markdown(headers, lines))


def main() -> None:
    """Prepares, runs, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, call in (("prepare", prepare), ("run", run)):
        command = commands.add_parser(name)
        command.add_argument("--data", required=True, help="folder with `mined/LANGUAGE`")
        command.add_argument("--work", required=True)
        command.set_defaults(call=call)
        if name == "prepare":
            command.add_argument("--scorer", required=True, help="a sentence-transformers encoder")
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
