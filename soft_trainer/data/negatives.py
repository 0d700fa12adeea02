"""Extra negatives of training rows: the candidates of every row, and the draw for an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from soft_trainer.data.neighbours import Neighbours
from soft_trainer.errors import UserError


@dataclass(frozen=True)
class Negatives:
    """Candidates of n training rows, any number for each, nearest first.

    Codes are identified by number: that of their training row, or n and above for a code-only row.

    Args:
        starts (`int64[n + 1]`): row i has the candidates from `starts[i]` to `starts[i + 1]`.
        codes (`int64[total]`): their numbers.
        scores (`float32[total]`): the similarity of the row's query to each, NaN if unknown.
        own (`float32[n]`): the similarity of the row's query to its own code, NaN if unknown.
        code_only: rows with a `code` (and perhaps `code_tokens` and `url`) that are not training rows, in the order of
            their numbers from n on.
    """

    starts: np.ndarray
    codes: np.ndarray
    scores: np.ndarray
    own: np.ndarray
    code_only: Sequence[dict] = field(default=())

    def __len__(self) -> int:
        return len(self.own)

    @property
    def counts(self) -> np.ndarray:
        """The number of candidates of each row, int64[n]."""
        return np.diff(self.starts)

    @property
    def owners(self) -> np.ndarray:
        """The row of each candidate, int64[total]."""
        return np.repeat(np.arange(len(self)), self.counts)

    def kept(self, keep: np.ndarray) -> Negatives:
        """Keeps the candidates for which `keep`, bool[total], is true, and the code-only rows that they use."""
        codes = self.codes[keep]
        used, places = np.unique(codes[codes >= len(self)], return_inverse=True)
        codes[codes >= len(self)] = len(self) + places
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.owners[keep], minlength=len(self)))])
        rows = [self.code_only[code - len(self)] for code in used.tolist()]
        return Negatives(starts, codes, self.scores[keep], self.own, rows)


def from_neighbours(neighbours: Neighbours, code_ids: np.ndarray) -> Negatives:
    """Turns the neighbours of each row into candidates.

    Args:
        code_ids: numbers of the codes' texts, equal for equal texts; of codes with equal texts, the nearest is kept.
    """
    known = neighbours.rows >= 0
    owners = np.nonzero(known)[0]
    codes = neighbours.rows[known]
    starts = np.concatenate([[0], np.cumsum(known.sum(1))])
    negatives = Negatives(starts, codes, neighbours.scores[known], neighbours.own)
    repeated = pd.DataFrame({"owner": owners, "text": code_ids[codes]}).duplicated()
    return negatives.kept(~repeated.to_numpy())


def below_ratio(negatives: Negatives, ratio: float) -> Negatives:
    """Keeps the candidates that score at most `ratio` of the positive's score s; for s below 0, s - (1 - ratio) |s|.

    Raises:
        UserError: there are none.
    """
    own = negatives.own[negatives.owners]
    left = negatives.kept(negatives.scores <= own - (1 - ratio) * np.abs(own))
    if not len(left.codes):
        raise UserError(
            f"negative_ratio={ratio:g}: none of {len(own):,} similar codes scores that far below the query's own "
            "code; use a larger ratio"
        )
    return left


def draw(negatives: Negatives, number: int, rows: np.ndarray, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws the negatives of some rows for one epoch, determined by seed, epoch and row number alone.

    Args:
        number: negatives of a row; a row with fewer candidates gets all of them.

    Returns:
        The numbers of the codes, int64[M], and the positions in `rows` of the rows they were drawn for, int64[M].
    """
    drawn = [np.empty(0, np.int64)]
    for row in map(int, rows):
        codes = negatives.codes[negatives.starts[row] : negatives.starts[row + 1]]
        if len(codes) > number:
            # The places of the largest random numbers are drawn without replacement, all with equal probability.
            keys = np.random.default_rng([seed, epoch, row]).gumbel(size=len(codes))
            codes = codes[np.sort(np.argpartition(-keys, number)[:number])]
        drawn.append(codes)
    return np.concatenate(drawn), np.repeat(np.arange(len(rows)), [len(codes) for codes in drawn[1:]])


def own_columns(rows: np.ndarray, codes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the columns that drawn negatives add to a batch.

    Args:
        rows: the rows of the global batch, int64[B].
        codes, owners: the output of `draw` for these rows.

    Returns:
        The numbers of the added codes, int64[E], without duplicates and without rows of the batch, in the order of
        their first draw; and bool[B, E], True where the column was drawn for the query.
    """
    added = ~np.isin(codes, rows)
    columns, distinct = pd.factorize(codes[added])
    drawn_for = np.zeros((len(rows), len(distinct)), dtype=bool)
    drawn_for[owners[added], columns] = True
    return distinct, drawn_for
