"""Extra negatives of training rows: the candidates of every row, limits on them, and the draw for an epoch."""

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


@dataclass(frozen=True)
class NegativeChoice:
    """The settings by which negatives are drawn from the candidates of a row.

    Args:
        number: negatives of a row in a batch; a row with fewer candidates gets all of them.
        ranks: the first rank that may be drawn and the first that may not, from 0; None for no end.
        max_score: the highest score that a candidate may have.
        margin: a candidate must score at least this much below the positive.
        ratio: the highest score as a share of the positive's score s; for s below 0 the limit is s - (1 - ratio) |s|.
        temperature: candidates are drawn by the softmax of score / temperature. 0 takes the nearest, None draws all
            with equal probability.
    """

    number: int
    ranks: tuple[int, int | None] = (0, None)
    max_score: float | None = None
    margin: float | None = None
    ratio: float | None = None
    temperature: float | None = None


def from_neighbours(neighbours: Neighbours, code_ids: np.ndarray, code_only: Sequence[dict] = ()) -> Negatives:
    """Turns the neighbours of each row into candidates.

    Args:
        code_ids: numbers of the codes' texts, equal for equal texts; of codes with equal texts, the nearest is kept.
        code_only: rows of the codes beyond the training rows.
    """
    known = neighbours.rows >= 0
    owners = np.nonzero(known)[0]
    codes = neighbours.rows[known]
    starts = np.concatenate([[0], np.cumsum(known.sum(1))])
    negatives = Negatives(starts, codes, neighbours.scores[known], neighbours.own, code_only)
    repeated = pd.DataFrame({"owner": owners, "text": code_ids[codes]}).duplicated()
    return negatives.kept(~repeated.to_numpy())


def limited(negatives: Negatives, choice: NegativeChoice) -> Negatives:
    """Keeps the candidates within the choice's limits on ranks and scores. Ranks are those before any limit.

    Raises:
        UserError: a limit on unknown scores, no candidate left, or fewer for every row than are asked for.
    """
    owners = negatives.owners
    scores = negatives.scores
    limits = []
    own = negatives.own[owners]
    ranks = np.arange(len(owners)) - negatives.starts[owners]
    first, last = choice.ranks
    keep = (ranks >= first) & (ranks < (len(owners) if last is None else last))
    if choice.ranks != (0, None):
        limits.append(f"negative_ranks={first},{'' if last is None else last}")
    for name, value, highest in (
        ("max_score", choice.max_score, lambda limit: limit),
        ("margin", choice.margin, lambda margin: own - margin),
        ("ratio", choice.ratio, lambda ratio: own - (1 - ratio) * np.abs(own)),
        ("temperature", choice.temperature or None, lambda _: np.inf),
    ):
        if value is None:
            continue
        if np.isnan(scores).any() or np.isnan(highest(value)).any():
            raise UserError(
                f"negative_{name}={value:g}: the negatives come without scores, which this option needs; leave it out"
            )
        if name != "temperature":
            limits.append(f"negative_{name}={value}")
        keep &= scores <= highest(value)
    loosen = f" by {', '.join(limits)}: loosen the limits" if limits else ""
    left = negatives.kept(keep)
    most = left.counts.max(initial=0)
    fewer = f"negatives_per_query={choice.number}: no row has more than {most} candidate negatives{loosen}"
    if not most:
        raise UserError(f"none of {len(owners):,} candidate negatives is left{loosen}")
    if most < choice.number:
        raise UserError(fewer)
    return left


def draw(
    negatives: Negatives, choice: NegativeChoice, rows: np.ndarray, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the negatives of some rows for one epoch, determined by seed, epoch and row number alone.

    Args:
        negatives: the candidates that `limited` kept.

    Returns:
        The numbers of the codes, int64[M], and the positions in `rows` of the rows they were drawn for, int64[M].
    """
    drawn = [np.empty(0, np.int64)]
    for row in map(int, rows):
        own = slice(negatives.starts[row], negatives.starts[row + 1])
        codes = negatives.codes[own]
        scores = negatives.scores[own]
        if len(codes) > choice.number and choice.temperature != 0:
            # Taking the largest logits after adding Gumbel noise draws without replacement from their softmax.
            keys = np.random.default_rng([seed, epoch, row]).gumbel(size=len(codes))
            if choice.temperature is not None:
                keys += scores.astype(np.float64) / choice.temperature
            codes = codes[np.sort(np.argpartition(-keys, choice.number)[: choice.number])]
        drawn.append(codes[: choice.number])
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
