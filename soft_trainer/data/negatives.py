"""Draws extra negatives for each query, once an epoch, from its candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import sparse

from soft_trainer.data.neighbours import Neighbours
from soft_trainer.errors import UserError


@dataclass(frozen=True)
class OwnNegatives:
    """Negatives of each query in addition to those of the batch, redrawn every epoch.

    Args:
        candidates (`csr[Q, C]`): the codes that may be drawn for each query.
        number: how many are drawn for a query; one with fewer candidates gets all of them.
        seed: determines the draws, together with epoch and query.
    """

    candidates: sparse.csr_matrix
    number: int
    seed: int

    def __str__(self) -> str:
        counts = np.diff(self.candidates.indptr)
        return (
            f"own negatives: {counts.mean():.1f} candidates a row, {int((counts == 0).sum()):,} of {len(counts):,} "
            f"rows have none; up to {self.number} are drawn for each query in each epoch"
        )

    def columns(self, queries: np.ndarray, codes: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the codes that are added to a batch, and which query they were drawn for.

        Args:
            queries, codes: the rows of the batch, int64[B] each.

        Returns:
            The added codes, int64[E], without duplicates and without codes of the batch, in the order of their first
            draw; and bool[B, E], True where the column was drawn for the query.
        """
        drawn = [self.draw(int(query), epoch) for query in queries]
        owners = np.repeat(np.arange(len(queries)), [len(each) for each in drawn])
        drawn = np.concatenate([np.empty(0, np.int64), *drawn])
        added = ~np.isin(drawn, codes)
        columns, distinct = pd.factorize(drawn[added])
        drawn_for = np.zeros((len(queries), len(distinct)), dtype=bool)
        drawn_for[owners[added], columns] = True
        return distinct, drawn_for

    def draw(self, query: int, epoch: int) -> np.ndarray:
        """Draws the negatives of a query, int64[number or fewer]; all candidates are equally likely."""
        codes = self.candidates.indices[slice(*self.candidates.indptr[query : query + 2])].astype(np.int64)
        if len(codes) <= self.number:
            return codes
        keys = np.random.default_rng([self.seed, epoch, query]).gumbel(size=len(codes))
        return codes[np.sort(np.argpartition(-keys, self.number)[: self.number])]


def below_ratio(neighbours: Neighbours, ratio: float, texts: np.ndarray) -> sparse.csr_matrix:
    """Turns the neighbours of each query into candidates, csr[Q, C]; each row has the nearest first.

    Args:
        ratio: the highest score as a share of the score s of the query's own code; for s below 0, s - (1 - ratio) |s|.
        texts: the numbers of the codes' texts, int[C]; of codes with equal texts, the nearest is kept.

    Raises:
        UserError: there are none.
    """
    own = neighbours.own[:, None]
    kept = (neighbours.rows >= 0) & (neighbours.scores <= own - (1 - ratio) * np.abs(own))
    queries, places = kept.nonzero()
    codes = neighbours.rows[queries, places]
    distinct = ~pd.DataFrame({"query": queries, "text": texts[codes]}).duplicated().to_numpy()
    if not len(codes):
        raise UserError(
            f"negative_ratio={ratio:g}: none of {int((neighbours.rows >= 0).sum()):,} similar codes scores that far "
            "below the query's own code; use a larger ratio"
        )
    counts = np.bincount(queries[distinct], minlength=len(neighbours.rows))
    starts = np.concatenate([[0], np.cumsum(counts)])
    scores = neighbours.scores[queries, places][distinct]
    return sparse.csr_matrix((scores, codes[distinct], starts), shape=(len(neighbours.rows), len(texts)))
