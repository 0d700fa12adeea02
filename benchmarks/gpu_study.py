"""Fine-tunes MiniLM in four ways on a GPU, ours and sentence-transformers', and compares their search.

    python benchmarks/gpu_study.py tune  --mined DIR --csn_ruby DIR --model FOLDER
    python benchmarks/gpu_study.py run   --mined DIR --csn_ruby DIR --model FOLDER [--seed 1]
    python benchmarks/gpu_study.py table
    python benchmarks/gpu_study.py run   ... --device cpu --tiny    # tries the script without a GPU

`--mined` has a folder for each language, and every folder has train, valid, test and codebase. The training rows of
all folders are joined: 28,000 pairs in six languages. The ways share the start, the texts, bf16, batches of 256, one
epoch, warm-up, workers, and the rates that `tune` tries:

- mnrl: MultipleNegativesRankingLoss, in batches without duplicates;
- gist: CachedGISTEmbedLoss, guided by the encoder before training, in batches without duplicates;
- hard_batches: `recipes/hard_batches.yaml`;
- teacher: InfoNCE with a teacher, which is the encoder before training unless `--teacher` names a better one.

`tune` measures every rate on valid, with seed 0. `run` trains each way once, with its best rate, and ranks the test
queries. Ranks are computed in float32. Each training adds a line with the rank of every query to `gpu_study.jsonl`,
and trainings that have a line are skipped. A call starts no training that would end after `--minutes`. Calls with
different `--arms` may share the card and the results; then their speeds compare with each other only. `table` compares
the reciprocal ranks of all queries; "all" is the mean over all queries, and with several seeds, over these too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from gpu_environment import one_gpu

os.environ |= {"HF_HUB_OFFLINE": "1", **one_gpu()}

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from gpu_parts import free, peak, trained
from measuring import machine, set_up
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss
from starting_point import StartingPoint, begin_with
from step import our_trainer, their_trainer, without_cudnn_attention

from soft_trainer import load_encoder
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.tokens import encoder_texts
from soft_trainer.encoders.encoding import Encoder, comparable
from soft_trainer.estimators.frozen_encoder import InitialModelEstimator
from soft_trainer.evaluation.ranking import rank_codes
from soft_trainer.evaluation.significance import compare_crossed, difference_text
from soft_trainer.options.recipes import RECIPES, read_recipe
from soft_trainer.terminal import table

LANGUAGES = ("go", "java", "javascript", "php", "python", "ruby")
ARMS = ("mnrl", "gist", "hard_batches", "teacher")
BASE = "mnrl"
UNTRAINED = "before training"
RATES = (2e-5, 6e-5, 1.8e-4, 5.4e-4)
MARGIN = 0.05  # relative, of GIST
OF_RECIPE = ("train_sampling_strategy", "weighting")  # the options of the recipe that concern batches and weights
TINY = {"rows": 24, "queries": 8, "codes": 40}  # of each folder


@dataclass
class Task:
    """A set's queries and codes as texts, and the position of every query's code."""

    queries: list[str]
    codes: list[str]
    answers: list[int]


class Study:
    """The rows, the start and the sets of all trainings."""

    def __init__(self, arguments: argparse.Namespace, work: Path):
        self.arguments = arguments
        self.work = work
        self.folders = {name: Path(arguments.mined) / name for name in LANGUAGES} | {
            "csn-ruby": Path(arguments.csn_ruby)
        }
        self.half = "bfloat16" if arguments.device == "cuda" else "float32"
        splits = {name: self.read(folder) for name, folder in self.folders.items()}
        rows = concatenate_datasets([each["train"].select_columns(COLUMNS) for each in splits.values()])
        options = argparse.Namespace(**vars(arguments), lengths="16,32" if arguments.tiny else "128,256")
        self.start: StartingPoint = begin_with(rows, options, work / "start")
        self.sets = {
            split: {name: self.task(each, split) for name, each in splits.items()} for split in ("valid", "test")
        }

    def read(self, folder: Path) -> dict[str, Dataset]:
        """The splits of a folder."""
        splits = load_folder(folder)
        if not self.arguments.tiny:
            return splits
        few = {split: first(splits[split], TINY["queries"]) for split in ("valid", "test")}
        asked = {url for rows in few.values() for url in rows["url"]}
        urls = splits["codebase"]["url"]
        kept = [row for row, url in enumerate(urls) if url in asked or row < TINY["codes"]]
        return few | {
            "train": first(splits["train"], TINY["rows"]),
            "codebase": splits["codebase"].select(kept),
        }

    def task(self, splits: dict[str, Dataset], split: str) -> Task:
        """The queries of a split over the codebase."""
        codebase = splits["codebase"]
        position = {url: row for row, url in enumerate(codebase["url"])}
        profile = self.start.profile
        queries = list(encoder_texts(splits[split], "query", profile))
        codes = list(encoder_texts(codebase, "code", profile))
        return Task(queries, codes, [position[url] for url in splits[split]["url"]])

    def ranks(self, encoder: Encoder, split: str) -> dict[str, list[int]]:
        """Set -> the rank of every query, with all encoders in float32."""
        device = self.arguments.device
        encoder.model.to(device, torch.float32).eval()
        found = {}
        with torch.no_grad(), without_cudnn_attention():
            for name, task in self.sets[split].items():
                embeddings = (encoder.encode_queries(task.queries), encoder.encode_codes(task.codes))
                queries, codes = (comparable(encoder.profile, each) for each in embeddings)
                answers = torch.tensor(task.answers, device=queries.device)
                found[name] = rank_codes(queries, codes, answers).ranks.tolist()
        return found

    # ---- Training ----

    def shared(self, rate: float, seed: int) -> dict:
        """The training arguments that all ways share."""
        return {
            "per_device_train_batch_size": self.arguments.batch_size,
            "learning_rate": rate,
            "num_train_epochs": 1,
            "warmup_steps": 0.1,
            "seed": seed,
            "dataloader_drop_last": True,
            "dataloader_num_workers": self.arguments.workers,
            "logging_steps": 10,
        }

    def train(self, arm: str, rate: float, seed: int) -> tuple[dict, Encoder]:
        """Trains in one way. Returns figures and the encoder."""
        shared = self.shared(rate, seed)
        if arm in ("mnrl", "gist"):
            loss_of = self.guided if arm == "gist" else None
            trainer = their_trainer(self.start, self.half, loss_of=loss_of, batch_sampler="no_duplicates", **shared)
        else:
            options = shared | {"false_negatives": "mask"}
            callbacks = []
            if arm == "teacher":
                options["teacher"] = self.arguments.teacher or str(self.start.folder)
                options["train_sampling_strategy"] = "random"
            else:
                recipe = read_recipe(RECIPES / "hard_batches.yaml")
                options |= {name: recipe[name] for name in OF_RECIPE} | {"loss": "soft_info_nce"}
                callbacks.append(InitialModelEstimator(cache_dir=None))
            if self.arguments.device == "cpu":
                options["packing"] = "true"
            trainer = our_trainer(self.start, self.half, callbacks=callbacks, **options)
        figures = trained(trainer, warm=min(5, self.steps() - 1))
        folder = self.work / "trained"
        shutil.rmtree(folder, ignore_errors=True)
        if arm in ("mnrl", "gist"):
            trainer.model.save_pretrained(str(folder))
        else:
            trainer.save_model(str(folder))
        # What is loaded is measured, because the trained model would run in half precision.
        return figures, dataclasses.replace(load_encoder(folder, device="cpu"), profile=self.start.profile)

    def steps(self) -> int:
        """The steps of an epoch."""
        return len(self.start.rows) // self.arguments.batch_size

    def guided(self, model: SentenceTransformer) -> CachedGISTEmbedLoss:
        """GIST's loss, guided by the encoder before training."""
        guide = SentenceTransformer(str(self.start.folder), device=self.arguments.device)
        settings = {"margin_strategy": "relative", "margin": MARGIN, "mini_batch_size": self.arguments.batch_size}
        return CachedGISTEmbedLoss(model, guide, temperature=1 / self.start.profile.score_scale, **settings)


COLUMNS = ["url", "docstring_tokens", "code_tokens"]


def first(rows: Dataset, number: int) -> Dataset:
    """The first rows."""
    return rows.select(range(min(number, len(rows))))


# ---- Results ----


def finished(path: Path) -> list[dict]:
    """The lines of the results."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def key_of(line: dict) -> tuple:
    """What a line is the result of."""
    return (line["mode"], line["arm"], line["rate"], line["seed"])


def best_rate(lines: list[dict], arm: str, rates: list[float]) -> float | None:
    """The rate with the highest MRR on valid, or None if a rate was not tried."""
    tried = {line["rate"]: line["mrr"] for line in lines if line["mode"] == "tune" and line["arm"] == arm}
    if set(rates) <= tried.keys():
        return max(tried, key=tried.get)
    return None


def mean_mrr(ranks: dict[str, list[int]]) -> float:
    """The MRR over all queries."""
    return float((1 / np.concatenate(list(ranks.values()))).mean())


def wanted(arguments: argparse.Namespace, lines: list[dict]) -> list[tuple]:
    """The trainings of this call that have no line yet: mode, way, rate, seed."""
    arms = arguments.arms.split(",")
    tried = [float(rate) for rate in arguments.rates.split(",")]
    if arguments.mode == "tune":
        chosen = [("tune", arm, rate, 0) for rate in tried for arm in arms]
    else:
        rates = {arm: arguments.rate or best_rate(lines, arm, tried) for arm in arms}
        if missing := [arm for arm, rate in rates.items() if rate is None]:
            sys.exit(f"{', '.join(missing)}: no rate; call `tune` first, until it has tried all, or set --rate")
        chosen = [("run", UNTRAINED, None, 0)]
        chosen += [("run", arm, rates[arm], arguments.seed) for arm in arms]
    done = {key_of(line) for line in lines}
    return [key for key in chosen if key not in done]


def run(arguments: argparse.Namespace, work: Path) -> int:
    """Trains what has no line yet. Returns the exit code."""
    begun = time.monotonic()
    results = Path(arguments.results)
    keys = wanted(arguments, finished(results))
    if not keys:
        return 0
    study = Study(arguments, work)
    print(f"{machine(arguments.device)}\n{len(study.start.rows):,} pairs, {study.steps()} steps", flush=True)
    longest = 0.0
    failed = 0
    for done, key in enumerate(keys):
        start = time.monotonic()
        if start + longest > begun + 60 * arguments.minutes:
            print(f"no time left for {len(keys) - done} of {len(keys)}; the same command goes on")
            return 1
        try:
            line = made(study, *key)
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        finally:
            free()
        with open(results, "a") as file:
            file.write(json.dumps(line) + "\n")
        took = time.monotonic() - start
        longest = max(longest, took)
        print(f"{key}: MRR {line['mrr']:.4f}, {took:.1f} s", flush=True)
    return int(failed > 0)


def made(study: Study, mode: str, arm: str, rate: float | None, seed: int) -> dict:
    """Trains and measures. Returns a line of the results."""
    device = study.arguments.device
    line = {"mode": mode, "arm": arm, "rate": rate, "seed": seed, "machine": machine(device)}
    peak(device, reset=True)
    if arm == UNTRAINED:
        encoder = load_encoder(study.start.folder, device="cpu")
    else:
        start = time.monotonic()
        figures, encoder = study.train(arm, rate, seed)
        figures["losses"] = [figures["losses"][0], figures["losses"][-1]] if figures["losses"] else []
        line |= figures | {"seconds": time.monotonic() - start}
    ranks = study.ranks(encoder, "valid" if mode == "tune" else "test")
    return line | {"mrr": mean_mrr(ranks), "ranks": ranks}


# ---- The tables ----


def tuning_tables(lines: list[dict]) -> list[tuple[str, list[str], list[list]]]:
    """The MRR on valid by way and rate, and each way's difference from `mnrl`, both at their best rate so far."""
    tuned = [line for line in lines if line["mode"] == "tune"]
    if not tuned:
        return []
    by_arm = {arm: {line["rate"]: line for line in tuned if line["arm"] == arm} for arm in ARMS}
    rates = [rate for rate in RATES if any(rate in found for found in by_arm.values())]
    mrrs = [[arm, *(found[rate]["mrr"] if rate in found else None for rate in rates)] for arm, found in by_arm.items()]
    tables = [("MRR on valid by learning rate, seed 0", ["way", *(f"{rate:g}" for rate in rates)], mrrs)]
    best = {arm: max(found.values(), key=lambda line: line["mrr"]) for arm, found in by_arm.items() if found}
    if BASE in best and all("ranks" in line for line in best.values()):
        values = {
            arm: {name: 1 / np.array([ranks]) for name, ranks in line["ranks"].items()} for arm, line in best.items()
        }
        names = list(best[BASE]["ranks"])
        rows = [[arm, best[arm]["rate"], change(values[arm], values[BASE], names)] for arm in values if arm != BASE]
        headers = ["way", "rate", f"MRR minus {BASE} at {best[BASE]['rate']:g} (95 % interval)"]
        tables.append(("The best rates on valid, one seed", headers, rows))
    return tables


def report(arguments: argparse.Namespace) -> None:
    """Prints the rates that were tried, and the comparison of the runs."""
    lines = finished(Path(arguments.results))
    for title, headers, rows in tuning_tables(lines):
        print(f"{title}\n\n{table(headers, rows, '.4f')}\n")
    runs = {
        arm: [line for line in lines if line["mode"] == "run" and line["arm"] == arm] for arm in (UNTRAINED, *ARMS)
    }
    runs = {arm: found for arm, found in runs.items() if found}
    if not runs:
        return
    names = list(next(iter(runs.values()))[0]["ranks"])
    rows = []
    for arm, found in runs.items():
        seconds = [np.mean([line[name] for line in found]) if "seconds" in found[0] else None for name in TIMES]
        memory = found[0].get("GiB")
        rows.append([arm, found[0]["rate"], len(found), np.mean([line["mrr"] for line in found]), *seconds, memory])
    headers = ["way", "rate", "seeds", "MRR, all", "examples/s", "s before the first step", "s in all", "GiB"]
    print(f"{found[0]['machine']}\n\n{table(headers, rows, '.4g')}\n")
    values = {
        arm: {name: np.array([1 / np.array(line["ranks"][name]) for line in found]) for name in names}
        for arm, found in runs.items()
    }
    print(table(["set", *(f"MRR, {arm}" for arm in runs)], means(values, names)), "\n")
    for base in (BASE, UNTRAINED):
        if base in values:
            others = [arm for arm in values if arm not in (base, UNTRAINED)]
            rows = [[name, *(change(values[arm], values[base], [name]) for arm in others)] for name in names]
            rows.append(["all", *(change(values[arm], values[base], names) for arm in others)])
            print(f"MRR minus {base} (95 % interval)\n\n{table(['set', *others], rows)}\n")


TIMES = ("examples/s", "before", "seconds")


def means(values: dict, names: list[str]) -> list[list]:
    """The MRR of each set, and over all queries."""
    rows = [[name, *(float(each[name].mean()) for each in values.values())] for name in names]
    pooled = [float(np.concatenate([each[name].mean(0) for name in names]).mean()) for each in values.values()]
    return [*rows, ["all", *pooled]]


def change(own: dict[str, np.ndarray], base: dict[str, np.ndarray], names: list[str]) -> str:
    """The difference in MRR over the queries of some sets, with the paired interval."""
    seeds = len(own[names[0]])
    if len(base[names[0]]) > 1:
        seeds = min(seeds, len(base[names[0]]))
    strata = [own[name][:seeds] - base[name][:seeds] for name in names]  # the untrained encoder has no seeds
    delta = float(np.concatenate([each.mean(0) for each in strata]).mean())
    return difference_text(delta, compare_crossed([np.concatenate(strata, axis=1)]).interval, 3)


def main() -> None:
    """Tunes, runs, or prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("tune", "run", "table"))
    parser.add_argument("--mined", help="folder with a folder for each language")
    parser.add_argument("--csn_ruby", help="folder with CodeSearchNet's Ruby")
    parser.add_argument("--model", help="folder of MiniLM")
    parser.add_argument("--teacher", help="folder of a teacher (default: the encoder before training)")
    parser.add_argument("--results", default="gpu_study.jsonl")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="rates that `tune` tries")
    parser.add_argument("--rate", type=float, help="rate of all ways in `run`, instead of the tuned ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few rows and short texts, to try the script")
    arguments = parser.parse_args()
    if arguments.mode == "table":
        report(arguments)
        return
    if None in (arguments.mined, arguments.csn_ruby, arguments.model):
        parser.error("--mined, --csn_ruby and --model are needed")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --tiny tries the script")
    set_up(1 if arguments.tiny else len(os.sched_getaffinity(0)))
    del os.environ["TOKENIZERS_PARALLELISM"]  # by default, data workers tokenise without threads
    with tempfile.TemporaryDirectory() as work:
        code = run(arguments, Path(work))
    report(arguments)
    sys.exit(code)


if __name__ == "__main__":
    main()
