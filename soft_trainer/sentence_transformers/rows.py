"""Row numbers in a data set of sentence-transformers, and the rows and columns of a batch that they lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
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

    The numbers stay with their rows: the result may be shuffled, filtered or split.

    Raises:
        UserError: it is not one `Dataset`, or it has labels or scores already.
    """
    if not isinstance(train_dataset, Dataset):
        raise UserError(
            f"with_rows: one datasets.Dataset is expected, not {type(train_dataset).__name__}: call it for each of a "
            "dict, and collect the rows of a stream first"
        )
    if taken := [name for name in LABEL_COLUMNS if name in train_dataset.column_names]:
        raise UserError(
            f"with_rows: the data set has a column {taken[0]!r} already; the loss takes row numbers in its place: "
            f"train_dataset.remove_columns({taken[0]!r})"
        )
    return train_dataset.add_column(LABEL, np.arange(len(train_dataset)))


@dataclass(frozen=True)
class LabelledRows:
    """The training rows that labels name, in our columns.

    Args:
        rows: `docstring` and `code` of every training row, followed by the codes of own negatives that are no
            training rows.
        labels: int64[n], sorted.
        order: int64[n], the row of each of `labels`.
        negatives: int64[n, k], the numbers of each row's own negatives, column by column.
        text_ids: for "query" and "code" a number for every row's text, equal for equal texts.
    """

    rows: Dataset
    labels: np.ndarray
    order: np.ndarray
    negatives: np.ndarray
    text_ids: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, train_dataset: Dataset) -> LabelledRows:
        """Reads a data set of texts (query, code, then own negatives) with row numbers as labels.

        Raises:
            UserError: no row numbers, fewer than two columns of texts, or a column without a text in some row.
        """
        labels = _labels_of(train_dataset)
        columns = text_columns(train_dataset)
        queries, codes, *negatives = (_texts_of(train_dataset, name) for name in columns)
        numbers, code_only = code_numbers(negatives, TrainingRows(queries, codes, [None] * len(codes)))
        pairs = Dataset.from_dict({"docstring": queries, "code": codes})
        rows, text_ids = with_codes(pairs, code_only, PROFILES["auto"])
        order = np.argsort(labels, kind="stable")
        return cls(rows, labels[order], order, numbers, text_ids)

    @property
    def code_only(self) -> int:
        """The number of own negatives that are not training rows."""
        return len(self.rows) - len(self.labels)

    def find(self, labels: Tensor | None, batch_size: int) -> np.ndarray:
        """Finds the rows that the labels of a batch name, int64[B].

        Raises:
            UserError: no labels, or labels that are not row numbers of the training rows.
        """
        whole = labels is not None and not (labels.is_floating_point() or labels.dtype == torch.bool)
        if not whole or labels.shape != (batch_size,):
            raise UserError(
                f"SoftInfoNCELoss: the batch of {batch_size} rows has no row numbers as labels, by which it finds "
                "weights: train_dataset = with_rows(train_dataset)"
            )
        numbers = labels.numpy(force=True).astype(np.int64)
        places = np.searchsorted(self.labels, numbers).clip(max=len(self.labels) - 1)
        unknown = numbers[self.labels[places] != numbers]
        if len(unknown):
            raise UserError(
                f"SoftInfoNCELoss: label {unknown[0]} is no row number of the train_dataset that it was made with "
                f"({len(self.labels):,} rows, from {self.labels[0]} to {self.labels[-1]}): give loss and trainer the "
                "same data set"
            )
        return self.order[places]


def text_columns(dataset: Dataset) -> list[str]:
    """Returns the columns that sentence-transformers reads as texts: query, code, and any negatives.

    Raises:
        UserError: fewer than two, or a column that does not hold texts.
    """
    names = [name for name in dataset.column_names if name not in NO_TEXTS]
    if len(names) < 2:
        raise UserError(
            f"train_dataset: columns {', '.join(dataset.column_names)}: two columns of texts are expected, the query "
            "and then the code, and further ones with negatives"
        )
    for name in names:
        if getattr(dataset.features[name], "dtype", None) not in ("string", "large_string"):
            raise UserError(f"train_dataset: column {name!r} does not hold texts; remove it, or turn it into texts")
    return names


def _texts_of(dataset: Dataset, name: str) -> list[str]:
    """Returns the texts of a column, none of which may be missing."""
    texts = dataset[name][:]
    if None in texts:
        raise UserError(f"train_dataset: column {name!r} has no text in row {texts.index(None) + 1}")
    return texts


def _labels_of(dataset: Dataset) -> np.ndarray:
    """Returns the labels of a data set, int64[n], which must be distinct whole numbers."""
    names = getattr(dataset, "column_names", ())
    labels = np.asarray(dataset[LABEL][:] if LABEL in names else [])
    if labels.dtype.kind not in "iu" or len(np.unique(labels)) != len(labels):
        raise UserError(
            f"train_dataset: it has no column {LABEL!r} with a number for each of its rows: train_dataset = "
            "with_rows(train_dataset), and a loss for each of several data sets"
        )
    return labels.astype(np.int64)


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
    """

    rows: np.ndarray
    code_rows: np.ndarray
    places: Tensor
    positives: Tensor
    negatives: Tensor | None
    also: Tensor | None
    fewest: int


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
    own, global_rows = table.negatives, np.concatenate(rows_of)
    sizes = [len(rows) for rows in rows_of]
    starts = np.cumsum([0, *sizes])
    firsts = starts * (1 + own.shape[1])
    pairs = [first + np.arange(size) for first, size in zip(firsts, sizes, strict=False)]
    added = [
        np.arange(first + size, following) for first, size, following in zip(firsts, sizes, firsts[1:], strict=False)
    ]
    owners = [start + np.tile(np.arange(size), own.shape[1]) for start, size in zip(starts, sizes, strict=False)]
    numbers = np.concatenate([own[rows].T.reshape(-1) for rows in rows_of])
    codes, drawn_for = own_columns(global_rows, numbers, np.concatenate(owners))
    place_of = dict(zip(numbers[::-1].tolist(), np.concatenate(added)[::-1].tolist(), strict=True))
    places = np.concatenate([*pairs, np.array([place_of[code] for code in codes.tolist()], np.int64)])
    code_rows = np.concatenate([global_rows, codes])
    local = slice(starts[rank], starts[rank + 1])
    positives = torch.arange(starts[rank], starts[rank + 1])
    rows, meets, fewest = rows_of[rank], None, len(code_rows)
    if len(codes) and not meet_all:
        drawn_for = drawn_for[local]
        fewest = len(global_rows) + int(drawn_for.sum(1).min())
        meets = torch.from_numpy(np.concatenate([np.ones((len(rows), len(global_rows)), bool), drawn_for], 1))
    same = None if duplicates == "ignore" else same_texts(table.text_ids, rows, code_rows, positives, meets)
    negatives = meets if same is None else (~same if meets is None else meets & ~same)
    also = same if duplicates == "positives" else None
    return Columns(rows, code_rows, torch.from_numpy(places), positives, negatives, also, fewest)
