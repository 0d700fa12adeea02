"""Row numbers in a data set of sentence-transformers, and the rows and columns of a batch that they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor

from soft_trainer.data.batches import same_texts
from soft_trainer.data.negative_files import TrainingRows, code_numbers
from soft_trainer.data.negatives import own_columns
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.errors import UserError
from soft_trainer.training.hard_batches import with_codes

LABEL = "label"
# sentence-transformers takes the first of these that a data set has as labels; all other columns are texts.
LABEL_COLUMNS = (LABEL, "labels", "score", "scores")
NO_TEXTS = (*LABEL_COLUMNS, "dataset_name")


def with_rows(train_dataset: Dataset) -> Dataset:
    """Adds the row numbers 0, 1, 2, ... as the column `label`, by which `SoftInfoNCELoss` knows the rows of a batch.

    The numbers stay with their rows: the result may be shuffled, filtered or split. Anything but one `Dataset` without
    labels and scores raises UserError.
    """
    kind = type(train_dataset).__name__
    columns = getattr(train_dataset, "column_names", ())
    taken = next((name for name in LABEL_COLUMNS if name in columns), None)
    if not isinstance(train_dataset, Dataset):
        raise UserError(
            f"with_rows: one datasets.Dataset is expected, not {kind}: call it for each of a dict, and collect the "
            "rows of a stream first"
        )
    if taken:
        raise UserError(
            f"with_rows: the data set has a column {taken!r} already; the loss takes row numbers in its place: "
            f"train_dataset.remove_columns({taken!r})"
        )
    return train_dataset.add_column(LABEL, np.arange(len(train_dataset)))


class LabelledRows:
    """The training rows that labels name, in our columns; UserError unless a number is the label of each row.

    Attributes:
        rows: `docstring` and `code` of every training row, followed by the codes of own negatives that are no
            training rows.
        labels: the label of each training row.
        negatives: int64[n, k], the numbers of each row's own negatives, column by column.
        text_ids: for "query" and "code" a number for every row's text, equal for equal texts.
    """

    def __init__(self, train_dataset: Dataset):
        labels = np.asarray(train_dataset[LABEL][:] if LABEL in getattr(train_dataset, "column_names", ()) else [])
        if labels.dtype.kind not in "iu" or len(np.unique(labels)) != len(labels):
            raise UserError(
                f"train_dataset: it has no column {LABEL!r} with a number for each of its rows: train_dataset = "
                "with_rows(train_dataset), and a loss for each of several data sets"
            )
        queries, codes, *negatives = _texts_of(train_dataset)
        self.labels = pd.Index(labels.astype(np.int64))
        self.negatives, code_only = code_numbers(negatives, TrainingRows(queries, codes, [None] * len(codes)))
        pairs = Dataset.from_dict({"docstring": queries, "code": codes})
        self.rows, self.text_ids = with_codes(pairs, code_only, PROFILES["auto"])

    def find(self, labels: Tensor | None, batch_size: int) -> np.ndarray:
        """Finds the rows that a batch's labels name, int64[B]; UserError for labels that are not row numbers."""
        whole = labels is not None and not (labels.is_floating_point() or labels.dtype == torch.bool)
        if not whole or labels.shape != (batch_size,):
            raise UserError(
                f"SoftInfoNCELoss: the batch of {batch_size} rows has no row numbers as labels, by which it finds "
                "weights: train_dataset = with_rows(train_dataset)"
            )
        rows = self.labels.get_indexer(labels.numpy(force=True))  # -1 where there is none
        if (rows < 0).any():
            raise UserError(
                f"SoftInfoNCELoss: label {labels[rows.argmin()]} is no row number of the train_dataset that it was "
                f"made with ({len(self.labels):,} rows, from {self.labels.min()} to {self.labels.max()}): give loss "
                "and trainer the same data set"
            )
        return rows


def _texts_of(dataset: Dataset) -> list[list[str]]:
    """Returns the columns that sentence-transformers reads as texts: queries, codes, and any negatives."""
    names = [name for name in dataset.column_names if name not in NO_TEXTS]
    if len(names) < 2:
        raise UserError(
            f"train_dataset: columns {', '.join(dataset.column_names)}: two columns of texts are expected, the query "
            "and then the code, and further ones with negatives"
        )
    columns = []
    for name in names:
        if getattr(dataset.features[name], "dtype", None) not in ("string", "large_string"):
            raise UserError(f"train_dataset: column {name!r} does not hold texts; remove it, or turn it into texts")
        texts = dataset[name][:]
        if None in texts:
            raise UserError(f"train_dataset: column {name!r} has no text in row {texts.index(None) + 1}")
        columns.append(texts)
    return columns


@dataclass(frozen=True)
class Columns:
    """The codes that the queries of one process meet.

    Args:
        rows: int64[B], the training row of each query.
        code_rows: int64[N], the row of each column of the scores.
        places: LongTensor[N], the place of each column among the encoded codes of all processes.
        positives: LongTensor[B], the column of each query's own code.
        negatives: BoolTensor[B, N], the columns that count as negatives. None: all but the positive.
        also: BoolTensor[B, N], further right answers. None: there are none.
        fewest: the smallest number of codes that a query meets, duplicates included.
        sizes: the number of queries of each process.
    """

    rows: np.ndarray
    code_rows: np.ndarray
    places: Tensor
    positives: Tensor
    negatives: Tensor | None
    also: Tensor | None
    fewest: int
    sizes: Sequence[int]


def columns_of(
    table: LabelledRows, rows_of: Sequence[np.ndarray], rank: int, meet_all: bool, duplicates: str
) -> Columns:
    """Returns the columns of process `rank`. A code that several rows share gets one column, at its first place.

    Args:
        rows_of: the rows of each process, whose codes stand after another: of each process the codes of its rows,
            then the first own negative of each, then the second.
        meet_all: True if own negatives are negatives of every query of the batch, False if only of theirs.
        duplicates: "mask", "positives" or "ignore".
    """
    global_rows = np.concatenate(rows_of)
    width = 1 + table.negatives.shape[1]
    sizes = [len(rows) for rows in rows_of]
    starts = np.cumsum([0, *sizes])
    # By place: the number of each encoded code, its query, and whether it is an own negative.
    numbers = np.concatenate([np.column_stack([rows, table.negatives[rows]]).T.reshape(-1) for rows in rows_of])
    owners = np.concatenate([np.tile(np.arange(*ends), width) for ends in pairwise(starts)])
    added = np.concatenate([np.arange(size * width) >= size for size in sizes])
    codes, drawn_for = own_columns(global_rows, numbers[added], owners[added])
    distinct, first = np.unique(numbers[added], return_index=True)
    places = [np.flatnonzero(~added), np.flatnonzero(added)[first[np.searchsorted(distinct, codes)]]]
    code_rows = np.concatenate([global_rows, codes])
    positives = torch.arange(starts[rank], starts[rank + 1])
    rows = rows_of[rank]
    meets = None
    fewest = len(code_rows)
    if len(codes) and not meet_all:
        drawn_for = drawn_for[starts[rank] : starts[rank + 1]]
        fewest = len(global_rows) + int(drawn_for.sum(1).min())
        meets = torch.from_numpy(np.concatenate([np.ones((len(rows), len(global_rows)), bool), drawn_for], 1))
    same = None if duplicates == "ignore" else same_texts(table.text_ids, rows, code_rows, positives, meets)
    negatives = meets if same is None else (~same if meets is None else meets & ~same)
    also = same if duplicates == "positives" else None
    places = torch.from_numpy(np.concatenate(places))
    return Columns(rows, code_rows, places, positives, negatives, also, fewest, sizes)
