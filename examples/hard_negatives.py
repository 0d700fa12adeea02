# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Mines hard negatives with sentence-transformers, then trains with their scores.

    python examples/hard_negatives.py ROWS outputs/scored

On the command line, with the rows that this script writes:

    soft-trainer train --data_dir outputs/scored/mined.jsonl --estimator scores --weighting positive_aware
"""

import argparse
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from soft_trainer import ScoresEstimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_rows


def main() -> None:
    """Mines negatives, and trains an encoder with weights from the scorer's scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("output_dir")
    parser.add_argument("--scorer", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--model", default="base")
    parser.add_argument("--epochs", type=float, default=5)
    options = parser.parse_args()
    pairs = load_rows(options.rows)["train"].to_pairs()
    mined = mine_hard_negatives(
        Dataset.from_dict({"query": pairs["docstring"], "code": pairs["code"]}),
        SentenceTransformer(options.scorer),
        num_negatives=4,
        output_format="n-tuple",
        output_scores=True,  # without a margin, because the weights tell which negatives may answer the query
    )
    mined.to_json(Path(options.output_dir) / "mined.jsonl")
    trainer = SoftInfoNCETrainer(
        model=options.model,
        args=SoftInfoNCETrainingArguments(
            options.output_dir, num_train_epochs=options.epochs, weighting="positive_aware", distill_weight=0.3
        ),
        train_dataset=mined,
        callbacks=[ScoresEstimator()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
