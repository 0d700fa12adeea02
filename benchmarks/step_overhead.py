"""Measures the time that the weights add to a training step, against InfoNCE on the same model and batches.

    python benchmarks/step_overhead.py --data_dir DIR [--batch_sizes 32,64,256] [--pairs 5]

"added" is the work that only Soft-InfoNCE does in the step (the extra terms of the loss), timed by itself, and its
share of the InfoNCE step and of a step of 30 ms, as on a fast GPU. "paired ratio" compares whole steps of both,
interleaved, with a bootstrap interval. "in the worker" is the time in which a data worker computes similarities and
weights of a batch before the step. "without cache" is the share of the step that the estimator would take if it
encoded the batch again in every step. The second table has the seconds of `fit`, which runs once.
"""

import argparse
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from datasets import Dataset

from soft_trainer import (
    BM25Estimator,
    EstimatorCallback,
    SimCSEEstimator,
    SoftInfoNCETrainer,
    SoftInfoNCETrainingArguments,
    TrainedModelEstimator,
)
from soft_trainer.data.codesearchnet import load_folder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.scratch import small_roberta, train_tokenizer
from soft_trainer.hub.export import export_encoder
from soft_trainer.terminal import table

FAST_STEP = 0.030  # seconds


def seconds(function, repetitions: int) -> float:
    """The median seconds of a call."""
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def make_trainer(model, rows, tokenizer, profile, batch_size, estimator, folder) -> SoftInfoNCETrainer:
    """A trainer with a fitted estimator, or with none."""
    trainer = SoftInfoNCETrainer(
        model=model,
        args=SoftInfoNCETrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch_size, use_cpu=True, disable_tqdm=True
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        encoder=profile,
        callbacks=[EstimatorCallback(estimator)] if estimator else [],
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def step(trainer: SoftInfoNCETrainer, batch: dict) -> float:
    """The seconds of a whole step: forward, backward, optimizer."""
    start = time.perf_counter()
    trainer.training_step(trainer.model, dict(batch))
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return time.perf_counter() - start


def loss_seconds(trainer: SoftInfoNCETrainer, batch: dict, width: int) -> float:
    """The seconds from embeddings to their gradients. The rest of a step is the same for all losses."""
    generator = torch.Generator().manual_seed(0)
    size = len(batch.rows)
    q, c = (torch.randn(size, width, generator=generator, requires_grad=True) for _ in range(2))

    def run():
        trainer.batch_loss(q, c, batch).backward()
        q.grad = c.grad = None

    run()
    return seconds(run, 200 if size <= 64 else 60)


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    return tuple(np.percentile(np.median(draws, axis=1), [2.5, 97.5]))


def measure(case: dict, batch_size: int, pairs: int) -> list:
    """A row of the table."""
    plain, soft = case["plain"], case["soft"]
    loader = iter(soft.get_train_dataloader())
    batches = [next(loader) for _ in range(min(pairs, len(soft.get_train_dataloader())))]
    width = soft.model.config.hidden_size
    added = loss_seconds(soft, batches[0], width) - loss_seconds(plain, batches[0], width)
    rows = batches[0].rows
    positives, negatives = batches[0].positives, batches[0].negatives
    worker = seconds(lambda: soft.weigher(rows, rows, positives, negatives), 50)
    times = []
    for place, batch in enumerate(batches):
        order = (plain, soft) if place % 2 else (soft, plain)
        taken = {id(trainer): step(trainer, batch) for trainer in order}
        times.append((taken[id(plain)], taken[id(soft)]))
    whole = statistics.median(before for before, _ in times)
    ratios = [after / before for before, after in times]
    low, high = interval(ratios)
    live = seconds(lambda: case["live"](rows), 3) if case["live"] else worker
    return [
        case["name"],
        batch_size,
        f"{1e3 * whole:.0f}",
        f"{1e3 * added:.3f}",
        f"{added / whole:.3%}",
        f"{added / FAST_STEP:.2%}",
        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
        f"{1e3 * worker:.2f}",
        f"{live / whole:.1%}",
    ]


def live_encoding(estimator, rows: Dataset):
    """A call that encodes a batch with the estimator, as every step would without row caches."""
    encoder = estimator.load()
    two_sided = isinstance(estimator, TrainedModelEstimator)

    def run(numbers):
        chosen = rows.select(numbers)
        encoder.encode_queries([" ".join(tokens) for tokens in chosen["docstring_tokens"]])
        if two_sided:
            encoder.encode_codes([" ".join(tokens) for tokens in chosen["code_tokens"]])

    return run


def main() -> None:
    """Measures every estimator at every batch size and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--batch_sizes", default="32,64,256")
    parser.add_argument("--size", default="256x4", help="hidden size x layers of the encoder in training")
    parser.add_argument("--pairs", type=int, default=5, help="paired steps of each case")
    options = parser.parse_args()
    rows = load_folder(options.data_dir)["train"]
    profile = EncoderProfile(query_length=128, code_length=256)
    texts = (" ".join(tokens) for column in ("docstring_tokens", "code_tokens") for tokens in rows[column])
    tokenizer = train_tokenizer(texts, profile, 16384)
    torch.manual_seed(0)
    model = small_roberta(options.size, tokenizer, profile)
    folder = tempfile.mkdtemp()
    frozen = str(export_encoder(model, tokenizer, profile, f"{folder}/frozen"))
    estimators = [BM25Estimator(), SimCSEEstimator(frozen, None), TrainedModelEstimator(frozen, None)]
    fits, results = [], []
    for estimator in estimators:
        start = time.perf_counter()
        estimator.fit(rows)
        taken = time.perf_counter() - start
        fits.append([type(estimator).__name__, len(rows), f"{taken:.1f}", f"{taken / len(rows) * 1e4:.1f}"])
    for batch_size in map(int, options.batch_sizes.split(",")):
        plain = make_trainer(model, rows, tokenizer, profile, batch_size, None, folder)
        for estimator in estimators:
            soft = make_trainer(model, rows, tokenizer, profile, batch_size, estimator, folder)
            live = None if isinstance(estimator, BM25Estimator) else live_encoding(estimator, rows)
            case = {"name": type(estimator).__name__, "plain": plain, "soft": soft, "live": live}
            results.append(measure(case, batch_size, options.pairs))
            sys.stderr.write(f"{results[-1]}\n")
    headers = ["estimator", "batch", "InfoNCE step, ms", "added, ms", "of the step", "of 30 ms", "paired ratio (95 %)"]
    headers += ["in the worker, ms", "without cache, of the step"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, RoBERTa {options.size}\n")
    print(table(headers, results), "\n")
    print(table(["estimator", "rows", "fit, s", "s per 10,000 rows"], fits))


if __name__ == "__main__":
    main()
