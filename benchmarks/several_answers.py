"""Measures whether several queries of a code, or several codes of a query, cost more than one to one.

    python benchmarks/several_answers.py --folder DIR [--pairs 100000]

DIR holds the rows that `million_rows.py` writes for that number. Every form has as many training pairs: one code for
each query; four queries for each code; four codes for each query. A tiny encoder keeps the forward passes small, so
that the table shows the work on rows: making the split, everything before the first batch, 200 batches of 128 with
further relevant codes as positives, and ranking 10,000 queries. CPU seconds of the process and its workers.
"""

from __future__ import annotations

import argparse
import itertools
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from soft_trainer import BM25Estimator, EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.data.layouts.codesearchnet import load_jsonl
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.scratch import random_model
from soft_trainer.evaluation.ranking import rank_codes
from soft_trainer.evaluation.retrieval import answer_pairs, by_query
from soft_trainer.terminal import table

SHARED = 4  # queries of a code, or codes of a query
BATCH = 128
BATCHES = 200
RANKED_PAIRS = 10_000
WIDTH = 64
FORMS = ("one to one", "four queries of a code", "four codes of a query")


def cpu_seconds() -> float:
    """The CPU seconds of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def make_split(rows: Dataset, form: str) -> Split:
    """Returns a split of one form with a training pair for each row."""
    pairs = np.stack([np.arange(len(rows))] * 2, axis=1)
    if form == "four queries of a code":
        pairs[:, 1] //= SHARED
    elif form == "four codes of a query":
        pairs[:, 0] //= SHARED
    queries = rows.select_columns(["docstring_tokens"]).select(range(pairs[-1, 0] + 1))
    codes = rows.select_columns(["code_tokens"]).select(range(pairs[-1, 1] + 1))
    return Split.from_grades(queries, codes, pairs, np.ones(len(pairs)))


def make_trainer(split: Split, folder: Path, strategy: str) -> SoftInfoNCETrainer:
    """Returns a trainer of a tiny encoder on the split."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    profile = EncoderProfile(pooling="mean")
    arguments = SoftInfoNCETrainingArguments(
        str(folder / "output"),
        per_device_train_batch_size=BATCH,
        train_sampling_strategy=strategy,
        false_negatives="positives",
        report_to=[],
        use_cpu=True,
    )
    return SoftInfoNCETrainer(
        random_model("32x0", tokenizer, profile),
        arguments,
        split,
        processing_class=tokenizer,
        encoder=profile,
        callbacks=[EstimatorCallback(BM25Estimator(cache_dir=None))],
    )


def rank(split: Split) -> None:
    """Ranks the codes of the first pairs for their queries, by random embeddings."""
    pairs = split.judgments.pairs()[:RANKED_PAIRS]
    queries = split.queries.select(range(pairs[-1, 0] + 1))
    codes = split.corpus.select(range(pairs[-1, 1] + 1))
    part = Split.from_grades(queries, codes, pairs, np.ones(len(pairs)))
    of_query, targets = answer_pairs(part.judgments)
    generator = torch.Generator().manual_seed(0)
    query_vectors = torch.randn(len(queries), WIDTH, generator=generator)
    code_vectors = torch.randn(len(codes), WIDTH, generator=generator)
    by_query(rank_codes(query_vectors[of_query], code_vectors, targets), part.judgments)


def stages(rows: Dataset, form: str, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the name of each stage and the call to measure."""
    made = {}
    yield "split", lambda: made.update(split=make_split(rows, form))
    for strategy in ("random", "no_duplicates", "similar"):
        trainer = make_trainer(made["split"], folder, strategy)
        yield f"{strategy}: rows to first batches", lambda trainer=trainer: draw(trainer, 1)
        yield f"{strategy}: {BATCHES} batches", lambda trainer=trainer: draw(trainer, BATCHES)
    yield f"ranking {RANKED_PAIRS:,} pairs", lambda: rank(made["split"])


def draw(trainer: SoftInfoNCETrainer, number: int) -> None:
    """Draws the first batches of an epoch; what the rows need before is done once."""
    for _ in itertools.islice(trainer.get_train_dataloader(), number):
        pass


def main() -> None:
    """Measures all stages of every form, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="as for million_rows.py")
    parser.add_argument("--pairs", type=int, default=100_000)
    arguments = parser.parse_args()
    folder = arguments.folder / str(arguments.pairs)
    rows = load_jsonl(folder / "train.jsonl")
    seconds = {}
    for form in FORMS:
        for name, call in stages(rows, form, folder):
            start = cpu_seconds()
            call()
            seconds.setdefault(name, []).append(f"{cpu_seconds() - start:.1f}")
    print(table(["CPU seconds", *FORMS], [[name, *measured] for name, measured in seconds.items()]))


if __name__ == "__main__":
    main()
