"""Draws additional negatives for each query. They change in every epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import sparse

from soft_trainer.errors import UserError
from soft_trainer.estimators.neighbours import Neighbours


@dataclass(frozen=True)
class HardNegatives:
    """Negatives drawn for each query, in addition to the batch's negatives. They change in every epoch.

    Args:
        candidates (`csr[Q, C]`): the codes that may be drawn for each query.
        number: the number of codes to draw per query. A query with fewer candidates gets all of them.
        seed: determines the draws, together with the epoch and the query.
    """

    candidates: sparse.csr_matrix
    number: int
    seed: int

    def __str__(self) -> str:
        counts = np.diff(self.candidates.indptr)
        return (
            f"hard negatives: {counts.mean():.1f} candidates a row, {int((counts == 0).sum()):,} of {len(counts):,} "
            f"rows have none; up to {self.number} are drawn for each query in each epoch"
        )

    def columns(self, queries: np.ndarray, codes: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the codes to add to a batch, and which query each of them was drawn for.

        Args:
            queries, codes: the rows of the batch, int64[B] each.

        Returns:
            The added codes, int64[E], in the order of the draws, without duplicates and without codes that are in the
            batch already. Then bool[B, E], True where a code was drawn for a query.
        """
        drawn = [self.draw(int(query), epoch) for query in queries]
        owners = np.repeat(np.arange(len(queries)), list(map(len, drawn)))
        drawn = np.concatenate([np.empty(0, np.int64), *drawn])
        added = ~np.isin(drawn, codes)
        columns, distinct = pd.factorize(drawn[added])
        drawn_for = np.zeros((len(queries), len(distinct)), dtype=bool)
        drawn_for[owners[added], columns] = True
        return distinct, drawn_for

    def draw(self, query: int, epoch: int) -> np.ndarray:
        """Draws negatives for one query, int64[at most number]. All candidates are equally likely."""
        codes = self.candidates.indices[slice(*self.candidates.indptr[query : query + 2])].astype(np.int64)
        if len(codes) <= self.number:
            return codes
        keys = np.random.default_rng([self.seed, epoch, query]).gumbel(size=len(codes))
        return codes[np.sort(np.argpartition(-keys, self.number)[: self.number])]


def below_ratio(neighbours: Neighbours, ratio: float, texts: np.ndarray) -> sparse.csr_matrix:
    """Turns each query's neighbours into candidates, csr[Q, C], nearest first.

    Args:
        ratio: the highest score of a candidate, as a share of the score s that the query's positive has. If s is below
            0, the highest score is s - (1 - ratio) abs(s).
        texts: int[C], the ids of the codes' texts. If several codes have the same text, only the nearest is kept.

    Raises:
        UserError: no query has a candidate.
    """
    own = neighbours.own[:, None]
    kept = (neighbours.rows >= 0) & (neighbours.scores <= own - (1 - ratio) * np.abs(own))
    queries, places = kept.nonzero()
    codes = neighbours.rows[queries, places]
    distinct = ~pd.DataFrame({"query": queries, "text": texts[codes]}).duplicated().to_numpy()
    if not len(codes):
        raise UserError(
            f"negative_ratio={ratio:g}: none of {int((neighbours.rows >= 0).sum()):,} similar codes scores that far "
            "below the query's positive; use a larger ratio"
        )
    counts = np.bincount(queries[distinct], minlength=len(neighbours.rows))
    starts = np.concatenate([[0], np.cumsum(counts)])
    scores = neighbours.scores[queries, places][distinct]
    return sparse.csr_matrix((scores, codes[distinct], starts), shape=(len(neighbours.rows), len(texts)))
