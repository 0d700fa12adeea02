# /// script
# requires-python = ">=3.11"
# dependencies = ["soft-trainer[plots]"]
# ///
"""Shows the similarities and weights that each estimator gives one batch, as a table and as the paper's pictures.

    python examples/weights_of_a_batch.py ROWS outputs/batch --estimators bm25 simcse=outputs/simcse
    python examples/weights_of_a_batch.py ROWS outputs/batch --shown recipes/paper/case_study.jsonl

The batch is random. --shown puts rows of yours first, such as the paper's case study. The first query is compared
with the functions of the first eight pairs: its positive and seven negatives. `weights.png` has the two panels
of Figure 2, `alpha.png` has the right panel of Figure 3 for the last estimator.
"""

import argparse
import sys
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from soft_trainer import BM25Estimator, Criterion, SimCSEEstimator, TrainedModelEstimator, UserError, load_rows

ESTIMATORS = {"bm25": BM25Estimator, "simcse": SimCSEEstimator, "trained_model": TrainedModelEstimator}
ALPHAS = (1.1, 1.3, 1.5, 1.7, 1.9)
SHOWN = 8


def estimator_of(text: str):
    """Returns the estimator that `NAME` or `NAME=ENCODER` describes."""
    name, _, encoder = text.partition("=")
    if name not in ESTIMATORS or bool(encoder) == (name == "bm25"):
        raise UserError(f"--estimators {text}: expected bm25, simcse=ENCODER or trained_model=ENCODER")
    return ESTIMATORS[name](*filter(None, [encoder]))


def weights_of(estimator, similarity: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """Computes the weights of Eq. 4, Tensor[B, B], from the similarities of a batch."""
    criterion = Criterion(alpha=alpha, beta=beta, temperature=estimator.temperature)
    return criterion.targets(torch.arange(len(similarity)), similarity=similarity).weights


def sorted_mean(values: torch.Tensor) -> np.ndarray:
    """Sorts each query's B - 1 negatives by value, largest first, and averages over the queries, float[B - 1]."""
    negatives = values[~torch.eye(len(values), dtype=torch.bool)].view(len(values), -1)
    return negatives.sort(descending=True).values.mean(0).numpy()


def main() -> None:
    """Prints the table and draws the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--estimators", nargs="+", default=["bm25"], metavar="NAME[=ENCODER]")
    parser.add_argument("--shown", help="rows that come first in the batch")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    estimators = {}
    for text in options.estimators:
        name, _, encoder = text.partition("=")
        estimators[f"{name} {Path(encoder).name}".strip()] = estimator_of(text)

    pairs = load_rows(options.rows)["train"].to_pairs().shuffle(seed=options.seed).to_pandas()
    if options.shown:
        first = load_rows({"test": pd.read_json(options.shown, lines=True)})["test"].to_pairs().to_pandas()
        pairs = pd.concat([first, pairs], ignore_index=True)
    batch = load_rows({"test": pairs.head(options.batch_size)[["docstring", "code"]]})["test"]  # train is divided
    queries, codes = batch.judgments.pairs().T
    descriptions = [textwrap.shorten(text, 60) for text in batch.queries["docstring"][:SHOWN]]
    table = pd.DataFrame(index=pd.Index(descriptions, name="the function's description"))

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for number, (name, estimator) in enumerate(estimators.items()):
        estimator.fit(batch)
        similarity = estimator.similarity(queries, codes).float()
        weights = weights_of(estimator, similarity, estimator.alpha, estimator.beta)
        table[f"{name}: similarity"] = similarity[0, :SHOWN]
        table[f"{name}: weight"] = weights[0, :SHOWN]
        own = torch.eye(len(similarity), dtype=torch.bool)
        probabilities = (similarity / estimator.temperature).masked_fill(own, -torch.inf).softmax(1)
        left.plot(sorted_mean(probabilities), label=name)
        width = 0.8 / len(estimators)
        right.bar(np.arange(len(table)) + number * width, weights[0, :SHOWN], width, label=name)
    left.set(title="Similarity after the softmax, mean over queries", xlabel="negative, the most similar first")
    right.set(title="Weights of the first query's functions", xlabel="function; 0 is the positive")
    left.legend()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output_dir / "weights.png", bbox_inches="tight", dpi=120)

    figure, axes = plt.subplots(figsize=(5.5, 4))
    for alpha in ALPHAS:
        beta = 2 - alpha
        axes.plot(sorted_mean(weights_of(estimator, similarity, alpha, beta)), label=f"alpha {alpha}, beta {beta:.1f}")
    axes.set(title=f"Weights, mean over queries ({name})", xlabel="negative, the largest weight first")
    axes.legend()
    figure.savefig(options.output_dir / "alpha.png", bbox_inches="tight", dpi=120)
    sys.stdout.write(f"{table.round(3).to_markdown()}\n")
    sys.stdout.write(f"{len(batch.queries)} pairs; drew {options.output_dir}/weights.png and alpha.png\n")


if __name__ == "__main__":
    main()
