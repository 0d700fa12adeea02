# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Trains with your own loss and your own weighting.

    python examples/own_loss.py ROWS outputs/softplus

On the command line, run in this folder:

    soft-trainer train --data_dir ROWS --loss own_loss:softplus --weighting own_loss:halves
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

from soft_trainer import BM25Estimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_rows


def softplus(scores: Tensor, positives: Tensor, *, weights: Tensor) -> Tensor:
    """Penalises negatives that score close to or above the query's positive. Returns the mean over queries."""
    column = positives.unsqueeze(1)
    negatives = weights.scatter(1, column, 0.0)  # excluded columns are 0 already
    return (F.softplus(scores - scores.gather(1, column)) * negatives).sum(1).mean()


def halves(similarity: Tensor, positives: Tensor) -> Tensor:
    """Weighs by 0.5 the functions whose similarity is above the query's median, and others by 1, Tensor[B, N]."""
    return torch.where(similarity > similarity.median(dim=1, keepdim=True).values, 0.5, 1.0)


def main() -> None:
    """Trains an encoder with the loss and the weighting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("output_dir")
    parser.add_argument("--model", default="microsoft/unixcoder-base")
    parser.add_argument("--epochs", type=float, default=1)
    options = parser.parse_args()
    rows = load_rows(options.rows)
    trainer = SoftInfoNCETrainer(
        model=options.model,
        args=SoftInfoNCETrainingArguments(
            options.output_dir, num_train_epochs=options.epochs, loss=softplus, weighting=halves
        ),
        train_dataset=rows["train"],
        callbacks=[BM25Estimator()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
