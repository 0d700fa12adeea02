"""Trains static encoders in several ways from one start and compares their search; `static_study.md` is the protocol.

    OMP_NUM_THREADS=1 python benchmarks/static_study.py run --data DIR --model FOLDER
    python benchmarks/static_study.py table

DIR has a folder of rows for each language of the protocol, `csn-ruby`, and `cosqa`. FOLDER is the distilled encoder
that all trainings start from. `run` trains with every learning rate, then with the other seeds, and skips runs that
are in `static_study.jsonl`. Each line of that file is a run: its settings, MRR on valid, CPU seconds, and the rank
of every test query.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse
from datasets import Dataset, concatenate_datasets
from measuring import set_up

RESULTS = Path(__file__).with_suffix(".jsonl")
TRAINED = ("python", "java", "ruby")
HELD_OUT = ("php", "javascript", "go", "csn-ruby", "cosqa")
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = (1, 2, 3, 4, 5)
EPOCHS = 2
LENGTH = 256  # tokens of a text
SCALE = 20.0

SIMILAR = {"train_sampling_strategy": "similar"}
AWARE = {"weighting": "positive_aware"}
# Name -> batch size, estimator, options. The last two are other libraries.
METHODS: dict[str, tuple[int, str | None, dict]] = {
    "random 512, InfoNCE": (512, None, {"loss": "info_nce"}),
    "sentence-transformers 512": (512, None, {}),
    "model2vec 512": (512, None, {}),
    "similar 512, positive-aware": (512, "initial_model", SIMILAR | AWARE),
    "similar 512, InfoNCE": (512, "initial_model", SIMILAR | {"loss": "info_nce"}),
    "random 512, BM25": (512, "bm25", {}),
    "random 512, positive-aware": (512, "initial_model", AWARE),
    "random 4096, InfoNCE": (4096, None, {"loss": "info_nce"}),
    "random 128, InfoNCE": (128, None, {"loss": "info_nce"}),
}
EXTERNAL = ("sentence-transformers 512", "model2vec 512")


@dataclass
class Task:
    """Queries and the corpus of a set as token ids, and the index of every query's relevant function in the corpus."""

    queries: scipy.sparse.csr_array
    codes: scipy.sparse.csr_array
    answers: np.ndarray

    def ranks(self, vectors: np.ndarray) -> np.ndarray:
        """Returns the rank of every query's answer, int[n]: one more than the number of codes with higher scores."""
        scores = unit(self.queries @ vectors) @ unit(self.codes @ vectors).T
        own = scores[np.arange(len(scores)), self.answers]
        return (scores > own[:, None]).sum(1) + 1


def unit(embeddings: np.ndarray) -> np.ndarray:
    """Scales rows to length one."""
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True).clip(1e-12)


def counts(encoder, texts: list[str]) -> scipy.sparse.csr_array:
    """Counts the tokens of every text, float32[n, V]."""
    ids = encoder.tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
    ends = np.cumsum([0, *map(len, ids)])
    tokens = np.concatenate(ids).astype(np.int64)
    shape = (len(texts), encoder.model.config.vocab_size)
    return scipy.sparse.csr_array((np.ones(len(tokens), np.float32), tokens, ends), shape=shape)


class Study:
    """The rows, the start and the tasks of all runs."""

    def __init__(self, data: Path, model: Path):
        from soft_trainer import load_encoder
        from soft_trainer.data.layouts.codesearchnet import load_folder
        from soft_trainer.data.tokens import encoder_texts

        self.data = data
        self.model = model
        start = load_encoder(model, device="cpu")
        self.profile = start.profile.replace(
            query_length=LENGTH, code_length=LENGTH, score_function="cosine", score_scale=SCALE
        )
        self.start = start
        self.read = load_folder
        self.texts_of = encoder_texts
        self.rows: Dataset = concatenate_datasets([self.folder(name)["train"] for name in TRAINED])
        self.queries = list(encoder_texts(self.rows, "query", self.profile))
        self.codes = list(encoder_texts(self.rows, "code", self.profile))
        self.valid = {name: self.task(name, "valid") for name in TRAINED}
        self.test = {name: self.task(name, "test") for name in (*TRAINED, *HELD_OUT) if name != "cosqa"}
        self.test["cosqa"] = self.cosqa()

    def folder(self, name: str):
        """Reads the splits of a language."""
        folder = self.data / name if name == "csn-ruby" else self.data / "mined" / name
        return self.read(folder)

    def task(self, name: str, split: str) -> Task:
        """Makes the task of a split: its queries over the language's codebase."""
        splits = self.folder(name)
        codebase = splits["codebase"]
        position = {url: number for number, url in enumerate(codebase["url"])}
        queries = counts(self.start, list(self.texts_of(splits[split], "query", self.profile)))
        codes = counts(self.start, list(self.texts_of(codebase, "code", self.profile)))
        return Task(queries, codes, np.array([position[url] for url in splits[split]["url"]]))

    def cosqa(self) -> Task:
        """Makes the task of CoSQA's human queries."""
        with gzip.open(self.data / "cosqa/cosqa-retrieval-dev-500.json.gz") as file:
            rows = json.load(file)
        with gzip.open(self.data / "cosqa/code_idx_map.json.gz") as file:
            rank_of = json.load(file)
        codes = sorted(rank_of, key=rank_of.get)
        position = {rank_of[code]: number for number, code in enumerate(codes)}
        answers = np.array([position[row["retrieval_idx"]] for row in rows])
        return Task(counts(self.start, [row["doc"] for row in rows]), counts(self.start, codes), answers)

    def trained(self, method: str, rate: float, seed: int, folder: str) -> np.ndarray:
        """Trains with a method and returns the vectors of the tokens."""
        if method.startswith("model2vec"):
            return self.by_model2vec(rate, seed)
        if method.startswith("sentence"):
            return self.by_sentence_transformers(rate, seed, folder)
        return self.by_us(method, rate, seed, folder)

    def by_us(self, method: str, rate: float, seed: int, folder: str) -> np.ndarray:
        """Trains with `SoftInfoNCETrainer`."""
        from soft_trainer import BM25Estimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_encoder
        from soft_trainer.estimators.frozen_encoder import InitialModelEstimator

        size, estimator, options = METHODS[method]
        options = {"distill_weight": 0.0} | options  # the encoder's teacher is no default here
        callbacks = []
        if estimator == "bm25":
            callbacks.append(BM25Estimator())
        elif estimator is not None:
            callbacks.append(InitialModelEstimator())
        encoder = load_encoder(self.model, device="cpu")
        args = SoftInfoNCETrainingArguments(folder, **self.shared(size, rate, seed), **options)
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

    def shared(self, size: int, rate: float, seed: int) -> dict:
        """Returns the training arguments that transformers' trainers share."""
        return {
            "per_device_train_batch_size": size,
            "learning_rate": rate,
            "num_train_epochs": EPOCHS,
            "seed": seed,
            "dataloader_drop_last": False,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }

    def by_model2vec(self, rate: float, seed: int, epochs: int = EPOCHS) -> np.ndarray:
        """Trains with model2vec, whose own loop ends with the best of its checks on 300 valid pairs."""
        from model2vec import StaticModel
        from model2vec.train import StaticModelForPairSimilarity

        static = StaticModel.from_pretrained(self.model)
        model = StaticModelForPairSimilarity.from_static_model(model=static, n_layers=0, max_length=LENGTH)
        valid = [self.folder(name)["valid"].select(range(100)) for name in TRAINED]
        rows = concatenate_datasets(valid)
        order = np.random.default_rng(seed).permutation(len(self.queries))
        model.fit(
            [self.queries[row] for row in order],
            [self.codes[row] for row in order],
            learning_rate=rate,
            batch_size=512,
            min_epochs=epochs,
            max_epochs=epochs,
            early_stopping_patience=None,
            device="cpu",
            text_a_val=list(self.texts_of(rows, "query", self.profile)),
            text_b_val=list(self.texts_of(rows, "code", self.profile)),
            random_seed=seed,
            temperature=1 / SCALE,
        )
        return model.embeddings.weight.numpy(force=True)

    def by_sentence_transformers(self, rate: float, seed: int, folder: str) -> np.ndarray:
        """Trains a `StaticEmbedding` with sentence-transformers."""
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        tokenizer.enable_truncation(LENGTH)
        vectors = self.start.model.word_embedding.weight.numpy(force=True).copy()
        module = StaticEmbedding(tokenizer, embedding_weights=vectors)
        model = SentenceTransformer(modules=[module], device="cpu")
        SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(folder, **self.shared(512, rate, seed)),
            train_dataset=Dataset.from_dict({"query": self.queries, "code": self.codes}),
            loss=MultipleNegativesRankingLoss(model, scale=SCALE),
        ).train()
        return module.embedding.weight.numpy(force=True)


def finished() -> dict[tuple, dict]:
    """Reads the finished runs by method, learning rate and seed."""
    if not RESULTS.exists():
        return {}
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {(run["method"], run["rate"], run["seed"]): run for run in runs}


def best_rate(runs: dict[tuple, dict], method: str) -> float:
    """Returns the learning rate with the best MRR on valid of seed 1."""
    return max(RATES, key=lambda rate: runs[method, rate, 1]["valid"])


def run(arguments: argparse.Namespace) -> None:
    """Makes the runs that are missing: all learning rates first, then one seed of all methods after the other."""
    set_up(1)
    study = Study(Path(arguments.data), Path(arguments.model))
    plan = [(method, rate, 1) for method in METHODS for rate in RATES]
    for settings in plan:
        make(study, *settings)
    for seed in SEEDS[1:]:
        for method in METHODS:
            make(study, method, best_rate(finished(), method), seed)


def make(study: Study, method: str, rate: float, seed: int) -> None:
    """Makes a run, unless it is finished, and appends its line."""
    if (method, rate, seed) in finished():
        return
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        vectors = study.trained(method, rate, seed, folder)
    seconds = time.process_time() - started
    valid = [float((1 / task.ranks(vectors)).mean()) for task in study.valid.values()]
    line = {"method": method, "rate": rate, "seed": seed, "seconds": round(seconds, 1)}
    line["valid"] = round(float(np.mean(valid)), 5)
    line["ranks"] = {name: " ".join(map(str, task.ranks(vectors))) for name, task in study.test.items()}
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(method, rate, seed, line["valid"], line["seconds"], flush=True)


def reciprocal(run: dict, name: str) -> np.ndarray:
    """Returns the reciprocal ranks of the queries of a set."""
    return 1 / np.array(run["ranks"][name].split(), dtype=np.float64)


def table(arguments: argparse.Namespace) -> None:
    """Prints the MRR of every method with its own best learning rate, and its difference from the best external."""
    from soft_trainer.evaluation.significance import compare_crossed
    from soft_trainer.terminal import table as markdown

    runs = finished()
    complete = [method for method in METHODS if all((method, rate, 1) in runs for rate in RATES)]
    rates = {method: best_rate(runs, method) for method in complete}
    external = [method for method in complete if method in EXTERNAL]
    base = max(external, key=lambda method: runs[method, rates[method], 1]["valid"])
    lines = []
    for method in complete:
        own = {seed: runs[method, rates[method], seed] for seed in SEEDS if (method, rates[method], seed) in runs}
        others = {seed: runs[base, rates[base], seed] for seed in SEEDS if (base, rates[base], seed) in runs}
        seeds = sorted(own.keys() & others.keys())
        line = [method, rates[method], len(seeds), np.mean([own[seed]["valid"] for seed in seeds])]
        line.append(float(np.median([own[seed]["seconds"] for seed in seeds])))
        for names in (TRAINED, HELD_OUT):
            differences = []
            values = []
            for name in names:
                of_own = np.stack([reciprocal(own[seed], name) for seed in seeds])
                of_base = np.stack([reciprocal(others[seed], name) for seed in seeds])
                values.append(of_own.mean(0))
                differences.append(of_own - of_base)
            line.append(float(np.concatenate(values).mean()))
            if method == base:
                line.append("")
                continue
            mean = np.concatenate([each.mean(0) for each in differences]).mean()
            interval = compare_crossed([np.concatenate(differences, axis=1)]).interval
            line.append(f"{mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]")
        lines.append(line)
    headers = ["method", "rate", "seeds", "valid", "CPU s", "known", f"- {base}", "hold-out", f"- {base}"]
    print(markdown(headers, lines))


def main() -> None:
    """Runs or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.add_argument("--data", required=True)
    command.add_argument("--model", required=True)
    command.set_defaults(call=run)
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
