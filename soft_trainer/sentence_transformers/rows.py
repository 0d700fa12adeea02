"""Identifies the training rows in a batch by hashes of texts, and finds the functions to compare the queries with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from datasets import Dataset
from scipy import sparse
from torch import Tensor

from soft_trainer.data.column_names import NEGATIVE
from soft_trainer.data.columns import check_column, text_ids
from soft_trainer.data.split import Judgments, RelevantCodes, Split, marks
from soft_trainer.errors import UserError
from soft_trainer.system.terminal import print_on_main

LABEL = "label"
# sentence-transformers reads labels from the first of these columns that a data set has. All other columns are texts.
LABEL_COLUMNS = (LABEL, "labels", "score", "scores")
NO_TEXTS = (*LABEL_COLUMNS, "dataset_name")


def with_rows(train_dataset: Dataset, query_column: str | None = None, code_column: str | None = None) -> Dataset:
    """Adds a column `label` with a hash of each row's texts, so that `SoftInfoNCELoss` can identify a batch's rows.

    The first two columns are the queries and the functions. Of the others, only columns named as negatives
    (`negative`, `negative_1` and so on) are kept, because sentence-transformers would take any other column for
    negatives too. The names of the removed columns are printed.

    The result may be shuffled, filtered, split or concatenated with other data sets, but its texts must not change.

    Args:
        query_column, code_column: the columns with the queries and the functions, if they are not the first two. They
            become the first two columns of the result.

    Raises:
        UserError: the argument is not a `Dataset`, a column does not contain text or contains distinct numbers, or
            there are already labels or scores.
    """
    if not isinstance(train_dataset, Dataset):
        kind = type(train_dataset).__name__
        raise UserError(
            f"with_rows: expected one datasets.Dataset, not {kind}. Call it for each data set in a "
            "dict, and load a stream into a Dataset first"
        )
    for name in LABEL_COLUMNS:
        if name in train_dataset.column_names:
            raise UserError(
                f"with_rows: the data set already has a column {name!r}, which the loss needs for hashes. Keep only "
                f"the rows with a relevant function, then call train_dataset.remove_columns({name!r})"
            )
    train_dataset = _in_order(train_dataset, query_column, code_column)
    (query, code, *_), unused = _columns_of(train_dataset)
    for name in (query, code):
        if _are_ids(train_dataset, name):
            raise UserError(
                f"with_rows: column {name!r} contains distinct numbers, which are ids rather than texts; set "
                "query_column and code_column"
            )
    if unused:
        print_on_main(
            f"with_rows: not using {', '.join(map(repr, unused))}; only columns named as negatives (negative, "
            "negative_1 and so on) may follow the columns of queries and functions"
        )
        train_dataset = train_dataset.remove_columns(unused)
    return train_dataset.add_column(LABEL, _hashes(_texts_of(train_dataset)))


def _in_order(dataset: Dataset, query: str | None, code: str | None) -> Dataset:
    """Moves the columns that the user has set to the front.

    Raises:
        UserError: a column does not exist, both are the same, or only one of them is set.
    """
    if query is None and code is None:
        return dataset
    if query is None or code is None or query == code:
        raise UserError("with_rows: set both query_column and code_column, to two different columns")
    for option, name in (("query_column", query), ("code_column", code)):
        check_column(dataset.column_names, option, name, "with_rows")
    others = [name for name in dataset.column_names if name not in (query, code)]
    return dataset.select_columns([query, code, *others])


def _are_ids(dataset: Dataset, name: str) -> bool:
    """Returns True if a column of at least two rows contains only distinct numbers, as numbers or as text."""
    values = dataset[name][:]
    numbers = all(str(value).strip().isdecimal() for value in values)
    return numbers and len(values) > 1 and len({*map(str, values)}) == len(values)


class LabelledRows:
    """The training rows as a `Split`, with a look-up of rows by their labels (hashes).

    Attributes:
        split: the queries, and a corpus with the functions of all rows, followed by negatives that are not the code of
            any row.
        codes: int64[n, 1 + k], the corpus indices of each query's positive and k negatives.
        answers: a look-up of relevant functions by text.

    Raises:
        UserError: a row's label is not the hash of its texts.
    """

    def __init__(self, train_dataset: Dataset):
        if LABEL not in getattr(train_dataset, "column_names", ()) or not len(train_dataset):
            raise UserError(
                f"train_dataset: no column {LABEL!r} with a hash of each row. Call train_dataset = "
                "with_rows(train_dataset) first, and create a separate loss for each data set"
            )
        if unused := _columns_of(train_dataset)[1]:
            raise UserError(
                f"train_dataset: column {unused[0]!r} would count as negatives. Call with_rows(train_dataset) after "
                "adding columns, because it removes all columns but queries, functions and negatives"
            )
        columns = _texts_of(train_dataset)
        labels = _hashes(columns)
        if train_dataset[LABEL][:] != labels.tolist():
            raise UserError(
                f"train_dataset: column {LABEL!r} does not contain the hashes of the texts. Call "
                "with_rows(train_dataset) again after changing the texts"
            )
        self.labels, self.first_rows = np.unique(labels, return_index=True)
        queries, codes, *negatives = columns
        self.codes, added = _numbered(codes, negatives)
        corpus = Dataset.from_dict({"code": codes + added})
        right = sparse.eye_array(len(queries), len(corpus), dtype=np.float32, format="csr")
        named = np.repeat(np.arange(len(queries)), len(negatives)), self.codes[:, 1:].ravel()
        wrong = marks(np.stack(named, axis=1), right.shape) if negatives else None
        self.split = Split(Dataset.from_dict({"docstring": queries}), corpus, Judgments(right, wrong))
        self.answers = RelevantCodes(right, text_ids(queries), text_ids(codes + added))

    def find(self, labels: Tensor) -> np.ndarray:
        """Returns the index of the training row with each label, int64[B]. Raises UserError for an unknown label."""
        given = labels.numpy(force=True)
        entries = np.searchsorted(self.labels, given).clip(max=len(self.labels) - 1)
        unknown = self.labels[entries] != given
        if unknown.any():
            raise UserError(
                f"SoftInfoNCELoss: no row of the loss's train_dataset has label {given[unknown.argmax()]}. Pass the "
                "same data set to the loss and the trainer, and create a separate loss for each data set"
            )
        return self.first_rows[entries]


def check_labels(labels: Tensor | None, batch_size: int) -> None:
    """Raises UserError if a batch has no labels from `with_rows`."""
    whole = labels is not None and not (labels.is_floating_point() or labels.dtype == torch.bool)
    if not whole or labels.shape != (batch_size,):
        raise UserError(
            f"SoftInfoNCELoss: the batch of {batch_size} rows has no hashes in the column {LABEL!r}, which the "
            "loss needs to find weights. Call train_dataset = with_rows(train_dataset) first"
        )


def _hashes(columns: Sequence[Sequence[str]]) -> np.ndarray:
    """Hashes the texts in all columns of each row. Returns int64[n], from 0 to 2**63 - 1."""
    hashes = [xxhash.xxh3_64_intdigest("\0".join(texts).encode()) for texts in zip(*columns, strict=True)]
    return (np.array(hashes, dtype=np.uint64) >> 1).astype(np.int64)


def _numbered(codes: Sequence[str], negatives: Sequence[Sequence[str]]) -> tuple[np.ndarray, list[str]]:
    """Numbers the functions of all rows, then the negatives that are not the function of any row.

    Returns:
        The numbers of each row's code and k negatives, int64[n, 1 + k], and the texts of negatives that were added.
    """
    number_of = {code: row for row, code in reversed(list(enumerate(codes)))}
    added = []
    numbers = [list(range(len(codes)))]
    for texts in negatives:
        for text in texts:
            if text not in number_of:
                number_of[text] = len(codes) + len(added)
                added.append(text)
        numbers.append([number_of[text] for text in texts])
    return np.stack(numbers, axis=1), added


def _columns_of(dataset: Dataset) -> tuple[list[str], list[str]]:
    """Returns the names of the columns of queries, functions and negatives, in this order, and of all unused columns.

    Raises:
        UserError: there are fewer than two columns.
    """
    names = [name for name in dataset.column_names if name not in NO_TEXTS]
    if len(names) < 2:
        raise UserError(
            "train_dataset: expected a column of queries, then a column of functions, then optional columns of "
            f"negatives, but the columns are {', '.join(dataset.column_names)}"
        )
    negatives = [name for name in names[2:] if NEGATIVE.fullmatch(name)]
    used = names[:2] + negatives
    return used, [name for name in names if name not in used]


def _texts_of(dataset: Dataset) -> list[list[str]]:
    """Returns the texts in the columns of queries, functions and negatives, in this order.

    Raises:
        UserError: there are fewer than two columns, or a column has missing values or is not text.
    """
    columns = []
    for name in _columns_of(dataset)[0]:
        if getattr(dataset.features[name], "dtype", None) not in ("string", "large_string"):
            raise UserError(f"train_dataset: column {name!r} does not contain text; remove it, or convert it to text")
        texts = dataset[name][:]
        if None in texts:
            raise UserError(f"train_dataset: column {name!r} has no text in row {texts.index(None) + 1}")
        columns.append(texts)
    return columns


@dataclass(frozen=True)
class Columns:
    """The N functions that one process's B queries are compared with.

    Args:
        code_rows: int64[N], the corpus index of each column's code.
        positions: LongTensor[N], the position of each column's function in the encoded functions of all processes.
        positives: LongTensor[B], the column of each query's positive.
    """

    code_rows: np.ndarray
    positions: Tensor
    positives: Tensor


def batch_columns(table: LabelledRows, rows_of: Sequence[np.ndarray], rank: int) -> Columns:
    """Returns the functions to compare the queries of process `rank` with. A repeated function gets one column.

    Args:
        rows_of: the training rows on each process. The encoded functions are ordered by process. Within a process, the
            functions of the rows come first, then the first negative of each row, then the second, and so on.
    """
    encoded = np.concatenate([table.codes[rows].T.reshape(-1) for rows in rows_of])
    code_rows, positions = np.unique(encoded, return_index=True)
    rows = rows_of[rank]
    positives = torch.from_numpy(np.searchsorted(code_rows, table.codes[rows, 0]))
    return Columns(code_rows, torch.from_numpy(positions), positives)
