"""The base class of estimators, which are frozen functions of training rows, and mixtures of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.neighbours import Neighbours
from soft_trainer.encoders.encoding import Encoder
from soft_trainer.errors import UserError
from soft_trainer.weights import checked_similarity

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


def members_of(estimator) -> Sequence:
    """Lists the members of a mixture; any other estimator is its only member, and None has none."""
    return getattr(estimator, "members", [] if estimator is None else [estimator])


def as_array(rows: Rows) -> np.ndarray:
    """Converts row numbers to a NumPy index."""
    return rows.cpu().numpy() if isinstance(rows, torch.Tensor) else np.asarray(rows, dtype=np.int64)


class MixtureEstimator(Estimator):
    """Averages its members' distributions over a query's negatives.

    `similarity` is the logarithm of the average, so a softmax at temperature 1 gives the average back. Alpha and beta
    are the first member's.

    Args:
        members: estimators.
        shares: the share of each member, scaled to sum to 1; equal when None.
        temperatures: the temperature of each member's softmax; the member's own when None.

    Raises:
        UserError: there are no members, or shares or temperatures are of the wrong number or not above 0.
    """

    temperature = 1.0
    compares_codes = False  # its similarities are logarithms, relative to the other codes

    def __init__(
        self,
        members: Sequence[Estimator],
        shares: Sequence[float] | None = None,
        temperatures: Sequence[float] | None = None,
    ):
        if not members:
            raise UserError("a mixture needs at least one estimator")
        self.members = list(members)
        self.alpha, self.beta = (getattr(self.members[0], name, 1.0) for name in ("alpha", "beta"))
        self.in_workers = all(getattr(member, "in_workers", False) for member in self.members)
        shares = [1.0] * len(self.members) if shares is None else list(shares)
        own = [getattr(member, "temperature", 1.0) for member in self.members]
        self.temperatures = own if temperatures is None else list(temperatures)
        for name, values in (("shares", shares), ("temperatures", self.temperatures)):
            if len(values) != len(self.members) or not all(0 < value < math.inf for value in values):
                raise UserError(f"{name}={values}: {len(self.members)} numbers above 0 are needed, one a member")
        self.shares = [share / sum(shares) for share in shares]

    @property
    def _own(self) -> list[Estimator]:
        """The members that are an `Estimator`, not a user's class with `fit` and `similarity` alone."""
        return [member for member in self.members if isinstance(member, Estimator)]

    def check(self, dataset) -> None:
        """Checks every member that is an `Estimator`."""
        for member in self._own:
            member.check(dataset)

    def bind(self, encoder: Encoder) -> None:
        """Binds every member that is an `Estimator`."""
        for member in self._own:
            member.bind(encoder)

    @property
    def finds_neighbours(self) -> bool:
        """True if a member finds neighbours."""
        return any(member.finds_neighbours for member in self._own)

    def neighbours(self, *args, **options) -> Neighbours:
        """Finds neighbours with the first member that can."""
        finder = next((member for member in self._own if member.finds_neighbours), super())
        return finder.neighbours(*args, **options)

    def fit(self, dataset) -> None:
        """Fits every member."""
        for member in self.members:
            member.fit(dataset)

    def similarity(self, query_rows: Rows, code_rows: Rows) -> Tensor:
        """Computes the logarithm of the averaged distributions, Tensor[Q, C]."""
        own = torch.from_numpy(as_array(query_rows)[:, None] == as_array(code_rows)[None, :])
        own &= ~own.all(1, keepdim=True)  # a query that sees only its own code has nothing else to normalise over
        logs = []
        for member, share, temperature in zip(self.members, self.shares, self.temperatures, strict=True):
            logits = checked_similarity(member, query_rows, code_rows).cpu() / temperature
            negatives = logits.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
            logs.append(logits - negatives + torch.log(torch.tensor(share)))
        return torch.stack(logs).logsumexp(0)
