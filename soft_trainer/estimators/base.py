"""The base class of estimators, which are frozen functions of training rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.neighbours import Neighbours
from soft_trainer.encoders.encoding import Encoder

Rows = Sequence[int] | np.ndarray | Tensor


class Estimator:
    """Computes similarities between queries and codes of the training set, by row number.

    Subclasses implement `fit` and `similarity`. A row is a position in the training set that `fit` saw. Softmax,
    temperature, alpha, beta and floor never appear in an estimator: `soft_trainer.weights` applies them.

    Attributes:
        alpha, beta, temperature: the settings that suit this similarity (Table 7), used unless a run sets others.
        positive_margin, positive_temperature: the settings of positive-aware weights, in units of the similarity.
        distill_temperature: the temperature at which the softmax of the similarity is the distribution that the
            encoder behind it was trained to give, for `distill_weight`.
        compares_codes: True if a code can be more similar to a query than the query's own code is. Similarities of
            queries with queries are largest on the diagonal by construction, so positive-aware weights refuse them.
        in_workers: True if data workers may call `similarity` before the step. It must then need no GPU, and the
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
        parameters = inspect.signature(type(self)).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        values = {name: getattr(self, name, default) for name, default in defaults.items()}
        changed = [f"{name}={value!r}" for name, value in values.items() if repr(value) != repr(defaults[name])]
        return f"{type(self).__name__}({', '.join(changed)})"

    def check(self, dataset) -> None:
        """Raises UserError if `fit` cannot work on these rows; called before a model is loaded."""

    def bind(self, encoder: Encoder) -> None:
        """Receives the run's encoder before training, for an estimator that uses it."""

    @property
    def finds_neighbours(self) -> bool:
        """True if `neighbours` works."""
        return type(self).neighbours is not Estimator.neighbours

    def neighbours(
        self,
        k: int,
        text_ids: Sequence[np.ndarray] = (),
        progress: str | None = None,
        rows: int | None = None,
        codes: int | None = None,
    ) -> Neighbours:
        """Finds the k codes most similar to each row's query. Called after `fit`, on every process.

        Args:
            text_ids, progress: as in `nearest_rows`.
            rows: find neighbours of only the first `rows` rows; of all when None.
            codes: only the codes of the first `codes` rows may be neighbours; all when None.
        """
        raise NotImplementedError

    def fit(self, dataset) -> None:
        """Prepares for the rows of `dataset` (a `datasets.Dataset` with the training columns). Called once."""
        raise NotImplementedError

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes the raw similarity of Q rows' queries to C rows' codes, larger = more similar, Tensor[Q, C]."""
        raise NotImplementedError


def as_array(rows: Rows) -> np.ndarray:
    """Converts row numbers to a NumPy index."""
    return rows.cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows, dtype=np.int64)
