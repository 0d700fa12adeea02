"""Trains an encoder with sentence-transformers' trainer, and measures it as `soft-trainer train` measures ours.

    python benchmarks/baseline.py MODEL DATA_DIR OUTPUT_DIR --learning_rate 2e-5
    python benchmarks/baseline.py MODEL DATA_DIR OUTPUT_DIR --loss gist --mined_negatives 1

The losses are MultipleNegativesRankingLoss, in batches without duplicates, and CachedGISTEmbedLoss, guided by the
encoder before training. OUTPUT_DIR gets the encoder, and the rank of every query from `soft-trainer evaluate`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedGISTEmbedLoss, MultipleNegativesRankingLoss
from sentence_transformers.util import mine_hard_negatives

from soft_trainer import load_rows

MARGIN = 0.05  # relative, of mining and of GIST
RANKS = 20  # negatives are mined from this many nearest codes


def pairs_of(rows: Dataset) -> Dataset:
    """Returns the texts of rows as anchors and positives."""
    texts = {"anchor": [], "positive": []}
    for row in rows:
        texts["anchor"].append(" ".join(row["docstring_tokens"]))
        texts["positive"].append(" ".join(row["code_tokens"]))
    return Dataset.from_dict(texts)


def main() -> None:
    """Trains, saves and measures the encoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--loss", choices=("mnrl", "gist"), default="mnrl")
    parser.add_argument("--mined_negatives", type=int, default=0)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--score_scale", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--max_seq_length", type=int, default=96)
    parser.add_argument("--language", default="python")
    options = parser.parse_args()

    model = SentenceTransformer(options.model)
    guide = SentenceTransformer(options.model)
    model.max_seq_length = options.max_seq_length
    guide.max_seq_length = options.max_seq_length
    pairs = pairs_of(load_rows(options.data_dir)["train"].to_pairs())
    if options.mined_negatives:
        pairs = mine_hard_negatives(
            pairs,
            guide,
            num_negatives=options.mined_negatives,
            range_max=RANKS,
            relative_margin=MARGIN,
            output_format="n-tuple",
            batch_size=options.batch_size,
        )
    if options.loss == "gist":
        settings = {"margin_strategy": "relative", "margin": MARGIN, "mini_batch_size": options.batch_size}
        loss = CachedGISTEmbedLoss(model, guide, temperature=1 / options.score_scale, **settings)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=options.score_scale)
    arguments = SentenceTransformerTrainingArguments(
        options.output_dir,
        batch_sampler="no_duplicates",
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        num_train_epochs=options.epochs,
        max_steps=options.max_steps,
        warmup_steps=0.1,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
    )
    SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss).train()
    model.save_pretrained(options.output_dir)
    words = ["--data_dir", options.data_dir, "--language", options.language, "--output_dir", options.output_dir]
    command = [sys.executable, "-m", "soft_trainer.cli", "evaluate", options.output_dir, *words]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
