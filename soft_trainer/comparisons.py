"""Compares the queries and the codes of a global batch with each other, for the encoder and for its estimator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soft_trainer import losses
from soft_trainer.weights import checked_similarity


@dataclass(frozen=True)
class Comparison:
    """A block of scores whose softmax should equal that of the estimator's similarities.

    Args:
        scores: Tensor[B, G].
        similarity: Tensor[B, G], the estimator's.
        own: LongTensor[B], the column of each row's own pair, which is no target.
        targets: BoolTensor[B, G], True where a column is a target. By default, everywhere but on `own`.
    """

    scores: Tensor
    similarity: Tensor
    own: Tensor
    targets: Tensor | None

    def divergence(self, temperature: float) -> Tensor:
        """Computes the mean over rows of the KL divergence of the encoder's softmax from the estimator's."""
        return losses.kl_divergence(self.scores, self.similarity, temperature, self.own, negatives=self.targets)


@dataclass(frozen=True)
class GlobalPairs:
    """The G training pairs of a global batch, of which B belong to this process.

    Args:
        query_rows, code_rows: int64[G], the rows of each pair's query and code.
        columns: LongTensor[G], the column of each pair's code among the codes of the batch.
        own: LongTensor[B], the places of this process's pairs among the G pairs.
        targets: BoolTensor[B, G], True where two pairs can be compared. A pair is not compared with itself, nor with a
            pair whose code answers its query, or whose query its code answers.
    """

    query_rows: np.ndarray
    code_rows: np.ndarray
    columns: Tensor
    own: Tensor
    targets: Tensor

    @classmethod
    def of(cls, query_rows: np.ndarray, code_rows: np.ndarray, columns: Tensor, own: slice, answers) -> GlobalPairs:
        """Finds the targets.

        Args:
            own: the places of this process's pairs.
            answers: the right answers (`soft_trainer.data.judgments.RightAnswers`), or None to compare all pairs.
        """
        places = torch.arange(len(query_rows))[own]
        targets = torch.ones(len(places), len(query_rows), dtype=torch.bool)
        if answers is not None:
            targets &= ~answers.among(query_rows[own], code_rows)
            targets &= ~answers.among(query_rows, code_rows[own]).T
        return cls(query_rows, code_rows, columns, places, targets.scatter(1, places.unsqueeze(1), False))

    def block(self, block: slice) -> GlobalPairs:
        """Returns the same pairs, with a part of this process's own."""
        return dataclasses.replace(self, own=self.own[block], targets=self.targets[block])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> GlobalPairs:
        """Applies `change` to every tensor."""
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **tensors)

    def similarity(self, estimator) -> Tensor:
        """Computes the estimator's similarities, in the order of `compare`, Tensor[B, 3, G]."""
        queries = self.query_rows
        codes = self.code_rows
        own = self.own.numpy(force=True)
        blocks = (
            checked_similarity(estimator, queries, codes[own]).T,
            checked_similarity(estimator, queries[own], queries, "between_queries"),
            checked_similarity(estimator, codes[own], codes, "between_codes"),
        )
        return torch.stack(blocks, dim=1)

    def compare(self, score: Callable, queries: Tensor, codes: Tensor, similarity: Tensor) -> list[Comparison]:
        """Scores own codes against queries, own queries against queries, and own codes against codes.

        Args:
            score: computes the scores, Tensor[B, N], of embeddings, Tensor[B, d] and Tensor[N, d].
            queries: Tensor[G, d], the embeddings of the pairs' queries.
            codes: Tensor[N, d], the embeddings of the batch's codes.
            similarity: Tensor[B, 3, G], the result of `similarity`.
        """
        codes = codes[self.columns]
        own_queries = queries[self.own]
        own_codes = codes[self.own]
        scores = (score(own_codes, queries), score(own_queries, queries), score(own_codes, codes))
        blocks = zip(scores, similarity.unbind(1), strict=True)
        return [Comparison(each, similar, self.own, self.targets) for each, similar in blocks]
