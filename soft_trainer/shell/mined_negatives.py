"""Adds hard negatives and their scores to mined rows, in columns that sentence-transformers reads too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from soft_trainer.data.column_names import CODES
from soft_trainer.data.columns import known_columns, row_texts
from soft_trainer.data.layouts.codesearchnet import load_folder
from soft_trainer.data.load import training_split
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

    The negatives are the functions most similar to a query that score well below its positive, nearest first.
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
    answers = relevant_codes(split, EncoderProfile())
    estimator.fit(split)
    excluded = Excluded(split.judgments.first_codes(), answers)
    near = estimator.neighbours(max(CANDIDATES, number), excluded, progress="Finding neighbours")
    candidates = below_ratio(near, RATIO, answers.code_texts)
    codes = np.array(list(row_texts(split.corpus, known_columns(split.corpus, CODES)[0])), dtype=object)
    made = []
    complete = 0
    for query, row in enumerate(rows):
        part = slice(candidates.indptr[query], candidates.indptr[query + 1])
        found = candidates.data[part][:number]
        texts = codes[candidates.indices[part][:number]].tolist()
        # The estimator multiplies cosines by the score scale of the encoder.
        scores = (np.concatenate([near.own[[query]], found]) / estimator.score_scale).round(6).tolist()
        missing = [None] * (number - len(texts))
        columns = {f"negative_{column}": text for column, text in enumerate([*texts, *missing], 1)}
        made.append(row | columns | {"scores": [*scores, *missing]})
        complete += not missing
    write_rows({"train": made}, folder)
    print_on_main(f"{number} hard negatives with scores for {complete:,} of {len(rows):,} training rows")
