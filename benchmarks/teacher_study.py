"""Trains static encoders with and without their teacher and compares their search; `teacher_study.md` is the protocol.

    OMP_NUM_THREADS=1 python benchmarks/teacher_study.py prepare --data DIR --teacher FOLDER --work DIR [--start base]
    OMP_NUM_THREADS=1 python benchmarks/teacher_study.py run --data DIR --teacher FOLDER --work DIR
    python benchmarks/teacher_study.py table

`prepare` writes to WORK the static encoder that all trainings start from (`--start base`: the package's), and the
teacher's embeddings of the training rows. `run` tunes every method, then trains the other seeds, and skips runs that
are in `teacher_study.jsonl`. Each line of that file is a run: its settings, MRR on valid, CPU seconds, and the rank of
every test query.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from measuring import set_up
from static_study import HELD_OUT, LENGTH, SCALE, SEEDS, TRAINED, Study, reciprocal, unit

RESULTS = Path(__file__).with_suffix(".jsonl")
RATES = (1e-3, 3e-3, 1e-2)
EPOCHS = (5, 2, 10)  # the first ones while the rate is chosen
TEMPERATURES = (0.05, 0.02, 0.1)
NEGATIVES = 8
NEAREST = 100

TEMPERATURE = {"temperature": TEMPERATURES}
TERM = {"weight": (1.0, 0.3, 3.0)} | TEMPERATURE
AWARE = {"weighting": "positive_aware"}
# Name -> the options of ours, or None for another library's; and the values of the method's own settings. The first
# runs use the first values.
METHODS: dict[str, tuple[dict | None, dict]] = {
    "InfoNCE": ({"loss": "info_nce"}, {}),
    "positive-aware weights": (AWARE, {}),
    "InfoNCE + KL": ({"loss": "info_nce"}, TERM),
    "InfoNCE + KL to the start": ({"loss": "info_nce", "teacher": "start"}, TERM),
    "InfoNCE + KL in SentenceTransformerTrainer": (None, TERM),
    "MultipleNegativesRankingLoss": (None, {}),
    "GISTEmbedLoss": (None, {"contrasts": (True, False)}),
    "model2vec": (None, {}),
    "DistillKLDivLoss": (None, TEMPERATURE),
    "MarginMSELoss": (None, {}),
}
WITHOUT_TEACHER = ("MultipleNegativesRankingLoss", "model2vec")
WITH_TEACHER = ("GISTEmbedLoss", "DistillKLDivLoss", "MarginMSELoss")
HUMAN = ("cosqa",)


class TeacherStudy(Study):
    """The rows, the start, the tasks, and the teacher's embeddings of the training rows."""

    def __init__(self, data: Path, teacher: Path, work: Path):
        super().__init__(data, work / "start")
        self.teacher = teacher
        self.teacher_queries = np.load(work / "teacher_queries.npy")
        self.teacher_codes = np.load(work / "teacher_codes.npy")
        self.epochs = 0

    def shared(self, size: int, rate: float, seed: int) -> dict:
        """Returns the training arguments that transformers' trainers share."""
        return super().shared(size, rate, seed) | {"num_train_epochs": self.epochs}

    def train(self, method: str, settings: dict, seed: int, folder: str) -> np.ndarray:
        """Trains with a method and returns the vectors of the tokens."""
        options, _ = METHODS[method]
        self.epochs = settings["epochs"]
        rate = settings["rate"]
        if options is not None:
            return self.by_us_with_teacher(options, settings, seed, folder)
        if method == "model2vec":
            return self.by_model2vec(rate, seed, self.epochs)
        return self.by_loss_of_sentence_transformers(method, settings, seed, folder)

    def by_us_with_teacher(self, options: dict, settings: dict, seed: int, folder: str) -> np.ndarray:
        """Trains with `SoftInfoNCETrainer`."""
        from soft_trainer import SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder

        options = {"distill_weight": 0.0} | options  # the static encoder's teacher is no default here
        estimator = self.estimator(options.pop("teacher", None))
        if "weight" in settings:
            # The teacher's scores are cosines x 20.
            term = {"distill_weight": settings["weight"], "distill_temperature": SCALE * settings["temperature"]}
            options |= term
        callbacks = []
        if options != {"loss": "info_nce", "distill_weight": 0.0}:
            callbacks.append(estimator)
        encoder = load_encoder(self.model, device="cpu")
        args = SoftInfoNCETrainingArguments(folder, **self.shared(512, settings["rate"], seed), **options)
        trainer = SoftInfoNCETrainer(
            encoder.model,
            args,
            self.rows,
            processing_class=encoder.tokenizer,
            encoder=self.profile,
            callbacks=callbacks,
        )
        trainer.train()
        return encoder.model.word_embedding.weight.numpy(force=True)

    def estimator(self, teacher: str | None):
        """Returns a `TrainedModelEstimator` that reads the teacher's embeddings instead of encoding the rows.

        Args:
            teacher: "start" for the static encoder before training as its own teacher.
        """
        from soft_trainer.estimators.frozen_encoder import InitialModelEstimator, TrainedModelEstimator

        if teacher == "start":
            return InitialModelEstimator(cache_dir=None)
        embeddings = {"query": self.teacher_queries, "code": self.teacher_codes}

        class SavedTeacher(TrainedModelEstimator):
            def encode_rows(self, dataset, side, encoder):
                assert len(dataset) == len(embeddings[side])
                return embeddings[side]

        return SavedTeacher(str(self.teacher), cache_dir=None)

    def by_loss_of_sentence_transformers(self, method: str, settings: dict, seed: int, folder: str) -> np.ndarray:
        """Trains a `StaticEmbedding` with a loss of sentence-transformers."""
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.sentence_transformer import losses
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding
        from sentence_transformers.util import pairwise_cos_sim
        from tokenizers import Tokenizer

        from soft_trainer.sentence_transformers import SoftInfoNCELoss, with_rows

        columns = {"query": self.queries, "code": self.codes}
        if method in ("DistillKLDivLoss", "MarginMSELoss"):
            columns |= self.negative_columns(seed)
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        tokenizer.enable_truncation(LENGTH)
        vectors = self.start.model.word_embedding.weight.numpy(force=True).copy()
        kind = StaticEmbedding
        if "negative_0" in columns:
            kind = self.remembering(kind)  # ten columns would be tokenised in every epoch
        module = kind(tokenizer, embedding_weights=vectors)
        model = SentenceTransformer(modules=[module], device="cpu")
        if method == "GISTEmbedLoss":
            loss = self.guided(model, tokenizer, settings["contrasts"])
        elif method == "DistillKLDivLoss":
            # A temperature of its own would scale the loss by its square, and gradients below the epsilon of Adam.
            temperature = settings["temperature"]
            columns["label"] = (np.array(columns["label"]) / temperature).tolist()
            loss = losses.DistillKLDivLoss(model, lambda one, other: pairwise_cos_sim(one, other) / temperature)
        elif method == "MarginMSELoss":
            loss = losses.MarginMSELoss(model, pairwise_cos_sim)
        elif method == "InfoNCE + KL in SentenceTransformerTrainer":
            rows = with_rows(Dataset.from_dict(columns))
            columns["label"] = rows["label"][:]
            term = {"distill_weight": settings["weight"], "distill_temperature": SCALE * settings["temperature"]}
            loss = SoftInfoNCELoss(model, self.estimator(None), rows, loss="info_nce", scale=SCALE, **term)
        else:
            loss = losses.MultipleNegativesRankingLoss(model, scale=SCALE)
        SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(folder, **self.shared(512, settings["rate"], seed)),
            train_dataset=Dataset.from_dict(columns),
            loss=loss,
        ).train()
        return module.embedding.weight.numpy(force=True)

    def remembering(self, kind: type) -> type:
        """Returns a `StaticEmbedding` that keeps the token ids of the texts that it has seen."""
        seen = {}

        class Remembering(kind):
            def preprocess(self, inputs, prompt=None, **options):
                new = [text for text in dict.fromkeys(inputs) if text not in seen]
                encodings = self.tokenizer.encode_batch(new, add_special_tokens=False)
                seen.update((text, torch.tensor(each.ids)) for text, each in zip(new, encodings, strict=True))
                ids = [seen[text] for text in inputs]
                ends = torch.tensor([len(each) for each in ids]).cumsum(0)
                return {"input_ids": torch.cat(ids), "offsets": torch.cat([torch.zeros(1, dtype=int), ends[:-1]])}

        return Remembering

    def negative_columns(self, seed: int) -> dict[str, list]:
        """Draws each query's negatives from the teacher's nearest codes. Returns columns of texts and of scores."""
        generator = np.random.default_rng(seed)
        cosines = unit(self.teacher_queries) @ unit(self.teacher_codes).T
        own = cosines.diagonal().copy()
        np.fill_diagonal(cosines, -np.inf)
        nearest = np.argpartition(-cosines, NEAREST, axis=1)[:, :NEAREST]
        drawn = generator.permuted(nearest, axis=1)[:, :NEGATIVES]
        scores = np.concatenate([own[:, None], np.take_along_axis(cosines, drawn, axis=1)], axis=1)
        columns = {f"negative_{number}": [self.codes[row] for row in drawn[:, number]] for number in range(NEGATIVES)}
        return columns | {"label": scores.astype(np.float32).tolist()}

    def guided(self, model, tokenizer, contrasts: bool):
        """Returns a `GISTEmbedLoss` whose guide looks up the teacher's embeddings by the tokens of a text."""
        from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

        found = {}
        sides = ((self.queries, self.teacher_queries), (self.codes, self.teacher_codes))
        for texts, embeddings in sides:
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
            for encoding, embedding in zip(encodings, embeddings, strict=True):
                found[tuple(encoding.ids)] = torch.from_numpy(embedding)

        class Guide(torch.nn.Module):
            def forward(self, features: dict) -> dict:
                ends = [*features["offsets"].tolist()[1:], len(features["input_ids"])]
                ids = features["input_ids"].tolist()
                texts = [tuple(ids[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
                return features | {"sentence_embedding": torch.stack([found[text] for text in texts])}

        class Guided(GISTEmbedLoss):
            """The same loss, without its check of tokenizers, and with cosines as one product of matrices."""

            def __init__(self):
                torch.nn.Module.__init__(self)
                self.model = model
                self.guide = Guide()
                self.temperature = 1 / SCALE
                self.must_retokenize = False
                self.margin_strategy = "absolute"
                self.margin = 0.0
                self.contrast_anchors = contrasts
                self.contrast_positives = contrasts
                self.gather_across_devices = False
                self.cross_entropy_loss = torch.nn.CrossEntropyLoss()

            def sim_matrix(self, first, second):
                normalize = torch.nn.functional.normalize
                return normalize(first, dim=1) @ normalize(second, dim=1).T

        return Guided()


def prepare(arguments: argparse.Namespace) -> None:
    """Distils the start and encodes the training rows with the teacher."""
    from datasets import concatenate_datasets

    from soft_trainer.data.layouts.codesearchnet import load_folder
    from soft_trainer.data.split import Split
    from soft_trainer.encoders.distilling import distil_static
    from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator
    from soft_trainer.packaged import located

    set_up(1)
    work = Path(arguments.work)
    work.mkdir(parents=True, exist_ok=True)
    rows_of = {name: load_folder(Path(arguments.data) / "mined" / name)["train"] for name in (*TRAINED, "go")}
    texts = work / "texts.txt"
    with texts.open("w") as file:
        for rows in rows_of.values():
            for column in ("docstring", "code"):
                file.write("\n".join(rows[column]) + "\n")
    if arguments.start == "base":
        shutil.copytree(located("base"), work / "start", dirs_exist_ok=True)
    else:
        distil_static(arguments.teacher, work / "start", 256, texts, overwrite=True)
    started = time.process_time()
    estimator = TrainedModelEstimator(arguments.teacher, cache_dir=None)
    estimator.fit(Split.from_pairs(concatenate_datasets([rows_of[name] for name in TRAINED])))
    np.save(work / "teacher_queries.npy", estimator._queries)
    np.save(work / "teacher_codes.npy", estimator._codes)
    print(f"encoded the rows in {time.process_time() - started:.0f} CPU s")


def key_of(method: str, settings: dict, seed: int) -> str:
    """Returns what tells a run from others."""
    return json.dumps([method, settings, seed], sort_keys=True)


def finished() -> dict[str, dict]:
    """Reads the finished runs by method, settings and seed."""
    if not RESULTS.exists():
        return {}
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {key_of(run["method"], run["settings"], run["seed"]): run for run in runs}


def tuned(method: str, valid_of) -> dict:
    """Returns the settings of a method with the best MRR on valid: the rate, the epochs, then its own settings.

    Args:
        valid_of: returns the MRR on valid of the run with some settings and seed 1.
    """
    _, own = METHODS[method]
    settings = {"rate": RATES[0], "epochs": EPOCHS[0]} | {name: values[0] for name, values in own.items()}
    for name, values in ({"rate": RATES, "epochs": EPOCHS} | own).items():
        choices = [settings | {name: value} for value in values]
        settings = max(choices, key=valid_of)
    return settings


def run(arguments: argparse.Namespace) -> None:
    """Makes the runs that are missing: tunes all methods first, then one seed of all methods after the other."""
    set_up(1)
    study = TeacherStudy(Path(arguments.data), Path(arguments.teacher), Path(arguments.work))
    methods = arguments.methods.split(";") if arguments.methods else list(METHODS)
    chosen = {}
    for method in methods:
        chosen[method] = tuned(method, lambda settings, method=method: make(study, method, settings, 1)["valid"])
        print(method, chosen[method], flush=True)
    for seed in SEEDS[1:]:
        for method in methods:
            make(study, method, chosen[method], seed)


def make(study: TeacherStudy, method: str, settings: dict, seed: int) -> dict:
    """Makes a run, unless it is finished, and appends its line."""
    done = finished().get(key_of(method, settings, seed))
    if done is not None:
        return done
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        vectors = study.train(method, settings, seed, folder)
    seconds = time.process_time() - started
    valid = [float((1 / task.ranks(vectors)).mean()) for task in study.valid.values()]
    line = {"method": method, "settings": settings, "seed": seed, "seconds": round(seconds, 1)}
    line["valid"] = round(float(np.mean(valid)), 5)
    line["ranks"] = {name: " ".join(map(str, task.ranks(vectors))) for name, task in study.test.items()}
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(method, settings, seed, line["valid"], line["seconds"], flush=True)
    return line


def table(arguments: argparse.Namespace) -> None:
    """Prints the MRR of every tuned method, and its differences from the best external methods on valid."""
    from soft_trainer.terminal import table as markdown

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
    bases = [best_of(seeds_of, names) for names in (WITHOUT_TEACHER, WITH_TEACHER)]
    for method, own in seeds_of.items():
        settings = ", ".join(f"{name} {value:g}" for name, value in own[1]["settings"].items())
        every = own.values()
        line = [method, settings, len(own), np.mean([each["valid"] for each in every])]
        line.append(float(np.median([each["seconds"] for each in every])))
        for names in (TRAINED, HELD_OUT, HUMAN):
            line.append(float(np.concatenate([mean_of(own, name) for name in names]).mean()))
        held_out = [np.concatenate([reciprocal(each, name) for name in HELD_OUT]).mean() for each in every]
        line.append(f"{min(held_out):.3f} to {max(held_out):.3f}")
        for base in bases:
            line.append("" if base in (None, method) else difference(own, seeds_of[base], HELD_OUT))
        lines.append(line)
    headers = ["method", "settings", "seeds", "valid", "CPU s", "known", "hold-out", "CoSQA", "hold-out of seeds"]
    print(markdown([*headers, *(f"- {base}" for base in bases)], lines))


def best_of(seeds_of: dict[str, dict[int, dict]], names) -> str | None:
    """Returns the method with the best MRR on valid of seed 1, or None if none of them is finished."""
    done = [name for name in names if name in seeds_of]
    return max(done, key=lambda name: seeds_of[name][1]["valid"], default=None)


def mean_of(own: dict[int, dict], name: str) -> np.ndarray:
    """Returns every query's reciprocal rank in a set, averaged over the seeds."""
    return np.stack([reciprocal(each, name) for each in own.values()]).mean(0)


def difference(own: dict[int, dict], base: dict[int, dict], names) -> str:
    """Returns the difference in MRR over sets, with its interval over seeds and queries."""
    from soft_trainer.evaluation.significance import compare_crossed

    seeds = sorted(own.keys() & base.keys())
    differences = []
    for name in names:
        of_own = np.stack([reciprocal(own[seed], name) for seed in seeds])
        of_base = np.stack([reciprocal(base[seed], name) for seed in seeds])
        differences.append(of_own - of_base)
    mean = np.concatenate([each.mean(0) for each in differences]).mean()
    interval = compare_crossed([np.concatenate(differences, axis=1)]).interval
    return f"{mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def main() -> None:
    """Prepares, runs, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, call in (("prepare", prepare), ("run", run)):
        command = commands.add_parser(name)
        command.add_argument("--data", required=True)
        command.add_argument("--teacher", required=True)
        command.add_argument("--work", required=True)
        command.set_defaults(call=call)
        if name == "run":
            command.add_argument("--methods", help="only these, separated by semicolons")
        else:
            command.add_argument("--start", default="distilled", choices=("distilled", "base"))
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
