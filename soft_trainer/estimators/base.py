"""Defines the base class of estimators, which compute similarities between queries and functions of training rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.split import Split
from soft_trainer.encoders.encoding import Encoder
from soft_trainer.errors import UserError
from soft_trainer.estimators.neighbours import Excluded, Neighbours
from soft_trainer.options.choices import COMPARE_CODES

Rows = Sequence[int] | np.ndarray | Tensor


class Estimator:
    """Base class for estimators, which compute how similar the queries and functions of the training split are.

    Subclasses implement `fit` and `similarity`. A row is an index into the queries or the corpus of the split passed
    to `fit`. Estimators return raw similarities. `soft_trainer.weights` applies the softmax, temperature, alpha, beta
    and floor.

    Attributes:
        alpha, beta, temperature: the default settings for this similarity (Table 7).
        positive_margin, positive_temperature: the default settings of positive-aware weights, in units of the
            similarity.
        distill_temperature: the default temperature for `distill_weight`. At this temperature, the softmax of the
            similarities is the distribution that the underlying encoder was trained to produce.
        compares_codes: True if queries are compared with functions, so that a function may be more similar to a query
            than the query's positive. False if queries are compared with queries. In that case, positive-aware weights
            do not apply, because the positive always has the largest similarity.
        partial: True if `similarity` returns NaN for pairs whose similarity is unknown. Such a negative keeps a weight
            of 1, and the KL divergence that `distill_weight` adds does not compare it.
        in_workers: True if data workers may call `similarity` before the step. In that case, the method must not need
            a GPU, and the fitted estimator must be picklable.
        packing: the run's option of this name, which the trainer sets before `fit`.
    """

    alpha: float = 1.0
    beta: float = 1.0
    temperature: float = 1.0
    positive_margin: float = 0.0
    positive_temperature: float = 1.0
    distill_temperature: float = 1.0
    compares_codes: bool = True
    partial: bool = False
    in_workers: bool = False
    packing: str | bool = "auto"

    def __repr__(self) -> str:
        """Formats the estimator as a constructor call with all arguments that differ from their defaults."""
        changed = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, parameter.default)
            if repr(value) != repr(parameter.default):
                changed.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    def check(self, split: Split) -> None:
        """Raises UserError if `fit` would fail on this split.

        The command line calls this method before it loads the model.
        """

    def bind(self, encoder: Encoder) -> None:
        """Receives the encoder to be trained, before training. Most estimators ignore it."""

    def fit(self, split: Split) -> None:
        """Prepares the estimator for a split's queries and corpus. Runs before the first step."""
        raise NotImplementedError

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes raw similarities between Q queries and C functions, Tensor[Q, C]. Larger means more similar."""
        raise NotImplementedError


def check_fitted(estimator: Estimator, attribute: str) -> None:
    """Raises UserError if an estimator is not fitted: `fit` sets the attribute named `attribute`."""
    if not hasattr(estimator, attribute):
        raise UserError(f"{type(estimator).__name__} is not fitted: call fit(split) first")


class NeighbourEstimator(Estimator):
    """An estimator that also finds the functions most similar to each query, for hard batches and hard negatives."""

    def neighbours(
        self, k: int, excluded: Excluded, codes: np.ndarray | None = None, progress: str | None = None
    ) -> Neighbours:
        """Finds the k functions most similar to each query, except excluded functions.

        Every process calls this method after `fit`. The built-in estimators compute the neighbours only on the main
        process (`cached_neighbours`) and share the result. A user's implementation runs on every process.

        Args:
            k: the number of neighbours per query.
            excluded: the functions that cannot be neighbours of a query, such as its relevant functions.
            codes: the sorted indices of the functions to search. By default, all functions.
            progress: the label of a progress bar, or None for no bar.
        """
        raise NotImplementedError


def checked_similarity(estimator, query_rows: Rows, code_rows: Rows) -> Tensor:
    """Calls `estimator.similarity` without gradients and checks the result, Tensor[Q, C] in float32 or higher.

    Raises:
        UserError: the estimator did not return a Tensor[Q, C], or returned NaN although it is not `partial`.
    """
    name = type(estimator).__name__
    query_rows = torch.as_tensor(query_rows, dtype=torch.long, device="cpu")
    code_rows = torch.as_tensor(code_rows, dtype=torch.long, device="cpu")
    with torch.no_grad():
        similarity = estimator.similarity(query_rows, code_rows)
    expected = (len(query_rows), len(code_rows))
    found = type(similarity).__name__
    if isinstance(similarity, Tensor):
        found = f"shape {tuple(similarity.shape)}"
    if found != f"shape {expected}":
        raise UserError(
            f"{name}.similarity returned {found} for {expected[0]} queries and {expected[1]} functions: it must "
            f"return a Tensor of shape {expected}"
        )
    partial = getattr(estimator, "partial", False)
    if not partial and similarity.device.type == "cpu" and bool(similarity.isnan().any()):
        query, code = similarity.isnan().nonzero()[0].tolist()
        rows = f"{int(query_rows[query])} (query) and {int(code_rows[code])} (code)"
        raise UserError(
            f"{name}.similarity returned NaN for the rows {rows}; if NaN means unknown, set partial = True"
        )
    if similarity.dtype == torch.float64:
        return similarity
    return similarity.float()


class CodeValues:
    """Maps functions to rows of a matrix of values, such as embeddings, with one row per function or per query.

    An estimator that compares queries with queries represents a function by the query in the function's first
    training pair.

    Args:
        first: int64[C], the query in each function's first pair, or -1 if it is in no pair. If None, the matrix
            has a row for each function.
    """

    def __init__(self, first: np.ndarray | None = None):
        self.first = first

    def rows(self, code_rows: Rows) -> np.ndarray:
        """Returns the matrix row that represents each function, int64.

        Raises:
            UserError: queries represent functions, but a function has no query.
        """
        rows = as_array(code_rows)
        if self.first is not None:
            rows = self.first[rows]
            if (rows < 0).any():
                raise UserError(f"a function has no query, but the estimator compares queries; use {COMPARE_CODES}")
        return rows

    def neighbours(
        self, values, codes: np.ndarray | None, excluded: Excluded, find: Callable[[Any, Excluded], Neighbours]
    ) -> Neighbours:
        """Finds each query's neighbours among all functions, or only among `codes`.

        Args:
            values: the matrix of values.
            codes: the sorted indices of the functions to search. By default, all functions.
            excluded: the functions that cannot be neighbours of a query.
            find: returns the neighbours. The arguments are the matrix rows of the functions to search, and `excluded`
                for these functions.
        """
        if self.first is not None:
            with_query = np.flatnonzero(self.first >= 0)
            codes = with_query if codes is None else np.intersect1d(with_query, codes)
            if not np.array_equal(self.first, np.arange(values.shape[0])):
                values = values[self.first]  # wrong for functions without a query, but `codes` excludes these
        if codes is None or len(codes) == values.shape[0]:
            return find(values, excluded)
        found = find(values[codes], excluded.among(codes))
        return Neighbours(np.where(found.rows < 0, -1, codes[found.rows]), found.scores, found.own)


def codes_without_query(estimator, split: Split) -> np.ndarray | None:
    """Returns the functions that an estimator cannot compare, bool[C], because it compares queries and they have none.

    These are hard negatives that are not the function of any row. The result is None if there are none.
    """
    if getattr(estimator, "compares_codes", True):
        return None
    without = split.judgments.first_queries() < 0
    return without if without.any() else None


def as_array(rows: Rows) -> np.ndarray:
    """Converts row indices (a list, an array or a tensor) to a NumPy array."""
    if isinstance(rows, torch.Tensor):
        return rows.cpu().numpy()
    return np.asarray(rows, dtype=np.int64)
