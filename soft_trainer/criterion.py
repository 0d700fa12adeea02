"""Defines `Criterion`, a training loss with its settings, and `Targets`, the positives and negatives of a batch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soft_trainer import losses, weights as weightings
from soft_trainer.errors import UserError
from soft_trainer.options import choices
from soft_trainer.options.loss_options import LossOptions
from soft_trainer.options.references import NamedFunction, import_reference
from soft_trainer.weights import cancel_above_ratio, cancel_top_k, smallest_batch

# A loss or weighting, built in or a user's, is called with the arguments in its signature: tensors and settings.
LOSSES = {name: getattr(losses, function) for name, function in choices.LOSSES.items()}
WEIGHTINGS = {name: getattr(weightings, function) for name, function in choices.WEIGHTINGS.items()}
# Settings that need an estimator unless they have this value.
NEED_SIMILARITY = {"cancel": "none", "distill_weight": 0}
# Settings that only losses and weightings read.
FUNCTION_SETTINGS = {"alpha", "beta", "temperature", "floor", "margin", "infonce_weight", "kl_weight"}


@dataclass(frozen=True)
class Targets:
    """Labels for B queries and the N functions in a batch: the positives, the negatives and their weights.

    `Criterion.targets` computes the targets before the scores are known. `targets[block]` selects some queries.

    Args:
        positives: LongTensor[B], the column of each query's positive.
        negatives: BoolTensor[B, N], True where a column is a negative, after masks and cancellation are applied. None
            means all columns except the positive.
        extra_positives: BoolTensor[B, N], True where a column is another positive, or None if there are none.
        similarity: Tensor[B, N], the estimator's raw similarities, or None if the loss does not use them.
        weights: Tensor[B, N], the weights w_ij, or None if the loss does not use them.
        positive_counts: int64[B] on the host, the number of positives of each query, or None if unknown. With these
            counts, the loss of queries with several positives does not wait for a GPU.
        estimated: BoolTensor[B, N], True where the estimator knows the similarity. None means all columns.
    """

    positives: Tensor
    negatives: Tensor | None = None
    extra_positives: Tensor | None = None
    similarity: Tensor | None = None
    weights: Tensor | None = None
    positive_counts: np.ndarray | None = None
    estimated: Tensor | None = None

    def __len__(self) -> int:
        return len(self.positives)

    def __getitem__(self, block: slice | Tensor) -> Targets:
        """Returns the targets of the queries that a slice or an index tensor selects."""
        counts = None
        if self.positive_counts is not None and isinstance(block, slice):
            counts = self.positive_counts[block]
        return dataclasses.replace(self.mapped(lambda tensor: tensor[block]), positive_counts=counts)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Targets:
        """Returns new targets with `change` applied to every tensor, for example to move them to another device."""
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **tensors)


@dataclass
class Criterion(LossOptions):
    """A training loss with its settings. Call it with the scores and targets of a batch to compute the loss.

    The settings are the fields of `LossOptions`. Those that an estimator decides have BM25's values by default.

    Example:
        >>> criterion = Criterion("soft_info_nce", alpha=1.5, beta=0.5)
        >>> targets = criterion.targets(torch.arange(8), similarity=similarity)
        >>> loss = criterion(scores, targets)
    """

    loss: str = "soft_info_nce"
    alpha: float = 1.5
    beta: float = 0.5
    temperature: float = 1.0
    margin: float = 0.0
    distill_temperature: float = 1.0

    # ---- On a batch ----

    def targets(
        self,
        positives: Tensor,
        negatives: Tensor | None = None,
        extra_positives: Tensor | None = None,
        similarity: Tensor | None = None,
        estimated: Tensor | None = None,
    ) -> Targets:
        """Cancels likely false negatives, turns the similarities into weights, and returns the batch's targets.

        Args:
            positives: LongTensor[B], the column of each query's positive.
            negatives: BoolTensor[B, N], True where a column is a negative. By default, all columns but the positive.
            extra_positives: BoolTensor[B, N], True where a column is another positive and therefore not a negative.
            similarity: Tensor[B, N], the estimator's raw similarities. Required if `needs_similarity`.
            estimated: BoolTensor[B, N], True where `similarity` is known. By default, all columns. The other columns
                keep a weight of 1, and are neither cancelled nor part of the divergence that `distill_weight` adds. A
                positive whose similarity is unknown counts as infinitely similar to its query.

        Raises:
            ValueError: the loss needs `similarity`, but it is None.
        """
        if self.needs_similarity and similarity is None:
            raise ValueError(f"{self.settings_that_need_similarity}: similarity is missing")
        if extra_positives is not None:
            negatives = excluding(negatives, extra_positives)
        compared = similarity
        if similarity is not None and estimated is not None:
            column = positives.unsqueeze(1)
            own = similarity.gather(1, column).masked_fill(~estimated.gather(1, column), torch.inf)
            compared = similarity.scatter(1, column, own)
        if self.cancel != "none":
            negatives = self._cancelled(compared, positives, negatives, estimated)
        weights = None
        if self.uses_weights:
            weights = self._weights(compared, positives, negatives, estimated)
        if not self.distill_weight and "similarity" not in self.read_by_loss:
            similarity = estimated = None
        return Targets(positives, negatives, extra_positives, similarity, weights, estimated=estimated)

    def __call__(self, scores: Tensor, targets: Targets) -> Tensor:
        """Computes the mean loss of B queries against N functions, a scalar.

        If a query has several positives, the loss is computed for each positive in turn, with the other positives
        excluded, and then averaged.

        Args:
            scores: Tensor[B, N].
            targets: the result of `targets`.
        """
        batch = {"scores": scores, **vars(targets)}
        if targets.extra_positives is None or self.loss not in LOSSES:
            loss = self._call(self.loss_function, batch)
        else:
            rows = PositiveRows(targets)
            expanded = {"scores": scores[rows.queries], **vars(rows.targets), "reduction": "none"}
            loss = rows.mean(self._call(self.loss_function, expanded))
        if self.distill_weight:
            divergence = losses.kl_divergence(
                scores,
                targets.similarity,
                self.distill_temperature,
                targets.positives,
                negatives=_both(targets.negatives, targets.estimated),
            )
            loss = loss + self.distill_weight * divergence
        return loss

    def _cancelled(
        self, similarity: Tensor, positives: Tensor, negatives: Tensor | None, estimated: Tensor | None
    ) -> Tensor:
        """Returns the negatives that remain after false-negative cancellation, BoolTensor[B, N]."""
        column = positives.unsqueeze(1)
        candidates = _both(negatives, estimated)
        if candidates is not None:
            # Another column must not use up one of the k cancellations.
            similarity = similarity.masked_fill(~candidates.scatter(1, column, True), -torch.inf)
        if self.cancel == "top_k":
            kept = cancel_top_k(similarity, self.cancel_k, positives)
        else:
            kept = cancel_above_ratio(similarity, self.cancel_ratio, positives)
        if estimated is not None:
            kept = (kept | ~estimated).scatter(1, column, False)
        if negatives is None:
            return kept
        return kept & negatives

    def _weights(
        self, similarity: Tensor, positives: Tensor, negatives: Tensor | None, estimated: Tensor | None
    ) -> Tensor:
        """Computes the weights w_ij, Tensor[B, N].

        They are 1 on the positive and on negatives that are not estimated, and 0 on columns that are not negatives.
        """
        batch = {"similarity": similarity, "positives": positives, "negatives": _both(negatives, estimated)}
        weights = self._call(self.weighting_function, batch)
        if getattr(weights, "shape", None) != similarity.shape:
            raise UserError(
                f"weighting={self.weighting} returned {_shape(weights)} for similarities of {_shape(similarity)}: "
                "expected the same shape"
            )
        if estimated is not None:
            weights = weights.masked_fill(~estimated, 1.0)
        if negatives is not None:
            weights = weights.masked_fill(~negatives, 0.0)  # a user's function may leave other values there
        return weights.scatter(1, positives.unsqueeze(1), 1.0)

    def _call(self, function: Callable[..., Tensor], batch: Mapping[str, Tensor | None]) -> Tensor:
        """Calls a loss or weighting function with the tensors and settings that are among its arguments."""
        values = {**vars(self), **batch}
        return function(**{name: values[name] for name in _arguments(function) if name in values})

    # ---- What the settings need ----

    @functools.cached_property
    def loss_function(self) -> Callable[..., Tensor]:
        """The loss function. The setting `loss` is its key, or its module and name."""
        return _find("loss", self.loss, LOSSES)

    @functools.cached_property
    def weighting_function(self) -> Callable[..., Tensor]:
        """The weighting function. The setting `weighting` is its key, or its module and name."""
        return _find("weighting", self.weighting, WEIGHTINGS)

    @functools.cached_property
    def read_by_loss(self) -> frozenset[str]:
        """The names of the loss function's arguments."""
        return _arguments(self.loss_function)

    @property
    def reads(self) -> frozenset[str]:
        """The names of the arguments of the loss function and, if the loss uses weights, of the weighting function."""
        if not self.uses_weights:
            return self.read_by_loss
        return self.read_by_loss | _arguments(self.weighting_function)

    @property
    def unread(self) -> dict[str, str]:
        """The settings that have no effect beside the others, each with the reason."""
        unread = dict.fromkeys(FUNCTION_SETTINGS - self.reads, "neither the loss nor its weighting uses it")
        if self.cancel != "top_k":
            unread["cancel_k"] = "it needs cancel=top_k"
        if self.cancel != "ratio":
            unread["cancel_ratio"] = "it needs cancel=ratio"
        if not self.distill_weight:
            unread["distill_temperature"] = "distill_weight is 0"
        return unread

    @property
    def effective(self) -> dict[str, object]:
        """The settings that have an effect, keyed by name."""
        off = {"weighting": "linear", **NEED_SIMILARITY}
        unread = self.unread
        effective = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in unread and value != off.get(field.name):
                effective[field.name] = value
        return effective

    @property
    def uses_weights(self) -> bool:
        """True if the loss function has an argument `weights`."""
        return "weights" in self.read_by_loss

    @property
    def needs_similarity(self) -> bool:
        """True if the loss, cancellation or distillation needs an estimator's similarities."""
        return bool(self.settings_that_need_similarity)

    @property
    def settings_that_need_similarity(self) -> str:
        """The settings that need an estimator, as `name=value, ...`, or "" if there are none."""
        names = [name for name, value in NEED_SIMILARITY.items() if getattr(self, name) != value]
        if not self.read_by_loss.isdisjoint(("weights", "similarity")):
            names = ["loss", *names]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def can_exclude(self) -> bool:
        """True if the loss can exclude columns, by `negatives` or zero weights, as masks and cancellation require."""
        return not self.read_by_loss.isdisjoint(("negatives", "weights"))

    @property
    def reads_extra_positives(self) -> bool:
        """True if the loss supports several positives per query. A user's loss must take `extra_positives`."""
        return self.loss in LOSSES or "extra_positives" in self.read_by_loss

    @property
    def smallest_batch(self) -> int:
        """The least number of functions in a batch: 2, or more if Eq. 4 or top-k cancellation needs more negatives."""
        cancelled = 0
        if self.cancel == "top_k":
            cancelled = self.cancel_k
        if self.uses_weights and self.weighting == "linear":
            return cancelled + smallest_batch(self.alpha, self.beta)
        return cancelled + 2

    def try_out(self, divided_by: str = "") -> None:
        """Tests the loss and weighting functions on two small batches, one of which has masks and extra positives.

        The loss must keep its value if the batch is repeated: each query twice, or two copies whose queries and
        functions do not meet. A sum doubles in both. Random losses are not compared.

        Args:
            divided_by: what computes the loss of some of the queries at a time, such as "2 processes". The loss must
                then also be the mean of the losses of single queries.

        Raises:
            UserError: a function raised an error or returned a tensor of the wrong shape, or the loss is not a mean.
        """
        grid = torch.arange(15.0).mul(1.7).sin().reshape(3, 5)  # without symmetry: the rows and columns do not cancel
        positives = torch.arange(3)
        last = torch.zeros(3, 5, dtype=torch.bool)
        last[:, 4] = True
        names = f"loss={self.loss}, weighting={self.weighting}"
        for masks in ({}, {"negatives": ~last, "extra_positives": last}):
            scores = grid.clone().requires_grad_()
            randomness = torch.get_rng_state()
            try:
                targets = self.targets(positives, similarity=grid, **masks)
                loss = self(scores, targets)
                again = self(scores, targets)
                doubled = self(torch.cat([scores, scores]), targets.mapped(lambda tensor: torch.cat([tensor, tensor])))
                copies = targets.mapped(_two_copies)
                copies = dataclasses.replace(copies, positives=torch.cat([positives, positives + 5]))
                apart = self(_two_copies(scores), copies)
                single = sum(self(scores[[row]], targets[torch.tensor([row])]) for row in range(3)) / 3
            except UserError:
                raise
            except Exception as error:
                raise UserError(
                    f"{names} failed on a test batch of 3 queries and 5 functions. {type(error).__name__}: {error}"
                ) from error
            if not isinstance(loss, Tensor) or loss.shape or not loss.requires_grad:
                raise UserError(
                    f"loss={self.loss} returned {_shape(loss)} for scores of Tensor[3, 5]: expected a scalar, the "
                    "mean over queries, with a gradient for the scores"
                )
            # Rare randomness, such as dropout of 1 %, may not show, and numpy's changes no state here.
            same = torch.isclose(loss, again, equal_nan=True)
            if not torch.equal(randomness, torch.get_rng_state()) or not same:
                continue
            if not any(torch.isclose(loss, repeated, rtol=1e-3) for repeated in (doubled, apart)):
                raise UserError(
                    f"{names} returned {loss:.4g} for a test batch, and {doubled:.4g} for the same queries twice: "
                    "expected the mean over queries"
                )
            if divided_by and not torch.isclose(loss, single, rtol=1e-3):
                raise UserError(
                    f"loss={self.loss}: a query's term depends on other queries, so it would change with "
                    f"{divided_by}; use one process without gradient_cache_chunk_size, or override block_loss in a "
                    "subclass"
                )


class PositiveRows:
    """Expands queries with several positives into one row per positive, so that a loss sees one positive per row.

    Args:
        targets: the targets of B queries, with extra positives.

    Attributes:
        queries: LongTensor[R], the query of each row.
        targets: the targets of the R rows. Each row excludes the query's other positives.
    """

    def __init__(self, targets: Targets):
        relevant = targets.extra_positives.scatter(1, targets.positives.unsqueeze(1), True)
        self.queries, positives = _entries(relevant, targets.positive_counts)
        others = relevant[self.queries].scatter(1, positives.unsqueeze(1), False)
        rows = targets[self.queries]
        weights = rows.weights
        if weights is not None:
            weights = weights.masked_fill(others, 0.0)
        negatives = excluding(rows.negatives, others)
        self.targets = dataclasses.replace(rows, positives=positives, negatives=negatives, weights=weights)
        self.counts = relevant.sum(1)[self.queries]
        self.number = len(relevant)

    def mean(self, losses: Tensor) -> Tensor:
        """Averages the losses of the R rows, first within each query and then over the B queries."""
        return (losses * self.counts.to(losses.dtype).reciprocal()).sum() / self.number


def _entries(mask: Tensor, counts: np.ndarray | None) -> tuple[Tensor, Tensor]:
    """Returns the row and the column of each True entry of a mask, LongTensor[R] each, in order.

    Args:
        counts: int64[B], the number of entries in each row. Without it, a GPU has to tell the host how many there are.
    """
    if counts is None or mask.device.type in ("cpu", "mps"):
        return mask.nonzero(as_tuple=True)
    entries = mask.flatten().byte().argsort(descending=True, stable=True)[: int(counts.sum())]
    return entries // mask.shape[1], entries % mask.shape[1]


def _two_copies(matrix: Tensor) -> Tensor:
    """Repeats a batch's matrix for two copies of its queries and functions. Scores between the copies are very low."""
    if matrix.dim() == 1:
        return torch.cat([matrix, matrix])
    between = torch.full_like(matrix, False if matrix.dtype == torch.bool else -1e4)
    return torch.cat([torch.cat([matrix, between], 1), torch.cat([between, matrix], 1)])


def excluding(columns: Tensor | None, excluded: Tensor) -> Tensor:
    """Returns the mask `columns` without the mask `excluded`, BoolTensor[B, N]. If `columns` is None, it means all."""
    if columns is None:
        return ~excluded
    return columns & ~excluded


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Returns the columns that are in both masks, BoolTensor[B, N]. If a mask is None, it means all columns."""
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _find(option: str, name: str, known: Mapping[str, Callable]) -> Callable[..., Tensor]:
    """Returns the callable that `loss` or `weighting` refers to: a key of `known`, or `module:name`.

    Raises:
        UserError: the function does not exist.
    """
    if name in known:
        return known[name]
    if isinstance(name, NamedFunction):
        return name.function
    function = import_reference(option, name)
    if not inspect.isfunction(function):
        raise UserError(f"{option}={name}: expected a function")
    return function


def _arguments(function: Callable) -> frozenset[str]:
    """Returns the names of a callable's arguments, except those that a `functools.partial` has set."""
    return frozenset(inspect.signature(function).parameters).difference(getattr(function, "keywords", ()))


def _shape(value) -> str:
    """Returns a value's type and, for a tensor, its shape, such as `Tensor[3, 5]`."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    return type(value).__name__
