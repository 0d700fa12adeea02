"""Measures the time that the weights add to a training step, against InfoNCE on the same model and batches.

    python benchmarks/step_overhead.py --data_dir DIR [--batch_sizes 32,64,256] [--pairs 5] [--clock wall]

"similar" stands for clustered batches with positive-aware weights, the other rows for random batches with Eq. 4.
"added" is the time of the work that only Soft-InfoNCE does in the step (the weights, and the extra terms of the loss),
measured by itself. It is also shown as a percentage of the InfoNCE step, and of a step of 30 ms, as on a fast GPU.
"paired ratio" compares interleaved whole steps, with a bootstrap interval. "in the worker" is the time in which a data
worker computes a batch's similarities before the step, and "drawing" the time in which the sampler draws a batch.
"without cache" is the percentage of the step that the estimator would take if it encoded the batch again in every
step.

The second table compares a step with one extra negative for each query with a step of random pairs that has as many
codes. The third has the seconds of `fit`, which runs once. `--clock cpu` counts the CPU seconds of this process
alone, for use on a busy machine.
"""

import argparse
import dataclasses
import functools
import itertools
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
from soft_trainer.criterion import Targets
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.split import Split
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.scratch import random_model, train_tokenizer
from soft_trainer.terminal import table
from soft_trainer.training.batches import Batch

FAST_STEP = 0.030  # seconds
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter
SIMILAR = {"train_sampling_strategy": "similar", "weighting": "positive_aware"}


def seconds(function, repetitions: int) -> float:
    """The median seconds of a call."""
    taken = []
    for _ in range(repetitions):
        start = clock()
        function()
        taken.append(clock() - start)
    return statistics.median(taken)


def make_trainer(model, rows, tokenizer, profile, batch_size, estimator, folder, **options) -> SoftInfoNCETrainer:
    """A trainer with a fitted estimator, or with none."""
    trainer = SoftInfoNCETrainer(
        model=model,
        args=SoftInfoNCETrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch_size, use_cpu=True, disable_tqdm=True, **options
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        encoder=profile,
        callbacks=[EstimatorCallback(estimator)] if estimator else [],
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def step(trainer: SoftInfoNCETrainer, batch: Batch) -> float:
    """The seconds of a whole step: forward, backward, optimizer."""
    start = clock()
    with trainer.running():
        trainer.training_step(trainer.model, batch)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return clock() - start


def loss_seconds(trainer: SoftInfoNCETrainer, batch: Batch, width: int) -> float:
    """The seconds from embeddings to their gradients. The rest of a step is the same for all losses."""
    generator = torch.Generator().manual_seed(0)
    size = len(batch.rows)
    q, c = (torch.randn(size, width, generator=generator, requires_grad=True) for _ in range(2))

    def run():
        trainer.block_loss(q, c, batch, slice(None)).backward()
        q.grad = c.grad = None

    run()
    return seconds(run, 200 if size <= 64 else 60)


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    return tuple(np.percentile(np.median(draws, axis=1), [2.5, 97.5]))


def without_weights(targets: Targets) -> Targets:
    """The targets of InfoNCE."""
    return dataclasses.replace(targets, similarity=None, weights=None)


def measure(case: dict, batch_size: int, pairs: int) -> list:
    """A row of the table."""
    plain, soft = case["plain"], case["soft"]
    loader = soft.get_train_dataloader()
    batches = first_batches(soft, pairs)
    drawing = seconds(lambda: list(loader.batch_sampler), 3) / len(loader)
    width = soft.model.config.hidden_size
    unweighted = [dataclasses.replace(batch, targets=without_weights(batch.targets)) for batch in batches]
    added = loss_seconds(soft, soft.weighed(batches[0]), width) - loss_seconds(plain, unweighted[0], width)
    rows = batches[0].rows
    codes = batches[0].code_rows
    added += seconds(lambda: soft.target_maker.add_weights(batches[0].targets, rows, codes), 50)
    bare = without_weights(batches[0].targets)
    worker = seconds(lambda: soft.target_maker.add_similarity(bare, rows, codes), 50)
    times = []
    for number, (without, batch) in enumerate(zip(unweighted, batches, strict=True)):
        order = ((plain, without), (soft, batch))
        taken = {id(trainer): step(trainer, given) for trainer, given in (order if number % 2 else order[::-1])}
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
        f"{1e3 * drawing:.3f}",
        f"{live / whole:.1%}",
    ]


def first_batches(trainer: SoftInfoNCETrainer, number: int) -> list[Batch]:
    """The first batches of an epoch."""
    return list(itertools.islice(trainer.get_train_dataloader(), number))


def measure_hard_negatives(own: SoftInfoNCETrainer, pairs: SoftInfoNCETrainer, number: int) -> list:
    """A row of the table: steps with hard negatives, and steps of random pairs with as many codes."""
    times = []
    for repetition, batches in enumerate(zip(*(first_batches(way, number + 1) for way in (own, pairs)), strict=True)):
        order = ((own, 0), (pairs, 1)) if repetition % 2 else ((pairs, 1), (own, 0))
        taken = {side: step(trainer, batches[side]) for trainer, side in order}
        if repetition:  # the first step allocates memory
            times.append((taken[0], taken[1], *(of(batch) for batch in batches for of in (count_codes, count_tokens))))
    with_own, of_pairs, codes, tokens, pair_codes, pair_tokens = map(statistics.median, zip(*times, strict=True))
    low, high = interval([first / second for first, second, *_ in times])
    ratio = statistics.median(first / second for first, second, *_ in times)
    row = [own.args.per_device_train_batch_size, int(codes), int(tokens), f"{1e3 * with_own:.0f}"]
    row += [int(pair_codes), int(pair_tokens), f"{1e3 * of_pairs:.0f}"]
    return [*row, f"{ratio:.3f} ({low:.3f} to {high:.3f})"]


def count_codes(batch: Batch) -> int:
    """The number of codes of a batch."""
    return len(batch.code_rows)


def count_tokens(batch: Batch) -> int:
    """The number of tokens of a batch, padding included."""
    return batch.count_tokens(padding=True)


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
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="the time of the clock, or of the processor")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    rows = load_folder(options.data_dir)["train"]
    profile = EncoderProfile(query_length=128, code_length=256, score_function="cosine", score_scale=20.0)
    texts = (" ".join(tokens) for column in ("docstring_tokens", "code_tokens") for tokens in rows[column])
    tokenizer = train_tokenizer(texts, profile, 16384)
    torch.manual_seed(0)
    model = random_model(options.size, tokenizer, profile)
    folder = tempfile.mkdtemp()
    frozen = str(export_encoder(model, tokenizer, profile, f"{folder}/frozen"))
    estimators = [
        BM25Estimator(),
        SimCSEEstimator(frozen, f"{folder}/rows"),
        TrainedModelEstimator(frozen, f"{folder}/rows"),
    ]
    fits, results = [], []
    for estimator in estimators:
        start = clock()
        estimator.fit(Split.from_pairs(rows))
        taken = clock() - start
        fits.append([type(estimator).__name__, len(rows), f"{taken:.1f}", f"{taken / len(rows) * 1e4:.1f}"])
    make = functools.partial(make_trainer, model, rows, tokenizer, profile)
    cases = [(type(estimator).__name__, estimator, {}) for estimator in estimators]
    cases.append(("TrainedModel, similar", estimators[-1], SIMILAR))
    hard_negatives = []
    for batch_size in map(int, options.batch_sizes.split(",")):
        plain = make(batch_size, None, folder, loss="info_nce")
        for name, estimator, settings in cases:
            soft = make(batch_size, estimator, folder, **settings)
            live = None if isinstance(estimator, BM25Estimator) else live_encoding(estimator, rows)
            case = {"name": name.replace("Estimator", ""), "plain": plain, "soft": soft, "live": live}
            results.append(measure(case, batch_size, options.pairs))
            sys.stderr.write(f"{results[-1]}\n")
        terms = BM25Estimator(document_column="code_tokens")
        own = make(batch_size, terms, folder, negatives_per_query=1, weighting="positive_aware")
        double = make(2 * batch_size, terms, folder, weighting="positive_aware")
        terms.fit(Split.from_pairs(rows))
        hard_negatives.append(measure_hard_negatives(own, double, options.pairs))
        sys.stderr.write(f"{hard_negatives[-1]}\n")
    headers = ["estimator", "batch", "InfoNCE step, ms", "added, ms", "of the step", "of 30 ms", "paired ratio (95 %)"]
    headers += ["in the worker, ms", "drawing, ms", "without cache, of the step"]
    own_headers = ["queries", "functions with hard negatives", "tokens", "step, ms"]
    own_headers += ["functions of random pairs", "their tokens", "their step, ms", "ratio (95 %)"]
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, RoBERTa {options.size}, {options.clock} time\n")
    print(table(headers, results), "\n")
    print(table(own_headers, hard_negatives), "\n")
    print(table(["estimator", "rows", "fit, s", "s per 10,000 rows"], fits))


if __name__ == "__main__":
    main()
