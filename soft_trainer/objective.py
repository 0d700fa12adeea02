"""Defines the loss that a run minimises, together with its settings."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soft_trainer import choices, losses, weights
from soft_trainer.comparisons import Comparison, GlobalPairs
from soft_trainer.errors import UserError
from soft_trainer.fingerprints import function_fingerprint, own_code
from soft_trainer.weights import (
    cancel_above_ratio,
    cancel_top_k,
    checked_similarity,
    smallest_batch,
)

# A loss or a weighting, ours or a user's, is called with what its signature asks for: parts of a batch, or settings.
LOSSES = {name: getattr(losses, function) for name, function in choices.LOSSES.items()}
WEIGHTINGS = {name: getattr(weights, function) for name, function in choices.WEIGHTINGS.items()}
# A query with too few negatives for Eq. 4 is trained by InfoNCE. Raising an error would need a device synchronisation.
WEIGHTINGS["eq4"] = functools.partial(WEIGHTINGS["eq4"], too_few="uniform")
# Settings that need an estimator, with the one value that does not.
NEED_SIMILARITY = {"cancel": "none", "distill_weight": 0}


class AnswerRows:
    """Gives each right answer of each query a separate row.

    Args:
        positives: LongTensor[B], the column of each query's own code.
        also: BoolTensor[B, N], True where a column is another right answer.
    """

    def __init__(self, positives: Tensor, also: Tensor):
        right = also.scatter(1, positives.unsqueeze(1), True)
        self.queries, self.positives = right.nonzero(as_tuple=True)
        self.others = right[self.queries].scatter(1, self.positives.unsqueeze(1), False)
        self.shares = right.sum(1, dtype=torch.float64).reciprocal()[self.queries]
        self.number = len(right)

    def expand(self, batch: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Returns the batch with R rows, one per right answer. A query's other answers are excluded from its rows."""
        rows = {}
        for name, values in batch.items():
            if values is not None:
                rows[name] = values[self.queries]
        rows["positives"] = self.positives
        rows["negatives"] = without(rows.get("negatives"), self.others)
        if "weights" in rows:
            rows["weights"] = rows["weights"].masked_fill(self.others, 0.0)
        return rows

    def mean(self, losses: Tensor) -> Tensor:
        """Averages the rows' losses such that every query has the same weight."""
        return (losses * self.shares.to(losses.dtype)).sum() / self.number


def without(columns: Tensor | None, left_out: Tensor | None) -> Tensor | None:
    """Returns the columns that are not left out, BoolTensor[B, N]. None means all columns, or none left out."""
    if left_out is None:
        return columns
    if columns is None:
        return ~left_out
    return columns & ~left_out


@dataclass(frozen=True)
class Objective:
    """A run's loss and its settings. Call it with the scores of a batch to compute the loss.

    Args:
        loss: a key of `LOSSES`, or a user's function as `module:name`.
        weighting: how similarities become weights: a key of `WEIGHTINGS`, or a user's function as `module:name`.
        alpha, beta, temperature, floor: the parameters of Eq. 4 and of the softmax before it.
        margin: the margin of positive-aware weights, whose temperature is `temperature`.
        infonce_weight, kl_weight: the weights of the two terms in `kl_regularization`.
        cancel: false-negative cancellation (Section 4.4): "none", "top_k" or "ratio".
        cancel_k: the number of most similar negatives that "top_k" cancels.
        cancel_ratio: "ratio" cancels negatives whose similarity is above this share of the positive's.
        distill_weight: the weight of an additional loss, the KL divergence from the estimator. 0 turns it off.
        distill_temperature: the temperature of the estimator's softmax in that loss.
        distill_pairs: what that loss compares: "query_code" or "all", see `GlobalPairs`.
    """

    loss: str = "soft_info_nce"
    weighting: str = "eq4"
    alpha: float = 1.5
    beta: float = 0.5
    temperature: float = 1.0
    floor: float = 0.1
    margin: float = 0.0
    distill_weight: float = 0.0
    distill_temperature: float = 1.0
    distill_pairs: str = "query_code"
    infonce_weight: float = 1.3
    kl_weight: float = 0.7
    cancel: str = "none"
    cancel_k: int = 3
    cancel_ratio: float = 0.5

    @property
    def needs_similarity(self) -> bool:
        """True if the loss needs an estimator."""
        return bool(self.settings_that_need_similarity)

    @property
    def settings_that_need_similarity(self) -> str:
        """The settings that need an estimator, as `name=value, ...`, or "" if there are none."""
        names = [name for name, value in NEED_SIMILARITY.items() if getattr(self, name) != value]
        if not self.read_by_loss.isdisjoint(("weights", "similarity")):
            names = ["loss", *names]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @functools.cached_property
    def loss_function(self) -> Callable[..., Tensor]:
        """The function that `loss` stands for."""
        return _find("loss", self.loss, LOSSES)

    @functools.cached_property
    def weighting_function(self) -> Callable[..., Tensor]:
        """The function that `weighting` stands for."""
        return _find("weighting", self.weighting, WEIGHTINGS)

    @functools.cached_property
    def read_by_loss(self) -> frozenset[str]:
        """The names of the loss's arguments."""
        return frozenset(inspect.signature(self.loss_function).parameters)

    @property
    def reads(self) -> frozenset[str]:
        """The names of the arguments of the loss and, if it uses weights, those of the weighting."""
        if not self.uses_weights:
            return self.read_by_loss
        return self.read_by_loss.union(inspect.signature(self.weighting_function).parameters)

    @property
    def uses_weights(self) -> bool:
        """True if the loss uses weights."""
        return "weights" in self.read_by_loss

    @property
    def sources(self) -> dict[str, str]:
        """Hashes of the source of the user's own loss and weighting, keyed by option, with the modules they are in."""
        hashes = {}
        for option, function in (("loss", self.loss_function), ("weighting", self.weighting_function)):
            name = getattr(self, option)
            if ":" in name:
                hashes[option] = own_code(name) or function_fingerprint(function)
        return hashes

    @property
    def leaves_out(self) -> bool:
        """True if the loss can leave out columns, as masks and cancellation ask: by `negatives`, or by weights."""
        return not self.read_by_loss.isdisjoint(("negatives", "weights"))

    @property
    def smallest_batch(self) -> int:
        """The smallest batch size N with enough negatives: 2, or for Eq. 4 a number that depends on alpha and beta."""
        if self.cancel == "top_k":
            cancelled = self.cancel_k
        else:
            cancelled = 0
        by_formula = self.uses_weights and self.weighting == "eq4"
        return cancelled + (smallest_batch(self.alpha, self.beta) if by_formula else 2)

    @property
    def reads_further_answers(self) -> bool:
        """True if the loss can use several right answers to a query. A user's loss must have an argument `also`."""
        return self.loss in LOSSES or "also" in self.read_by_loss

    @property
    def compares_sides(self) -> bool:
        """True if the loss also compares queries with queries and codes with codes."""
        return self.distill_weight > 0 and self.distill_pairs == "all"

    def __call__(
        self,
        scores: Tensor,
        positives: Tensor,
        similarity: Tensor | None = None,
        negatives: Tensor | None = None,
        weights: Tensor | None = None,
        also: Tensor | None = None,
        comparisons: Sequence[Comparison] = (),
    ) -> Tensor:
        """Computes the loss of B queries against N codes, a scalar.

        Args:
            scores: Tensor[B, N].
            positives: LongTensor[B], the column of each query's own code.
            similarity: Tensor[B, N], the estimator's raw similarities. Required if `needs_similarity`, unless
                `weights` are given.
            negatives: BoolTensor[B, N], True where a column is a negative. By default, everywhere but on the positive.
            weights: Tensor[B, N], the weights of Soft-InfoNCE, which are 0 on columns that are not negatives.
            also: BoolTensor[B, N], True where a column is another right answer. It is not a negative then. The loss
                of a query is the mean over its right answers, each taken as the positive with the others excluded.
            comparisons: what the distillation compares in addition to queries with codes.
        """
        negatives = self.valid_negatives(similarity, positives, without(negatives, also))
        if self.uses_weights and weights is None:
            weights = self.weights(similarity, positives, negatives)
        batch = {"scores": scores, "positives": positives, "similarity": similarity}
        batch |= {"negatives": negatives, "weights": weights}
        if also is None or self.loss not in LOSSES:
            loss = self._call(self.loss_function, batch | {"also": also})
        else:
            rows = AnswerRows(positives, also)
            loss = rows.mean(self._call(self.loss_function, rows.expand(batch) | {"reduction": "none"}))
        if self.distill_weight:
            codes = Comparison(scores, similarity, positives, negatives)
            terms = [each.divergence(self.distill_temperature) for each in (codes, *comparisons)]
            loss = loss + self.distill_weight * sum(terms) / len(terms)
        return loss

    def weigh(
        self,
        estimator,
        query_rows,
        code_rows,
        positives: Tensor,
        negatives: Tensor | None = None,
        pairs: GlobalPairs | None = None,
    ) -> dict[str, Tensor]:
        """Computes `loss_inputs` for training rows, on the device of `positives`.

        Args:
            estimator: an object with `similarity(query_rows, code_rows)`.
            query_rows, code_rows: int64[B] and int64[N].
            positives, negatives: see `__call__`.
            pairs: the pairs of the global batch, if the objective `compares_sides`.

        Returns:
            Keyword arguments for `__call__`, Tensor[B, N] each, and with pairs their `pair_similarity`, Tensor[B, 3,
            G]. They are float32, because float64 would double what a data-loader worker sends, and some devices do not
            support it.
        """
        rows = (torch.as_tensor(numbers, dtype=torch.long, device="cpu") for numbers in (query_rows, code_rows))
        similarity = checked_similarity(estimator, *rows).to(positives.device)
        with torch.no_grad():
            inputs = self.loss_inputs(similarity, positives, negatives)
        if pairs is not None:
            inputs["pair_similarity"] = pairs.similarity(estimator).to(positives.device)
        return {name: tensor.float() for name, tensor in inputs.items()}

    def loss_inputs(self, similarity: Tensor, positives: Tensor, negatives: Tensor | None = None) -> dict[str, Tensor]:
        """Computes what the loss needs from the estimator, before scores are known.

        Returns:
            The `weights` after cancellation, the raw `similarity`, or both, keyed by name.
        """
        inputs = {}
        if self.uses_weights:
            valid = self.valid_negatives(similarity, positives, negatives)
            inputs["weights"] = self.weights(similarity, positives, valid)
        # A loss that takes `negatives` needs similarities for cancellation; weights already include it.
        if self.distill_weight > 0 or not self.read_by_loss.isdisjoint(("similarity", "negatives")):
            inputs["similarity"] = similarity
        return inputs

    def valid_negatives(self, similarity: Tensor | None, positives: Tensor, negatives: Tensor | None) -> Tensor | None:
        """Returns the columns of `negatives` that cancellation keeps, BoolTensor[B, N]."""
        if self.cancel == "none" or similarity is None:  # without similarities, the weights include cancellation
            return negatives
        if negatives is not None:
            # A duplicate is already left out, so it must neither use up one of the k nor count as most similar.
            column = positives.unsqueeze(1)
            similarity = similarity.masked_fill(~negatives.scatter(1, column, True), -torch.inf)
        if self.cancel == "top_k":
            kept = cancel_top_k(similarity, self.cancel_k, positives)
        else:
            kept = cancel_above_ratio(similarity, self.cancel_ratio, positives)
        if negatives is None:
            return kept
        return kept & negatives

    def weights(self, similarity: Tensor, positives: Tensor, negatives: Tensor | None = None) -> Tensor:
        """Computes the weights w_ij, Tensor[B, N]: 1 on the positive, 0 on columns that are not negatives.

        If the batch is too small for Eq. 4, all negatives of a query get weight 1.
        """
        batch = {"similarity": similarity, "positives": positives, "negatives": negatives}
        weights = self._call(self.weighting_function, batch)
        if getattr(weights, "shape", None) != similarity.shape:
            raise UserError(
                f"weighting={self.weighting} returned {_shape(weights)} for similarities of {_shape(similarity)}: "
                "a weight for each of them is expected"
            )
        if negatives is not None:
            weights = weights.masked_fill(~negatives, 0.0)
        return weights.scatter(1, positives.unsqueeze(1), 1.0)

    def try_out(self) -> None:
        """Tries the loss and the weighting on two small batches. The second has masked columns and more right answers.

        Raises:
            UserError: a function failed, or its result has the wrong shape.
        """
        grid = torch.linspace(-1, 1, 15).reshape(3, 5)
        positives = torch.arange(3)
        left_out = torch.zeros(3, 5, dtype=torch.bool)
        left_out[:, 4] = True
        for masks in ({}, {"negatives": ~left_out, "also": left_out}):
            scores = grid.clone().requires_grad_()
            try:
                loss = self(scores, positives, grid, **masks)
            except UserError:
                raise
            except Exception as error:
                names = f"loss={self.loss}, weighting={self.weighting}"
                raise UserError(f"{names}: tried on 3 queries and 5 codes: {type(error).__name__}: {error}") from error
            if not isinstance(loss, Tensor) or loss.shape or not loss.requires_grad:
                raise UserError(
                    f"loss={self.loss} returned {_shape(loss)} for scores of Tensor[3, 5]: a scalar is expected, the "
                    "mean over queries, with a gradient for the scores"
                )

    def _call(self, function: Callable[..., Tensor], batch: Mapping[str, Tensor | None]) -> Tensor:
        """Calls a loss or a weighting with those arguments that are in its signature."""
        values = {**vars(self), **batch}
        names = inspect.signature(function).parameters
        return function(**{name: values[name] for name in names if name in values})


def name_functions(options) -> None:
    """Replaces functions in the options `loss` and `weighting` by their names, `module:name`.

    A name can be stored as JSON. Data-loader workers, other processes and resumed runs use it to find the function.

    Args:
        options: an object with these two attributes, such as training arguments.

    Raises:
        UserError: a function is not defined at the top level of a module.
    """
    for option in ("loss", "weighting"):
        function = getattr(options, option)
        if not callable(function):
            continue
        module = getattr(function, "__module__", None)
        name = getattr(function, "__qualname__", "")
        if getattr(sys.modules.get(module), name, None) is not function:
            raise UserError(f"{option}={function!r}: define it with `def`, at the top level of a module")
        setattr(options, option, f"{module}:{name}")


def import_reference(option: str, reference: str):
    """Imports the object that an option specifies as `module:name`. The module may be in the current folder.

    Raises:
        UserError: the module does not exist or has no object with this name.
    """
    module, _, name = reference.partition(":")
    # An installed command does not look for modules in the current folder, as `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"{option}={reference!r}: {error}") from error


def _find(option: str, name: str, known: Mapping[str, Callable]) -> Callable[..., Tensor]:
    """Returns the function that an option specifies, either a known one or one to import.

    Raises:
        UserError: the function does not exist.
    """
    if name in known:
        return known[name]
    function = import_reference(option, name)
    if not inspect.isfunction(function):
        raise UserError(f"{option}={name}: is no function")
    return function


def _shape(value) -> str:
    """Returns a value's type and shape, such as Tensor[3, 5]."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    return type(value).__name__
