"""Searches judged repositories by words, and with static encoders trained with and without their teacher.

    OMP_NUM_THREADS=1 python benchmarks/teacher_search.py --data DIR --teacher FOLDER --work DIR --repositories DIR \
        --queries queries.jsonl.gz

WORK is the folder of `teacher_study.py prepare`. The encoders come from the teacher study: seeds 1 to 3, with the
chosen settings. Each row of the queries has `repo`, `query`, and the paths `relevant` and `secondary`. The table
shows nDCG@10 of the files, each counted once. `teacher_search.jsonl` gets the value of every query.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import teacher_study
import torch
from measuring import set_up

RESULTS = Path(__file__).with_suffix(".jsonl")
METHODS = ("InfoNCE", "InfoNCE + KL")
SEEDS = (1, 2, 3)
CHUNKS = 60  # enough to name ten files


def encoders(study: teacher_study.TeacherStudy, work: Path) -> dict[str, Path | None]:
    """Trains the encoders that are missing. Returns their folders by name."""
    from soft_trainer import load_encoder
    from soft_trainer.encoders.export import export_encoder

    runs = teacher_study.finished()
    folders: dict[str, Path | None] = {"words": None, "untrained": work / "start"}
    for method in METHODS:

        def valid_of(settings: dict, method: str = method) -> float:
            return runs[teacher_study.key_of(method, settings, 1)]["valid"]

        settings = teacher_study.tuned(method, valid_of)
        for seed in SEEDS:
            folder = work / "encoders" / f"{method}, seed {seed}".replace(" ", "_")
            if not folder.exists():
                with tempfile.TemporaryDirectory() as scratch:
                    vectors = study.train(method, settings, seed, scratch)
                start = load_encoder(study.model, device="cpu")
                start.model.word_embedding.weight.data.copy_(torch.from_numpy(vectors))
                export_encoder(start.model, start.tokenizer, start.profile, folder)
            folders[f"{method}, seed {seed}"] = folder
    return folders


def ndcg(paths: list[str], targets: set[str]) -> float:
    """Computes nDCG@10 of a list of files, each named once. Every target has gain 1."""
    named = list(dict.fromkeys(paths))[:10]
    gain = sum(1 / math.log2(rank + 2) for rank, path in enumerate(named) if path in targets)
    return gain / sum(1 / math.log2(rank + 2) for rank in range(min(10, len(targets))))


def main() -> None:
    """Measures and prints the table."""
    from soft_trainer.evaluation.significance import compare_crossed
    from soft_trainer.search import CodeIndex
    from soft_trainer.terminal import table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "teacher", "work", "repositories", "queries"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    arguments = parser.parse_args()
    set_up(1)
    study = teacher_study.TeacherStudy(arguments.data, arguments.teacher, arguments.work)
    with gzip.open(arguments.queries, "rt") as file:
        queries = [json.loads(line) for line in file]
    repositories = sorted({row["repo"] for row in queries})
    values: dict[str, list[np.ndarray]] = {}
    for name, encoder in encoders(study, arguments.work).items():
        values[name] = []
        for repository in repositories:
            own = [row for row in queries if row["repo"] == repository]
            with tempfile.TemporaryDirectory() as folder:
                index = CodeIndex.build(arguments.repositories / repository, folder, encoder, history=False)
                found = [index.search(row["query"], CHUNKS, lexical=encoder is None) for row in own]
            of_queries = []
            for row, results in zip(own, found, strict=True):
                targets = {target["path"] if isinstance(target, dict) else target for target in row["relevant"]}
                targets |= set(row["secondary"])
                of_queries.append(ndcg([result.path for result in results], targets))
            values[name].append(np.array(of_queries))
        print(name, round(float(np.concatenate(values[name]).mean()), 4), flush=True)
    with RESULTS.open("w") as file:
        for name, of_repositories in values.items():
            ranks = {key: each.round(4).tolist() for key, each in zip(repositories, of_repositories, strict=True)}
            file.write(json.dumps({"encoder": name, "ndcg": ranks}) + "\n")
    lines = []
    groups = {"words": ["words"], "untrained": ["untrained"]}
    groups |= {method: [f"{method}, seed {seed}" for seed in SEEDS] for method in METHODS}
    for group, names in groups.items():
        line = [group, float(np.mean([np.concatenate(values[name]).mean() for name in names]))]
        for base in ("words", "untrained"):
            if group == base or group == "words":
                line.append("")
                continue
            differences = []
            for number in range(len(repositories)):
                differences.append(np.stack([values[name][number] - values[base][number] for name in names]))
            mean = np.concatenate([each.mean(0) for each in differences]).mean()
            interval = compare_crossed([np.concatenate(differences, axis=1)]).interval
            line.append(f"{mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]")
        lines.append(line)
    print(table(["encoder", "nDCG@10", "- words", "- untrained"], lines))


if __name__ == "__main__":
    main()
