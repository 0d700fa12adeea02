"""Makes a batch's targets (positives, negatives, weights) from row indices, for the trainer and `SoftInfoNCELoss`.

A batch's targets are made in three steps. The loader finds the known positives (`find_positives`) and, where workers
can ask the estimator, adds its similarities (`add_similarity`). The step adds the weights on its device
(`add_weights`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soft_trainer.criterion import Criterion, Targets
from soft_trainer.data.split import RelevantCodes
from soft_trainer.estimators.base import checked_similarity

# The most similarities that a data worker sends with a batch: 16 MiB in float32. Docker gives workers and processes 64
# MiB of shared memory by default.
MOST_SENT = 1 << 22


@dataclass(frozen=True)
class TargetMaker:
    """Makes the targets of a batch: finds known positives among the functions, and computes weights.

    Args:
        criterion: the loss with its settings.
        estimator: an object with `similarity(query_rows, code_rows)`, or None.
        relevant: finds relevant functions in a batch. If None, only the function paired with a query is positive.
        keeps_positives: True to keep other known positives as extra positives, or False to exclude them.
        without_query: bool[C], the functions that the estimator cannot compare (`codes_without_query`), or None. They
            are named negatives, so they count as the least similar functions of the batch.
        sends_float32: True if data workers send similarities in float32, because the step computes the weights on a
            GPU.
    """

    criterion: Criterion
    estimator: object | None = None
    relevant: RelevantCodes | None = None
    keeps_positives: bool = False
    without_query: np.ndarray | None = None
    sends_float32: bool = False

    def find_positives(self, queries: np.ndarray, codes: np.ndarray, positives: Tensor) -> tuple[Targets, int]:
        """Returns targets without similarities and weights, and the total number of other known positives.

        Args:
            queries: int64[B], the index of each query.
            codes: int64[N], the index of each column's code in the corpus.
            positives: LongTensor[B], the column of each query's positive.
        """
        if self.relevant is None:
            return Targets(positives), 0
        known = self.relevant.among(queries, codes).scatter(1, positives.unsqueeze(1), False)
        number = int(known.sum())
        if number == 0:
            return Targets(positives), 0
        targets = Targets(positives, ~known)
        if self.keeps_positives:
            targets = dataclasses.replace(targets, extra_positives=known, positive_counts=1 + known.sum(1).numpy())
        return targets, number

    def add_similarity(self, targets: Targets, queries: np.ndarray, codes: np.ndarray) -> Targets:
        """Returns the targets with the estimator's similarities, for a data worker to send.

        They are missing if the loss needs none, if data workers cannot ask the estimator, or if they are too large to
        send. In the last two cases, `add_weights` asks the estimator.
        """
        if self.estimator is None or not self.criterion.needs_similarity or len(queries) * len(codes) > MOST_SENT:
            return targets
        similarity = self._similarity(queries, codes)
        if self.sends_float32:
            similarity = similarity.float()
        return dataclasses.replace(targets, similarity=similarity)

    def add_weights(self, targets: Targets, queries: np.ndarray, codes: np.ndarray) -> Targets:
        """Returns the targets with the similarities and weights that the loss needs, in float32, on their device."""
        similarity = targets.similarity
        device = targets.positives.device
        if similarity is None and self.criterion.needs_similarity:
            similarity = self._similarity(queries, codes)
            if device.type != "cpu":
                similarity = similarity.float().to(device)
        estimated = None
        if similarity is not None and getattr(self.estimator, "partial", False):
            estimated = ~similarity.isnan()
            similarity = similarity.masked_fill(~estimated, 0.0)
        with torch.no_grad():
            made = self.criterion.targets(
                targets.positives, targets.negatives, targets.extra_positives, similarity, estimated
            )
        made = made.mapped(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)
        return dataclasses.replace(made, positive_counts=targets.positive_counts)

    def _similarity(self, queries: np.ndarray, codes: np.ndarray) -> Tensor:
        """Returns the estimator's similarities of B queries and N functions, Tensor[B, N]."""
        if self.without_query is None or not self.without_query[codes].any():
            return checked_similarity(self.estimator, queries, codes)
        compared = torch.from_numpy(~self.without_query[codes])
        known = checked_similarity(self.estimator, queries, codes[compared.numpy()])
        similarity = known.amin(1, keepdim=True).repeat(1, len(codes))
        similarity[:, compared.to(known.device)] = known
        return similarity
