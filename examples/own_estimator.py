# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Weighs negatives with your own estimator: codes that share names with a query's positive count less.

    python examples/own_estimator.py ROWS outputs/names

In the shell: `soft-trainer train --data_dir ROWS --estimator own_estimator:SharedNames`, in this folder.
"""

import argparse
import re

import torch

from soft_trainer import Estimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_rows


class SharedNames(Estimator):
    """The Jaccard similarity of the names in the query's positive and in another code."""

    alpha, beta, temperature = 1.3, 0.7, 0.1

    def fit(self, split):
        """Collects the names in every code of the training rows, once."""
        self.names = [set(re.findall(r"[a-zA-Z_]{3,}", code)) for code in split.corpus["code"]]
        self.own = dict(split.judgments.pairs().tolist())  # the code of each query

    def similarity(self, query_rows, code_rows):
        """Returns Tensor[Q, C], larger = more similar; the rows are numbers of queries and of codes."""
        table = torch.zeros(len(query_rows), len(code_rows))
        for row, query in enumerate(query_rows):
            own = self.names[self.own[int(query)]]
            for column, code in enumerate(code_rows):
                other = self.names[int(code)]
                table[row, column] = len(own & other) / max(len(own | other), 1)
        return table


def main() -> None:
    """Trains on the rows."""
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
