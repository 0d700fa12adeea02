"""Runs the study of merging and distilling (benchmarks/merge_study.md). merge_study_tables.py prints its tables.

    python benchmarks/merge_study.py run MODEL DATA --work DIR [--phase screen] [--until 08:10]
    python benchmarks/merge_study.py freeze
    python benchmarks/merge_study.py run MODEL DATA --work DIR --phase confirm
    python benchmarks/merge_study.py run OTHER DATA --work DIR --phase repeat

MODEL is the folder of all-MiniLM-L6-v2, and OTHER the folder that merge_study_encoder.py writes. DATA has the
folders mined/LANGUAGE (train, valid, test, codebase), cosqa and csn99/python.

A cell is one training, named phase/language/seed/method. merge_study.json has the finished cells, with the rank of
every query at every ratio. Finished cells are not run again, so the study can be stopped at any time and continued
on another machine. Trainings are soft-trainer commands in separate processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

from soft_trainer import load_encoder
from soft_trainer.evaluation.ranking import rank_codes
from soft_trainer.evaluation.significance import reciprocal_ranks
from soft_trainer.files import write_text
from soft_trainer.merging import interpolate

STUDY = Path(__file__).with_name("merge_study.json")
RATIOS = (1.0, 0.75, 0.5, 0.25, 0.0)
ROWS, QUERY_LENGTH, CODE_LENGTH = 2000, 32, 64
TOLERANCE = 0.005
SEEDS = (1234, 12345, 123456)
DEVELOPMENT, CONFIRMATION = ("python", "ruby", "go"), ("java", "php", "javascript", "python")
FRESH = "fresh-python"  # the folder of Python rows mined after the protocol, in DATA or next to the work folder
COMMON = {
    "query_length": QUERY_LENGTH,
    "code_length": CODE_LENGTH,
    "score_function": "cosine",
    "score_scale": 20,
    "attn_implementation": "eager",
    "use_cpu": "true",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 32,
    "warmup_steps": 0.1,
    "do_train": "true",
    "lexical": "false",
    "model_card": "false",
    "examples": 0,
    "logging_steps": 10,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": "true",
}
HARD = {"estimator": "initial_model", "train_sampling_strategy": "similar"}
RANDOM = {"estimator": "initial_model", "train_sampling_strategy": "random"}
AWARE, PLAIN = {"weighting": "positive_aware"}, {"loss": "info_nce"}
# Each family's settings, in the order in which the screen runs them. MNRL and GIST are sentence-transformers'.
METHODS: dict[str, dict] = {
    "mnrl-6e-5": {"baseline": "mnrl", "learning_rate": 6e-5},
    "ours-kl-1e-4": HARD | PLAIN | {"distill_weight": 0.3, "learning_rate": 1e-4},
    "random-kl-1e-4": RANDOM | PLAIN | {"distill_weight": 0.3, "learning_rate": 1e-4},
    "ours-aware-6e-5": HARD | AWARE | {"learning_rate": 6e-5},
    "mnrl-2e-5": {"baseline": "mnrl", "learning_rate": 2e-5},
    "ours-aware-kl-1e-4": HARD | AWARE | {"distill_weight": 0.3, "learning_rate": 1e-4},
    "mnrl-1.2e-4": {"baseline": "mnrl", "learning_rate": 1.2e-4},
    "ours-kl1-1.5e-4": HARD | PLAIN | {"distill_weight": 1.0, "learning_rate": 1.5e-4},
    "random-kl1-1.5e-4": RANDOM | PLAIN | {"distill_weight": 1.0, "learning_rate": 1.5e-4},
    "gist-6e-5": {"baseline": "gist", "mined_negatives": 1, "learning_rate": 6e-5},
}
ABLATED = ("java", "javascript")
UNTRAINED_IN = {"ablate": "confirm"}  # phases whose encoder before training is ranked in another one


# ---- Rows and queries ----


def read_rows(path: Path) -> list[dict]:
    """The rows of a gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def half(query: str) -> str:
    """ "choose" or "report": the half of the guards that a query belongs to, by its text."""
    return ("choose", "report")[hashlib.sha256(query.encode()).digest()[0] % 2]


class Set:
    """Queries, the corpus that they are ranked against, and the relevant codes of each query.

    Args:
        queries: texts.
        right: the urls of each query's relevant codes; the best of their ranks counts.
        codes: url -> code. Codes of `others` are added until the corpus has `size` codes.
    """

    def __init__(self, queries: list[str], right: list[set[str]], codes: dict[str, str], others: Iterable, size: int):
        corpus = dict(codes)
        for url, code in others:
            if len(corpus) < size:
                corpus.setdefault(url, code)
        self.queries, self.codes = queries, list(corpus.values())
        places = {url: place for place, url in enumerate(corpus)}
        self.right = [[places[url] for url in sorted(urls)] for urls in right]


def own_sets(folder: Path) -> dict[str, Set]:
    """Valid (400 queries over 750 codes) and test (500 over 1,000) of one language, with different other codes."""
    parts = {name: read_rows(folder / f"{name}.jsonl.gz") for name in ("valid", "test", "codebase")}
    parts["valid"] = parts["valid"][:400]
    code_of = {row["url"]: row["code"] for row in parts["codebase"]}
    asked = {row["url"] for name in ("valid", "test") for row in read_rows(folder / f"{name}.jsonl.gz")}
    others = [(url, code) for url, code in code_of.items() if url not in asked]
    sets = {}
    for name, spare, size in (("valid", others[:400], 750), ("test", others[400:], 1000)):
        urls = [row["url"] for row in parts[name]]
        queries = [row["docstring"] for row in parts[name]]
        sets[name] = Set(queries, [{url} for url in urls], {url: code_of[url] for url in urls}, spare, size)
    return sets


def guards(data: Path) -> dict[str, Set]:
    """CoSQA's dev queries and CodeSearchNet's judged ones for Python, in halves that choose and that report."""
    with gzip.open(data / "cosqa" / "cosqa-retrieval-dev-500.json.gz", "rt", encoding="utf-8") as file:
        cosqa = json.load(file)
    with gzip.open(data / "cosqa" / "code_idx_map.json.gz", "rt", encoding="utf-8") as file:
        codes = {str(number): code for code, number in json.load(file).items()}
    judged = read_rows(data / "csn99" / "python" / "relevance.jsonl.gz")
    functions = {row["url"]: row["code"] for row in read_rows(data / "csn99" / "python" / "codebase.jsonl.gz")}
    mined = [(row["url"], row["code"]) for row in read_rows(data / "mined" / "python" / "codebase.jsonl.gz")[1000:]]
    asked = {str(row["retrieval_idx"]) for row in cosqa}
    spare = [(url, code) for url, code in codes.items() if url not in asked]
    sets = {}
    for name, others, size in (("choose", slice(0, 1000), 750), ("report", slice(1000, 3000), 1000)):
        rows = [row for row in cosqa if half(row["doc"]) == name]
        right = [{str(row["retrieval_idx"])} for row in rows]
        own = {url: codes[url] for urls in right for url in urls}
        sets[f"cosqa-{name}"] = Set([row["doc"] for row in rows], right, own, spare[others], size)
        rows = [row for row in judged if half(row["query"]) == name and row["url"] in functions]
        answers: dict[str, set] = {}
        for row in rows:
            if row["relevance"] >= 2:
                answers.setdefault(row["query"], set()).add(row["url"])
        own = {row["url"]: functions[row["url"]] for row in rows}
        fill = mined[:500] if name == "choose" else mined[500:]
        sets[f"judged-{name}"] = Set(list(answers), list(answers.values()), own, fill, size)
    return sets


# ---- One cell ----


def ranks(encoder, sets: dict[str, Set], bf16: bool) -> dict[str, list[int]]:
    """The rank of each query's best right code, for each set."""
    results = {}
    for name, each in sets.items():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16), torch.no_grad():
            queries, codes = encoder.encode_queries(each.queries), encoder.encode_codes(each.codes)
        queries, codes = (torch.nn.functional.normalize(side.float()) for side in (queries, codes))
        pairs = [(query, place) for query, places in enumerate(each.right) for place in places]
        numbers, targets = (torch.tensor(column) for column in zip(*pairs, strict=True))
        best: dict[int, int] = {}
        found = rank_codes(queries[numbers], codes, targets).ranks
        for query, rank in zip(numbers.tolist(), found.tolist(), strict=True):
            best[query] = min(rank, best.get(query, rank))
        results[name] = [best[query] for query in range(len(each.queries))]
    return results


def load(folder: str | Path):
    """An encoder with the study's lengths."""
    encoder = load_encoder(folder, device="cpu")
    lengths = {"query_length": QUERY_LENGTH, "code_length": CODE_LENGTH}
    return dataclasses.replace(encoder, profile=encoder.profile.replace(**lengths))


def train(settings: dict, model: str, rows: Path, language: str, seed: int, work: Path) -> tuple[Path, float]:
    """Trains one encoder in a separate process; returns its folder and the CPU seconds."""
    folder = work / "encoder"
    options = COMMON | settings | {"model_name_or_path": model, "data_dir": rows, "language": language, "seed": seed}
    options |= {"output_dir": folder, "overwrite": "true"}
    command = "baseline" if "baseline" in settings else "train"
    if command == "train":
        options |= {"estimator_cache_dir": work / "rows"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (work / "training.log").open("w") as log:
        subprocess.run([sys.executable, "-m", "soft_trainer.cli", command, *words], check=True, stdout=log, stderr=log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return folder, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_cell(name: str, settings: dict | None, model: str, data: Path, work: Path, bf16: str) -> dict:
    """Trains, ranks the sets that choose at every ratio, and after the screen those that report at the chosen one."""
    phase, language, seed, _ = name.split("/")
    folder = data / "mined" / language
    rows = work / "train" / language
    if not (rows / "train.jsonl").exists():
        rows.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row) + "\n" for row in read_rows(folder / "train.jsonl.gz")[:ROWS])
        (rows / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    fresh = phase != "screen" and language == "python"
    own = own_sets(folder) | ({"test": own_sets(work / FRESH)["test"]} if fresh else {})
    sets = own | guards(data)
    choosing = {key: each for key, each in sets.items() if key == "valid" or key.endswith("choose")}
    reporting = {key: each for key, each in sets.items() if key not in choosing}
    base, rank = load(model), partial(ranks, bf16=bf16 == "true")
    weights = {key: tensor.clone() for key, tensor in base.model.state_dict().items()}
    if settings is None:
        cell = {"ranks": {"0": rank(base, choosing)}}
        return cell | ({"report": {"0": rank(base, reporting)}} if phase != "screen" else {})
    settings = settings | {"bf16": bf16}
    encoder_folder, seconds = train(settings, model, rows, language, int(seed), work)
    trained = load(encoder_folder)
    after = {key: tensor.clone() for key, tensor in trained.model.state_dict().items()}

    def at(ratio: float, which: dict) -> dict:
        trained.model.load_state_dict(interpolate(weights, [after], ratio))
        return rank(trained, which)

    cell = {"seconds": round(seconds), "settings": settings}
    cell["ranks"] = {f"{ratio:g}": at(ratio, choosing) for ratio in RATIOS if ratio}
    if phase != "screen":
        chosen = cell["ratio"] = chosen_ratio(load_study()["cells"], name, cell)
        cell["report"] = {f"{ratio:g}": at(ratio, reporting) for ratio in sorted({chosen, 1.0} - {0.0})}
    return cell


# ---- The study ----


def load_study() -> dict:
    """The study so far."""
    return json.loads(STUDY.read_text(encoding="utf-8")) if STUDY.exists() else {"frozen": {}, "cells": {}}


def save_study(study: dict) -> None:
    """Writes the study, a line for each cell."""
    cells = (f"{json.dumps(name)}: {json.dumps(cell, separators=(',', ':'))}" for name, cell in study["cells"].items())
    lines = ",\n".join(cells)
    text = f'{{"frozen": {json.dumps(study["frozen"])}, "cells": {{\n{lines}\n}}}}\n'
    write_text(STUDY, text)


def mrr(ranks: list[int]) -> float:
    """The mean reciprocal rank."""
    return float(reciprocal_ranks(ranks).mean())


def chosen_ratio(cells: dict, name: str, cell: dict) -> float:
    """The ratio with the best valid MRR among those whose guards fell by at most `TOLERANCE`; of equals the least."""
    phase, language, *_ = name.split("/")
    at = cell["ranks"] | cells[f"{UNTRAINED_IN.get(phase, phase)}/{language}/0/untrained"]["ranks"]
    figures = {ratio: {key: mrr(values) for key, values in sets.items()} for ratio, sets in at.items()}
    valid = {ratio: each.pop("valid") for ratio, each in figures.items()}
    before = next(guards for ratio, guards in figures.items() if float(ratio) == 0)
    # Sums of floats: a fall of exactly the tolerance is within it.
    lowest = {name: value - TOLERANCE - 1e-12 for name, value in before.items()}
    allowed = [ratio for ratio, guards in figures.items() if all(guards[name] >= lowest[name] for name in lowest)]
    return max((valid[ratio], -float(ratio), float(ratio)) for ratio in allowed)[2]


def ablations(study: dict) -> dict[str, dict]:
    """Ours with one part changed: batches, weights, distilling or the rate."""
    ours, baseline = (METHODS[study["frozen"][side]] for side in ("ours", "baseline"))
    weights = PLAIN if "weighting" in ours else AWARE
    variants = {
        "random-batches": ours | {"train_sampling_strategy": "random"},
        "other-weights": {name: value for name, value in ours.items() if name not in AWARE | PLAIN} | weights,
        "other-rate": ours | {"learning_rate": baseline["learning_rate"]},
    }
    if "distill_weight" in ours:
        variants["no-distilling"] = {name: value for name, value in ours.items() if name != "distill_weight"}
    return {name: settings for name, settings in variants.items() if settings != ours}


def cells_of(phase: str, study: dict) -> list[tuple[str, dict | None]]:
    """The cells of a phase with their settings, in the order in which they run; settings None: without training."""
    seeds = SEEDS[:1] if phase == "screen" else SEEDS
    frozen = {name: METHODS[name] for name in study["frozen"].values()}
    languages, methods = {
        "screen": (DEVELOPMENT, METHODS),
        "confirm": (CONFIRMATION, frozen),
        "repeat": (CONFIRMATION, frozen),
        "ablate": (ABLATED, ablations(study) if frozen else {}),
    }[phase]
    cells = [
        (f"{phase}/{language}/{seed}/{method}", settings)
        for seed in seeds
        for language in languages
        for method, settings in methods.items()
    ]
    untrained = {
        language: (f"{UNTRAINED_IN.get(phase, phase)}/{language}/0/untrained", None) for language in languages
    }
    ordered = []
    for name, settings in cells:  # the encoder before training is ranked when a language begins
        ordered += [untrained.pop(language)] if (language := name.split("/")[1]) in untrained else []
        ordered.append((name, settings))
    return ordered


def run(arguments: argparse.Namespace) -> None:
    """Runs the cells of a phase that are not finished, until the time is up."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name, settings in cells_of(arguments.phase, load_study()):
        if name in load_study()["cells"]:
            continue
        if arguments.until and datetime.now().strftime("%H:%M") >= arguments.until:
            print("time is up", flush=True)
            return
        start = time.monotonic()
        cell = run_cell(name, settings, arguments.model, arguments.data, arguments.work, arguments.bf16)
        study = load_study()
        study["cells"][name] = cell
        save_study(study)
        print(f"{name}: {time.monotonic() - start:.0f} s, {cell.get('seconds', 0)} CPU s of training", flush=True)


def screened(study: dict) -> dict[str, dict[str, dict]]:
    """The cells of the screen by language and method, of languages that every method has finished."""
    found: dict[str, dict[str, dict]] = {}
    for name, cell in study["cells"].items():
        phase, language, _, method = name.split("/")
        if phase == "screen" and method in METHODS:
            found.setdefault(language, {})[method] = cell
    return {language: cells for language, cells in found.items() if cells.keys() == METHODS.keys()}


def freeze(arguments: argparse.Namespace) -> None:
    """Chooses the settings of ours and of the best baseline by the screen, once."""
    study = load_study()
    if study["frozen"] or not screened(study):
        print("frozen already" if study["frozen"] else "no language of the screen is complete")
        return
    scores = {method: [] for method in METHODS}
    for language, cells in screened(study).items():
        for method, cell in cells.items():
            ratio = chosen_ratio(study["cells"], f"screen/{language}/0/{method}", cell)
            before = study["cells"][f"screen/{language}/0/untrained"]["ranks"]
            scores[method].append(mrr((cell["ranks"] | before)[f"{ratio:g}"]["valid"]))
    best = sorted(scores, key=lambda method: -np.mean(scores[method]))
    study["frozen"] = {
        "ours": next(method for method in best if method.startswith("ours")),
        "baseline": next(method for method in best if METHODS[method].get("baseline")),
    }
    save_study(study)
    print(study["frozen"])


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    running = commands.add_parser("run", help="run the cells of a phase that are not finished")
    running.add_argument("model")
    running.add_argument("data", type=Path)
    running.add_argument("--work", type=Path, required=True, help="folder for rows and encoders")
    running.add_argument("--phase", choices=("screen", "confirm", "ablate", "repeat"), default="screen")
    running.add_argument("--bf16", choices=("true", "false"), default="true", help="false where bfloat16 is emulated")
    running.add_argument("--until", help="HH:MM: begin no cell from then on")
    running.set_defaults(command=run)
    commands.add_parser("freeze", help="choose the settings by the screen").set_defaults(command=freeze)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
