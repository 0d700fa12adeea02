"""Adds hard negatives and their scores to mined rows, in columns that sentence-transformers reads too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from soft_trainer.data.column_names import CODES
from soft_trainer.data.columns import known_columns, row_texts
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.load import training_split
from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator
from soft_trainer.estimators.neighbours import Excluded
from soft_trainer.files import write_rows
from soft_trainer.terminal import print_on_main
from soft_trainer.training.batches import relevant_codes
from soft_trainer.training.negatives import below_ratio

RATIO = 0.95  # a negative's score is at most this fraction of its positive's score, as with `negative_ratio`
CANDIDATES = 64  # the number of similar functions to consider for each query


def add_negatives(folder: str | Path, number: int, model: str) -> None:
    """Adds the columns `negative_1`, `negative_2` and so on, and `scores`, to `train.jsonl.gz` in a folder.

    `scores` lists the score of the row's function, and then of each negative, by an encoder. It is the cosine of their
    embeddings, or the dot product if the encoder uses that.

    Args:
        number: the number of negatives for each query.
        model: the encoder's folder or name.

    Raises:
        UserError: there are fewer functions than negatives, or the encoder cannot be loaded.
    """
    path = Path(folder) / "train.jsonl.gz"
    rows = load_folder(folder, ("train",))["train"]
    split = training_split(rows, str(path))
    if len(split.corpus) <= number:
        raise UserError(f"{path}: {len(split.corpus)} functions are too few for {number} negatives per query")
    estimator = TrainedModelEstimator(model)
    negatives, scores = negatives_of(split, number, estimator)
    made = []
    for row, texts, of_row in zip(rows, negatives, scores, strict=True):
        missing = [None] * (number - len(texts))
        columns = {f"negative_{column}": text for column, text in enumerate([*texts, *missing], 1)}
        made.append(row | columns | {"scores": [*of_row, *missing]})
    write_rows({"train": made}, folder)
    complete = sum(len(texts) == number for texts in negatives)
    print_on_main(f"{number} hard negatives with scores for {complete:,} of {len(rows):,} training rows")


def negatives_of(
    split: Split, number: int, estimator: TrainedModelEstimator
) -> tuple[list[list[str]], list[list[float]]]:
    """Finds the functions most similar to each query that score well below the query's positive, nearest first.

    Returns:
        The texts of each query's negatives, and the scores of its positive and of these negatives.
    """
    answers = relevant_codes(split, EncoderProfile())
    estimator.fit(split)
    excluded = Excluded(split.judgments.first_codes(), answers)
    near = estimator.neighbours(max(CANDIDATES, number), excluded, progress="Finding neighbours")
    candidates = below_ratio(near, RATIO, answers.code_texts)
    texts = np.array(list(row_texts(split.corpus, known_columns(split.corpus, CODES)[0])), dtype=object)
    negatives = []
    scores = []
    for query, own in enumerate(near.own):
        part = slice(candidates.indptr[query], candidates.indptr[query + 1])
        found = candidates.data[part][:number]
        negatives.append(texts[candidates.indices[part][:number]].tolist())
        # The estimator multiplies cosines by the score scale of the encoder.
        scores.append((np.concatenate([[own], found]) / estimator.score_scale).round(6).tolist())
    return negatives, scores
