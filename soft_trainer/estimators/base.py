"""What an estimator is: a frozen function of training rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Rows = Sequence[int] | np.ndarray | Tensor


class Estimator:
    """How alike queries and codes of the training set are, by row number.

    A subclass gives `fit` and `similarity`. A row is the position in the training set that `fit` saw. Softmax,
    temperature, alpha, beta and floor never appear in an estimator: `soft_trainer.weights` applies them.

    Attributes:
        alpha, beta, temperature: the settings that suit this similarity, taken where a run names none (Table 7).
        in_workers: True lets the data workers call `similarity` ahead of the step. It must then need no GPU.
    """

    alpha: float = 1.0
    beta: float = 1.0
    temperature: float = 1.0
    in_workers: bool = False

    def check(self, dataset) -> None:
        """Raise UserError where `fit` could not work on these rows; called before a model is loaded."""

    def fit(self, dataset) -> None:
        """Prepare for the rows of `dataset` (a `datasets.Dataset` with the training columns). Called once."""
        raise NotImplementedError

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Raw similarity of the queries of Q rows to the codes of C rows, larger = more alike: Tensor[Q, C]."""
        raise NotImplementedError


def as_array(rows: Rows) -> np.ndarray:
    """Row numbers as a NumPy index."""
    return rows.cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows, dtype=np.int64)


def checked_similarity(estimator, query_rows: Rows, code_rows: Rows) -> Tensor:
    """`estimator.similarity`, without gradient, in float32 or higher, and of the right shape.

    Raises:
        ValueError: the estimator returned something that is not Tensor[Q, C], or NaN.
    """
    name = type(estimator).__name__
    with torch.no_grad():
        similarity = estimator.similarity(query_rows, code_rows)
    expected = (len(query_rows), len(code_rows))
    shape = tuple(similarity.shape) if isinstance(similarity, Tensor) else None
    if shape != expected:
        found = f"shape {shape}" if shape is not None else type(similarity).__name__
        raise ValueError(
            f"{name}.similarity returned {found} for {expected[0]} queries and {expected[1]} "
            f"codes: it must return a Tensor of shape {expected}"
        )
    if similarity.device.type == "cpu" and bool(similarity.isnan().any()):
        raise ValueError(
            f"{name}.similarity returned NaN for the rows {_first_nan(similarity, query_rows, code_rows)}"
        )
    return similarity if similarity.dtype == torch.float64 else similarity.float()


def _first_nan(similarity: Tensor, query_rows: Rows, code_rows: Rows) -> str:
    query, code = similarity.isnan().nonzero()[0].tolist()
    return f"{int(query_rows[query])} (query) and {int(code_rows[code])} (code)"
