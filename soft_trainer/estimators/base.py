"""The base class of estimators: frozen functions of training rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Rows = Sequence[int] | np.ndarray | Tensor


class Estimator:
    """A similarity of queries and codes of the training set, by row number.

    A subclass has `fit` and `similarity`. A row is a position in the training set that `fit` saw. Softmax,
    temperature, alpha, beta and floor never appear in an estimator: `soft_trainer.weights` applies them.

    Attributes:
        alpha, beta, temperature: the settings that suit this similarity (Table 7), used if a run names none.
        in_workers: True if data workers may call `similarity` before the step. It must then need no GPU, and the
            fitted estimator must be picklable.
    """

    alpha: float = 1.0
    beta: float = 1.0
    temperature: float = 1.0
    in_workers: bool = False

    def check(self, dataset) -> None:
        """Raises UserError if `fit` cannot work on these rows; called before a model is loaded."""

    def fit(self, dataset) -> None:
        """Prepares for the rows of `dataset` (a `datasets.Dataset` with the training columns). Called once."""
        raise NotImplementedError

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Raw similarity of the queries of Q rows and the codes of C rows, larger = more alike, Tensor[Q, C]."""
        raise NotImplementedError


def as_array(rows: Rows) -> np.ndarray:
    """Row numbers as a NumPy index."""
    return rows.cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows, dtype=np.int64)
