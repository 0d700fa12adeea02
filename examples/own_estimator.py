# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Trains with your own estimator: a negative that shares names with the query's positive gets a smaller weight.

    python examples/own_estimator.py ROWS outputs/names

On the command line, run in this folder: `soft-trainer train --data_dir ROWS --estimator own_estimator:SharedNames`.
"""

import argparse
import re

import torch

from soft_trainer import Estimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_rows


class SharedNames(Estimator):
    """An estimator that compares two functions by their names: the query's positive, and another function.

    The similarity is the Jaccard index: the number of names in both, divided by the number of names in either.
    """

    alpha, beta, temperature = 1.3, 0.7, 0.1

    def fit(self, split):
        """Finds the names in every function of the training rows, before training."""
        self.names = [set(re.findall(r"[a-zA-Z_]{3,}", code)) for code in split.corpus["code"]]
        self.positives = dict(split.judgments.pairs().tolist())  # a relevant function for each query

    def similarity(self, query_rows, code_rows):
        """Returns the similarities of queries and functions, which are given by their row numbers, as Tensor[Q, C]."""
        table = torch.zeros(len(query_rows), len(code_rows))
        for row, query in enumerate(query_rows):
            positive = self.names[self.positives[int(query)]]
            for column, code in enumerate(code_rows):
                other = self.names[int(code)]
                table[row, column] = len(positive & other) / max(len(positive | other), 1)
        return table


def main() -> None:
    """Trains an encoder with the estimator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("output_dir")
    parser.add_argument("--model", default="microsoft/unixcoder-base")
    parser.add_argument("--epochs", type=float, default=1)
    options = parser.parse_args()
    rows = load_rows(options.rows)
    trainer = SoftInfoNCETrainer(
        model=options.model,
        args=SoftInfoNCETrainingArguments(options.output_dir, num_train_epochs=options.epochs),
        train_dataset=rows["train"],
        callbacks=[SharedNames()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
