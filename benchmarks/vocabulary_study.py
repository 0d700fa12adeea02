"""Trains static encoders over several vocabularies and compares their search; `vocabulary_study.md` is the protocol.

    OMP_NUM_THREADS=1 python benchmarks/vocabulary_study.py starts --data DIR --teacher FOLDER --work DIR
    OMP_NUM_THREADS=1 python benchmarks/vocabulary_study.py run --data DIR --work DIR [--methods "base"] [--seeds 5]
    python benchmarks/vocabulary_study.py table

DIR has the folders `mined/LANGUAGE`, `csn-ruby` and `cosqa`, and FOLDER is MiniLM. `starts` distils the initial
encoders into WORK, where `teacher_study.py prepare` has stored the teacher's embeddings. `run` trains with every
learning rate, then with the other seeds, and skips runs that are in `vocabulary_study.jsonl`. Each line of that file
is a run: its settings, MRR on valid, CPU seconds, and the rank of every test query. Lines of rejected learning rates
have no ranks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
from measuring import set_up
from torch.nn import functional as F

RESULTS = Path(__file__).with_suffix(".jsonl")
TRAINED = ("python", "java", "ruby")
HELD_OUT = ("php", "javascript", "go", "csn-ruby", "cosqa")
RATES = (3e-3, 1e-2, 1e-3)
LENGTH = 256  # tokens of a text
SCALE = 20.0
BATCH = 512
# Name -> the folder of the start in WORK, or `base`; the trainer; epochs; the weight of the teacher's KL term.
METHODS: dict[str, tuple[str, str, int, float]] = {
    "WordPiece, SIF 1e-4 (before)": ("wordpiece", "loop", 5, 0.0),
    "words of the rows": ("words", "loop", 5, 0.0),
    "base": ("base", "loop", 5, 0.0),
    "words of the rows, teacher": ("words", "loop", 10, 0.3),
    "base, teacher": ("base", "loop", 10, 0.3),
    "model2vec, vocabulary=": ("model2vec", "model2vec", 2, 0.0),
    "words of the rows, model2vec's training": ("words", "model2vec", 2, 0.0),
    "words of the rows, MultipleNegativesRankingLoss": ("words", "sentence_transformers", 5, 0.0),
}
TEMPERATURE = 0.05  # of the teacher's cosines


def rows_of(path: Path) -> list[tuple[str, str, str]]:
    """Reads the query, the code and the url of every row."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return [(" ".join(row["docstring_tokens"]), " ".join(row["code_tokens"]), row["url"]) for row in rows]


class Data:
    """The training rows, and the queries, corpus and relevant codes of every set."""

    def __init__(self, data: Path):
        self.train = [row for name in TRAINED for row in rows_of(data / "mined" / name / "train.jsonl.gz")]
        self.valid = {name: self._set(data / "mined" / name, "valid") for name in TRAINED}
        self.test = {name: self._set(data / "mined" / name, "test") for name in (*TRAINED, "php", "javascript", "go")}
        self.test["csn-ruby"] = self._set(data / "csn-ruby", "test")
        with gzip.open(data / "cosqa/cosqa-retrieval-dev-500.json.gz") as file:
            queries = json.load(file)
        with gzip.open(data / "cosqa/code_idx_map.json.gz") as file:
            numbers = json.load(file)
        codes = sorted(numbers, key=numbers.get)
        position = {numbers[code]: place for place, code in enumerate(codes)}
        relevant = np.array([position[row["retrieval_idx"]] for row in queries])
        self.test["cosqa"] = [row["doc"] for row in queries], codes, relevant

    def _set(self, folder: Path, split: str):
        corpus = rows_of(folder / "codebase.jsonl.gz")
        position = {url: place for place, (_, _, url) in enumerate(corpus)}
        rows = rows_of(folder / f"{split}.jsonl.gz")
        return [row[0] for row in rows], [row[1] for row in corpus], np.array([position[row[2]] for row in rows])


class Start:
    """A distilled encoder, and all texts as its token ids."""

    def __init__(self, folder: Path, data: Data):
        from model2vec import StaticModel

        # model2vec reads every start, ours too.
        model = StaticModel.from_pretrained(folder)
        self.folder = folder
        self.tokenizer = model.tokenizer
        self.vectors = model.embedding.astype(np.float32)
        if model.token_mapping is not None or model.weights is not None:
            raise ValueError("the vectors of this start are not plain")
        self.queries = self.ids([row[0] for row in data.train])
        self.codes = self.ids([row[1] for row in data.train])
        self.valid = {name: self._set(each) for name, each in data.valid.items()}
        self.test = {name: self._set(each) for name, each in data.test.items()}

    def ids(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the token ids of texts."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids[:LENGTH], dtype=np.int64) for each in encodings]

    def _set(self, queries_codes_relevant):
        queries, codes, relevant = queries_codes_relevant
        return self.ids(queries), self.ids(codes), relevant


def embed(vectors: torch.Tensor, rows: list[np.ndarray]) -> torch.Tensor:
    """Embeds texts, Tensor[n, d]."""
    starts = np.cumsum([0, *map(len, rows)])[:-1]
    tokens = torch.from_numpy(np.concatenate(rows))
    return F.normalize(F.embedding_bag(tokens, vectors, torch.from_numpy(starts), mode="mean"), dim=1)


def ranks(vectors: np.ndarray, queries, codes, relevant) -> np.ndarray:
    """Returns the rank of every query's relevant code, int[n]. A tie counts against us."""
    table = torch.from_numpy(vectors)
    scores = (embed(table, queries) @ embed(table, codes).T).numpy()
    own = scores[np.arange(len(scores)), relevant]
    return (scores >= own[:, None]).sum(1)


def by_loop(start: Start, data: Data, rate: float, seed: int, epochs: int, weight: float, work: Path) -> np.ndarray:
    """Trains with InfoNCE, AdamW and a rate that falls to 0, and the teacher's KL term if its weight is not 0."""
    torch.manual_seed(seed)
    order = np.random.default_rng(seed)
    vectors = torch.nn.Parameter(torch.from_numpy(start.vectors).clone())
    optimizer = torch.optim.AdamW([vectors], lr=rate, weight_decay=0.0)
    texts = [np.unique([hash(row[side]) for row in data.train], return_inverse=True)[1] for side in (0, 1)]
    if weight:
        teacher = [np.load(work / f"teacher_{side}.npy").astype(np.float32) for side in ("queries", "codes")]
        teacher = [F.normalize(torch.from_numpy(each), dim=1) for each in teacher]
    pairs = len(data.train)
    steps = -(-pairs // BATCH) * epochs
    step = 0
    for _ in range(epochs):
        shuffled = order.permutation(pairs)
        for first in range(0, pairs, BATCH):
            rows = shuffled[first : first + BATCH]
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
            queries = embed(vectors, [start.queries[row] for row in rows])
            codes = embed(vectors, [start.codes[row] for row in rows])
            scores = queries @ codes.T * SCALE
            equal = (texts[0][rows][:, None] == texts[0][rows]) | (texts[1][rows][:, None] == texts[1][rows])
            positive = torch.eye(len(rows), dtype=torch.bool)
            masked = torch.from_numpy(equal) & ~positive
            loss = F.cross_entropy(scores.masked_fill(masked, -torch.inf), torch.arange(len(rows)))
            if weight:
                numbers = torch.from_numpy(rows)
                taught = teacher[0][numbers] @ teacher[1][numbers].T / TEMPERATURE
                excluded = masked | positive
                target = taught.masked_fill(excluded, -1e9).softmax(1)
                logs = scores.masked_fill(excluded, -1e9).log_softmax(1)
                loss = loss + weight * F.kl_div(logs, target, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return vectors.detach().numpy()


def by_model2vec(start: Start, data: Data, rate: float, seed: int, epochs: int, weight: float, work: Path):
    """Trains with model2vec, whose own loop ends with the best of its checks on 300 valid pairs."""
    from model2vec import StaticModel
    from model2vec.train import StaticModelForPairSimilarity

    static = StaticModel.from_pretrained(start.folder)
    model = StaticModelForPairSimilarity.from_static_model(model=static, n_layers=0, max_length=LENGTH)
    order = np.random.default_rng(seed).permutation(len(data.train))
    valid = []
    for queries, codes, relevant in data.valid.values():
        valid += [(queries[row], codes[relevant[row]]) for row in range(100)]
    model.fit(
        [data.train[row][0] for row in order],
        [data.train[row][1] for row in order],
        learning_rate=rate,
        batch_size=BATCH,
        min_epochs=epochs,
        max_epochs=epochs,
        early_stopping_patience=None,
        device="cpu",
        text_a_val=[pair[0] for pair in valid],
        text_b_val=[pair[1] for pair in valid],
        random_seed=seed,
        temperature=1 / SCALE,
    )
    return model.embeddings.weight.numpy(force=True)


def by_sentence_transformers(start: Start, data: Data, rate: float, seed: int, epochs: int, weight: float, work: Path):
    """Trains a `StaticEmbedding` with sentence-transformers."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = type(start.tokenizer).from_str(start.tokenizer.to_str())
    tokenizer.enable_truncation(LENGTH)
    module = StaticEmbedding(tokenizer, embedding_weights=start.vectors.copy())
    model = SentenceTransformer(modules=[module], device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        str(work / "sentence_transformers"),
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        num_train_epochs=epochs,
        seed=seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = Dataset.from_dict({"query": [row[0] for row in data.train], "code": [row[1] for row in data.train]})
    loss = MultipleNegativesRankingLoss(model, scale=SCALE)
    SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss).train()
    return module.embedding.weight.numpy(force=True)


TRAINERS = {"loop": by_loop, "model2vec": by_model2vec, "sentence_transformers": by_sentence_transformers}


def starts(arguments: argparse.Namespace) -> None:
    """Distils MiniLM over the words of the training rows, by us and by model2vec.

    The start with WordPiece is the folder `wordpiece`, which an earlier release wrote (`teacher_study.py prepare`).
    """
    from model2vec.distill import distill

    from soft_trainer import distil_static
    from soft_trainer.encoders.static import count_words

    set_up(1)
    work = Path(arguments.work)
    texts = work / "words.txt"
    rows = [row for name in TRAINED for row in rows_of(Path(arguments.data) / "mined" / name / "train.jsonl.gz")]
    texts.write_text("".join(f"{query}\n{code}\n" for query, code, _ in rows))
    distil_static(arguments.teacher, work / "words", texts=texts, overwrite=True)
    with texts.open() as file:
        words = list(count_words(file))
    distill(arguments.teacher, vocabulary=words, device="cpu", quantize_to="float32").save_pretrained(
        work / "model2vec"
    )


def finished() -> dict[tuple, dict]:
    """Reads the finished runs by method, learning rate and seed."""
    if not RESULTS.exists():
        return {}
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {(run["method"], run["rate"], run["seed"]): run for run in runs}


def best_rate(runs: dict[tuple, dict], method: str) -> float:
    """Returns the learning rate with the best MRR on valid of seed 1."""
    return max((rate for rate in RATES if (method, rate, 1) in runs), key=lambda rate: runs[method, rate, 1]["valid"])


def run(arguments: argparse.Namespace) -> None:
    """Makes the runs that are missing: for every method, all learning rates first, then the other seeds."""
    set_up(1)
    data = Data(Path(arguments.data))
    work = Path(arguments.work)
    known: dict[str, Start] = {}
    for method in arguments.methods.split(";") if arguments.methods else METHODS:
        name, trainer, epochs, weight = METHODS[method]
        if name not in known:
            known = {name: Start(folder_of(name, work), data)}
        for rate in RATES:
            make(method, known[name], data, rate, 1, work)
        for seed in range(2, arguments.seeds + 1):
            make(method, known[name], data, best_rate(finished(), method), seed, work)


def folder_of(name: str, work: Path) -> Path:
    """Returns the folder of a start."""
    from soft_trainer.encoders.packaged import located

    return Path(located(name)) if name == "base" else work / name


def make(method: str, start: Start, data: Data, rate: float, seed: int, work: Path) -> None:
    """Makes a run, unless it is finished, and appends its line."""
    if (method, rate, seed) in finished():
        return
    _, trainer, epochs, weight = METHODS[method]
    started = time.process_time()
    vectors = TRAINERS[trainer](start, data, rate, seed, epochs, weight, work)
    seconds = time.process_time() - started
    valid = [float((1 / ranks(vectors, *each)).mean()) for each in start.valid.values()]
    line = {"method": method, "rate": rate, "seed": seed, "seconds": round(seconds, 1), "entries": len(vectors)}
    line["valid"] = round(float(np.mean(valid)), 5)
    line["ranks"] = {name: " ".join(map(str, ranks(vectors, *each))) for name, each in start.test.items()}
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(method, rate, seed, line["valid"], line["seconds"], flush=True)


def mrr(runs: list[dict], names: tuple[str, ...]) -> float:
    """Returns the MRR over all queries of sets, averaged over runs."""
    values = [1 / np.array(run["ranks"][name].split(), dtype=float) for run in runs for name in names]
    return float(np.concatenate(values).mean())


def table(arguments: argparse.Namespace) -> None:
    """Prints the MRR of every method with its own best learning rate."""
    from soft_trainer.terminal import table as markdown

    runs = finished()
    lines = []
    for method in METHODS:
        if not any(key[0] == method for key in runs):
            continue
        rate = best_rate(runs, method)
        own = [run for key, run in runs.items() if key[:2] == (method, rate)]
        held_out = [mrr([run], HELD_OUT) for run in own]
        line = [method, own[0]["entries"], rate, len(own), np.mean([run["valid"] for run in own])]
        line += [mrr(own, TRAINED), mrr(own, HELD_OUT), f"{min(held_out):.3f} to {max(held_out):.3f}"]
        lines.append([*line, mrr(own, ("cosqa",)), float(np.median([run["seconds"] for run in own]))])
    headers = ["method", "entries", "rate", "seeds", "valid", "known", "hold-out", "of seeds", "CoSQA", "CPU s"]
    print(markdown(headers, lines))


def main() -> None:
    """Distils, runs or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, call in (("starts", starts), ("run", run)):
        command = commands.add_parser(name)
        command.add_argument("--data", required=True)
        command.add_argument("--work", required=True)
        command.set_defaults(call=call)
        if name == "starts":
            command.add_argument("--teacher", required=True)
        else:
            command.add_argument("--methods", help="only these, separated by semicolons")
            command.add_argument("--seeds", type=int, default=5)
    commands.add_parser("table").set_defaults(call=table)
    arguments = parser.parse_args()
    arguments.call(arguments)


if __name__ == "__main__":
    main()
