"""The loss that a run minimises, with its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from soft_trainer import losses
from soft_trainer.weights import (
    cancel_above_ratio,
    cancel_top_k,
    checked_similarity,
    negative_weights,
    positive_aware_weights,
    smallest_batch,
)


@dataclass(frozen=True)
class Loss:
    """A loss that a run can minimise.

    Args:
        label: its name in tables.
        function: one of `soft_trainer.losses`.
        reads: its arguments between scores and positives: `weights`, `similarity`, or fields of `LossSettings`.
    """

    label: str
    function: Callable
    reads: tuple[str, ...] = ()


LOSSES = {
    "soft_info_nce": Loss("Soft-InfoNCE", losses.soft_info_nce, ("weights",)),
    "info_nce": Loss("InfoNCE", losses.info_nce),
    "weighted_info_nce": Loss("Weighted InfoNCE", losses.weighted_info_nce, ("similarity", "temperature")),
    "bce": Loss("BCE", losses.binary_cross_entropy, ("similarity", "temperature")),
    "kl_regularization": Loss(
        "KL regularization",
        losses.kl_regularized_info_nce,
        ("similarity", "temperature", "infonce_weight", "kl_weight"),
    ),
}
# Settings that need an estimator, with the value that needs none.
NEED_SIMILARITY = {"loss": "info_nce", "cancel": "none", "distill_weight": 0}


@dataclass(frozen=True)
class LossSettings:
    """A loss with its settings, which turns the scores of a batch into a scalar.

    Args:
        loss: a key of `LOSSES`.
        weighting: "eq4" or "positive_aware", how similarities become weights.
        alpha, beta, temperature, floor: of Eq. 4 and of the softmax before it.
        margin: of positive-aware weights, whose temperature is `temperature` too.
        infonce_weight, kl_weight: of `kl_regularization`.
        cancel: false-negative cancellation (Section 4.4): "none", "top_k" or "ratio".
        cancel_k: the number of most similar negatives that "top_k" leaves out.
        cancel_ratio: the share of the positive's similarity above which "ratio" leaves a negative out.
        distill_weight, distill_temperature: of the KL divergence from the estimator that is added; weight 0 adds none.
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
        """The settings that need an estimator, as `name=value`; empty if there are none."""
        names = (name for name, value in NEED_SIMILARITY.items() if getattr(self, name) != value)
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def uses_weights(self) -> bool:
        """True if the loss uses weights."""
        return "weights" in LOSSES[self.loss].reads

    @property
    def smallest_batch(self) -> int:
        """The smallest N whose queries keep enough negatives: for Eq. 4 by alpha and beta, otherwise 2."""
        if self.cancel == "top_k":
            cancelled = self.cancel_k
        else:
            cancelled = 0
        by_formula = self.uses_weights and self.weighting == "eq4"
        return cancelled + (smallest_batch(self.alpha, self.beta) if by_formula else 2)

    def __call__(
        self,
        scores: Tensor,
        positives: Tensor,
        similarity: Tensor | None = None,
        negatives: Tensor | None = None,
        weights: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Tensor:
        """Computes the loss of B queries against N codes, a scalar.

        Args:
            scores: Tensor[B, N].
            positives: LongTensor[B], column of each query's own code.
            similarity: raw, Tensor[B, N]; needed if `needs_similarity`, unless `weights` are given.
            negatives: BoolTensor[B, N], the columns that count; all but the positive when None.
            weights: Tensor[B, N] of Soft-InfoNCE. They already say which columns count.
            also: BoolTensor[B, N], further right answers. `negatives` leaves them out.
        """
        negatives = self.valid_negatives(similarity, positives, negatives)
        if self.uses_weights:
            if weights is None:
                weights = self.weights(similarity, positives, negatives)
            loss = losses.soft_info_nce(scores, weights, positives, also=also)
        else:
            reads = (similarity if name == "similarity" else getattr(self, name) for name in LOSSES[self.loss].reads)
            loss = LOSSES[self.loss].function(scores, *reads, positives, negatives=negatives, also=also)
        if self.distill_weight:
            settings = self.distill_temperature, positives
            divergence = losses.kl_divergence(scores, similarity, *settings, negatives=negatives, also=also)
            loss = loss + self.distill_weight * divergence
        return loss

    def weigh(self, estimator, query_rows, code_rows, positives: Tensor, negatives: Tensor | None = None) -> dict:
        """Computes what `loss_inputs` returns from training rows, on the device of `positives`.

        Args:
            estimator: an object with `similarity(query_rows, code_rows)`.
            query_rows, code_rows: int64[B] and int64[N].
            positives, negatives: as in `__call__`.

        Returns:
            Keyword arguments for `__call__`, Tensor[B, N] in float32: float64 would double what a data worker sends,
            and some devices do not support it.
        """
        rows = (torch.as_tensor(numbers, dtype=torch.long, device="cpu") for numbers in (query_rows, code_rows))
        similarity = checked_similarity(estimator, *rows).to(positives.device)
        with torch.no_grad():
            inputs = self.loss_inputs(similarity, positives, negatives)
        return {name: tensor.float() for name, tensor in inputs.items()}

    def loss_inputs(self, similarity: Tensor, positives: Tensor, negatives: Tensor | None = None) -> dict[str, Tensor]:
        """Computes the weights (or similarities) that the loss needs, before the scores are known.

        Returns:
            `weights` of Soft-InfoNCE after cancellation, or the raw `similarity` for the other losses; both if a
            divergence is added to Soft-InfoNCE.
        """
        if not self.uses_weights:
            return {"similarity": similarity}
        valid = self.valid_negatives(similarity, positives, negatives)
        inputs = {"weights": self.weights(similarity, positives, valid)}
        if self.distill_weight > 0:
            inputs["similarity"] = similarity
        return inputs

    def valid_negatives(self, similarity: Tensor | None, positives: Tensor, negatives: Tensor | None) -> Tensor | None:
        """Returns the columns of `negatives` that cancellation keeps, BoolTensor[B, N]."""
        if self.cancel == "none" or similarity is None:  # without similarity, cancellation is in the weights
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
        """Computes w_ij, Tensor[B, N]; a query with too few negatives for Eq. 4 (a short batch) gets weights of 1."""
        if self.weighting == "positive_aware":
            return positive_aware_weights(similarity, self.margin, self.temperature, positives, negatives)
        settings = self.alpha, self.beta, self.temperature, self.floor
        return negative_weights(similarity, *settings, positives, negatives, too_few="uniform")
