# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer"]
# ///
"""Trains with your own arguments, callback and metrics, as you would with any `transformers.Trainer`.

python examples/train_python.py ROWS outputs/python --model microsoft/unixcoder-base
"""

import argparse
import sys

from transformers import TrainerCallback

from soft_trainer import BM25Estimator, SoftInfoNCETrainer, SoftInfoNCETrainingArguments, load_rows
from soft_trainer.metrics import load_mrr


class StopWhenGood(TrainerCallback):
    """A callback that stops training when the recall in an evaluation is high enough.

    Args:
        recall: the proportion of queries whose code must be among the first five, from 0 to 1.
    """

    def __init__(self, recall: float):
        self.recall = recall

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        """Stops training if `found_in_5`, which `compute_metrics` returns, is at least `recall`."""
        control.should_training_stop = metrics["eval_found_in_5"] >= self.recall


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("rows", help="JSON lines, CSV or Parquet")
parser.add_argument("output_dir")
parser.add_argument("--model", default="microsoft/unixcoder-base")
parser.add_argument("--epochs", type=float, default=3)
options = parser.parse_args()

rows = load_rows(options.rows)
mrr = load_mrr()  # of the library `evaluate`
corpus = len(rows["valid"].corpus)


def compute_metrics(prediction) -> dict[str, float]:
    """Returns the share of queries whose code is among the first five, and the MRR in which a rank over 1,000 is 0."""
    ranks, _top_codes = prediction.predictions
    cut = mrr.compute(predictions=ranks, references=[corpus] * len(ranks), max_rank=1000)
    return {"found_in_5": float((ranks <= 5).mean()), "mrr_1000": cut["mrr"]}


trainer = SoftInfoNCETrainer(
    model=options.model,
    args=SoftInfoNCETrainingArguments(
        options.output_dir,
        num_train_epochs=options.epochs,
        learning_rate=3e-5,
        warmup_steps=0.1,
        alpha=1.3,
        beta=0.7,
        eval_strategy="epoch",
    ),
    train_dataset=rows["train"],
    eval_dataset=rows["valid"],
    callbacks=[BM25Estimator(), StopWhenGood(recall=0.95)],
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_model()
corpus = len(rows["test"].corpus)
output = trainer.predict(rows["test"])
sys.stdout.write(
    f"test: MRR {output.metrics['test_mrr']:.3f}, {output.metrics['test_found_in_5']:.0%} in the first 5\n"
)
