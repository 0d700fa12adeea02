"""The base class of estimators, which are frozen functions of training rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.judgments import Split
from soft_trainer.data.neighbours import LeftOut, Neighbours
from soft_trainer.encoders.encoding import Encoder
from soft_trainer.errors import UserError
from soft_trainer.options.resolve import COMPARE_CODES

Rows = Sequence[int] | np.ndarray | Tensor


class Estimator:
    """Computes similarities between queries and codes of the training split, given their rows.

    Subclasses implement `fit` and `similarity`. A row is an index into the queries or into the corpus of the split
    that `fit` received. An estimator never applies softmax, temperature, alpha, beta or floor; `soft_trainer.weights`
    does.

    Attributes:
        alpha, beta, temperature: the settings that suit this similarity (Table 7), unless a run sets others.
        positive_margin, positive_temperature: the settings of positive-aware weights, in units of the similarity.
        distill_temperature: the temperature for `distill_weight`. At this temperature, the softmax of the similarity
            is the distribution that the encoder behind it was trained to give.
        compares_codes: True if a code can be more similar to a query than the query's own code is. This is False if
            queries are compared with queries, because their similarities are largest on the diagonal. Positive-aware
            weights then do not work.
        in_workers: True if data workers may call `similarity` before the step. It must not need a GPU then, and the
            fitted estimator must be picklable.
    """

    alpha: float = 1.0
    beta: float = 1.0
    temperature: float = 1.0
    positive_margin: float = 0.0
    positive_temperature: float = 1.0
    distill_temperature: float = 1.0
    compares_codes: bool = True
    in_workers: bool = False

    def __repr__(self) -> str:
        """Returns the call that makes this estimator, without arguments at their defaults."""
        changed = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, parameter.default)
            if repr(value) != repr(parameter.default):
                changed.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    def check(self, split: Split) -> None:
        """Raises UserError if `fit` cannot work on these rows. It is called before a model is loaded."""

    def bind(self, encoder: Encoder) -> None:
        """Receives the run's encoder before training, in case the estimator uses it."""

    @property
    def finds_neighbours(self) -> bool:
        """True if the estimator implements `neighbours`."""
        return type(self).neighbours is not Estimator.neighbours

    def neighbours(
        self, k: int, left_out: LeftOut, codes: np.ndarray | None = None, progress: str | None = None
    ) -> Neighbours:
        """Finds the k codes most similar to each query, like `nearest_rows`. Every process calls it, after `fit`.

        Args:
            left_out: the codes that do not count as neighbours of a query.
            codes: the rows of the codes that may be neighbours, sorted. By default, all codes.
            progress: the label of a progress bar, or None for no bar.
        """
        raise NotImplementedError

    def fit(self, split: Split) -> None:
        """Prepares for the queries and the corpus of a split. It is called once."""
        raise NotImplementedError

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes the raw similarity of Q queries to C codes, Tensor[Q, C]. Larger means more similar."""
        raise NotImplementedError


class CodeValues:
    """Looks up what an estimator compares queries with: the values of the codes themselves, or of their queries.

    Args:
        first: int64[C], the query in each code's first pair, or -1 if the code is in no pair. None if queries are
            compared with the codes themselves.
    """

    def __init__(self, first: np.ndarray | None = None):
        self.first = first

    def rows(self, code_rows: Rows) -> np.ndarray:
        """Returns the row of values for each code. Raises UserError if the code's query is needed and it has none."""
        rows = as_array(code_rows)
        if self.first is not None:
            rows = self.first[rows]
            if (rows < 0).any():
                raise UserError(f"a code has no query, but the estimator compares queries; use {COMPARE_CODES}")
        return rows

    def neighbours(
        self, values, codes: np.ndarray | None, left_out: LeftOut, find: Callable[[Any, LeftOut], Neighbours]
    ) -> Neighbours:
        """Finds neighbours among some of the codes.

        Args:
            values: the values, such as embeddings, one row for each code or for each query.
            codes: the rows of the codes that may be found, sorted. By default, all codes.
            find: returns neighbours, given the values of the codes that may be found and the codes to leave out.
        """
        if self.first is not None:
            with_query = np.flatnonzero(self.first >= 0)
            codes = with_query if codes is None else np.intersect1d(with_query, codes)
            if not np.array_equal(self.first, np.arange(values.shape[0])):
                values = values[self.first]  # a code without a query gets wrong values, but is not among `codes`
        if codes is None or len(codes) == values.shape[0]:
            return find(values, left_out)
        found = find(values[codes], left_out.among(codes))
        return Neighbours(np.where(found.rows < 0, -1, codes[found.rows]), found.scores, found.own)


def check_codes_have_queries(estimator, split: Split, codes: np.ndarray) -> None:
    """Checks that all given codes have a query, if the estimator compares queries with queries.

    Raises:
        UserError: a code has none. The message gives the estimators that work.
    """
    if getattr(estimator, "compares_codes", True):
        return
    without = np.unique(codes[split.judgments.first_queries()[codes] < 0])
    if len(without):
        raise UserError(
            f"negatives: {len(without):,} of them have no query, but {type(estimator).__name__} compares queries; use "
            f"{COMPARE_CODES}"
        )


def as_array(rows: Rows) -> np.ndarray:
    """Converts rows to a NumPy array of indices."""
    if isinstance(rows, torch.Tensor):
        return rows.cpu().numpy()
    return np.asarray(rows, dtype=np.int64)
