"""Draws new hard negatives for each query in every epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import sparse

from soft_trainer.data.split import Judgments
from soft_trainer.errors import UserError
from soft_trainer.estimators.neighbours import Neighbours
from soft_trainer.options.fields import SoftInfoNCEOptions

MOST_NAMED = 4  # the default number of a query's negatives, if columns of the rows name at least as many


def negatives_to_draw(options: SoftInfoNCEOptions, judgments: Judgments) -> tuple[int, sparse.csr_matrix | None]:
    """Returns the number of hard negatives per query, and the negatives to draw them from, csr[Q, C].

    By default, these are the negatives that columns of the rows name, up to four per query. Grades of 0 are used only
    if `negatives_per_query` is set. None instead of negatives means that the estimator must find them.
    """
    if options.negatives_per_query is not None:
        return options.negatives_per_query, judgments.negatives
    named = judgments.named_negatives()
    if named is None:
        return 0, None
    return min(int(np.diff(named.indptr).max(initial=0)), MOST_NAMED), named


@dataclass(frozen=True)
class HardNegatives:
    """Draws new hard negatives for each query in every epoch. All queries of a batch are compared with them.

    Args:
        candidates (`csr[Q, C]`): the functions that may be drawn for each query.
        number: the number of functions to draw per query. A query with fewer candidates gets all of them.
        seed: a draw depends on this seed, the epoch and the query.
    """

    candidates: sparse.csr_matrix
    number: int
    seed: int

    def __str__(self) -> str:
        counts = np.diff(self.candidates.indptr)
        return (
            f"hard negatives: {counts.mean():.1f} candidates per query, and {int((counts == 0).sum()):,} of "
            f"{len(counts):,} queries have none. Up to {self.number} per query are drawn in each epoch"
        )

    def columns(self, queries: np.ndarray, codes: np.ndarray, epoch: int) -> np.ndarray:
        """Draws the hard negatives of a batch.

        Args:
            queries, codes: the indices of the batch's queries and of their positives, int64[B] each.

        Returns:
            The functions to add to the batch, int64[E], in the order of the draws, without duplicates or functions
            that are already in the batch.
        """
        drawn = [self.draw(int(query), epoch) for query in queries]
        drawn = np.concatenate([np.empty(0, np.int64), *drawn])
        return pd.unique(drawn[~np.isin(drawn, codes)])

    def draw(self, query: int, epoch: int) -> np.ndarray:
        """Draws up to `number` hard negatives for one query, int64[k]. All candidates are equally likely."""
        codes = self.candidates.indices[slice(*self.candidates.indptr[query : query + 2])].astype(np.int64)
        if len(codes) <= self.number:
            return codes
        keys = np.random.default_rng([self.seed, epoch, query]).gumbel(size=len(codes))
        return codes[np.sort(np.argpartition(-keys, self.number)[: self.number])]


def below_ratio(neighbours: Neighbours, ratio: float, texts: np.ndarray) -> sparse.csr_matrix:
    """Selects hard-negative candidates, csr[Q, C], nearest first: similar functions well below the positive.

    Args:
        neighbours: the most similar functions of each query, with their scores and the positive's score s.
        ratio: a candidate's score is at most ratio times s or, if s is below 0, at most s - (1 - ratio) abs(s).
        texts: int[C], the id of each function's text. Of several functions with the same text, only the nearest is
            kept.

    Raises:
        UserError: no query has a candidate.
    """
    own = neighbours.own[:, None]
    kept = (neighbours.rows >= 0) & (neighbours.scores <= own - (1 - ratio) * np.abs(own))
    queries, columns = kept.nonzero()
    codes = neighbours.rows[queries, columns]
    distinct = ~pd.DataFrame({"query": queries, "text": texts[codes]}).duplicated().to_numpy()
    if not len(codes):
        raise UserError(
            f"negative_ratio={ratio:g}: none of the {int((neighbours.rows >= 0).sum()):,} similar functions scores "
            "that far below its query's positive; use a larger ratio"
        )
    counts = np.bincount(queries[distinct], minlength=len(neighbours.rows))
    starts = np.concatenate([[0], np.cumsum(counts)])
    scores = neighbours.scores[queries, columns][distinct]
    return sparse.csr_matrix((scores, codes[distinct], starts), shape=(len(neighbours.rows), len(texts)))
