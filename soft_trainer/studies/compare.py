"""Two runs on the same queries: by how much one ranks better, how sure that is, and which queries changed most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.evaluation.results import RankedQueries, load_ranks
from soft_trainer.studies.significance import Comparison, compare_paired, reciprocal_ranks

NUMBER = 10  # changes shown
_WIDTH = 100


@dataclass(frozen=True)
class Change:
    """One query under two systems, a and b.

    Args:
        query: its text, or the url of its code where the files have no texts.
        delta: reciprocal rank under a less that under b, averaged over seeds.
        ranks: under a and under b, one for each seed.
        tops: under a and under b with the first seed, the first three codes: whether it is the query's own, its text.
    """

    query: str
    delta: float
    ranks: tuple[tuple[int, ...], tuple[int, ...]]
    tops: tuple[list[tuple[bool, str]], list[tuple[bool, str]]]


class Pairing:
    """Two systems on the same queries, each with one run or, in the same order, with several seeds.

    Args:
        a, b: every run's ranks; they are put in the order of the first.

    Raises:
        UserError: other queries or another pool than the first.
    """

    def __init__(self, a: Sequence[RankedQueries], b: Sequence[RankedQueries]):
        first = a[0]
        self.sides = [[(ranked, _order(ranked, first)) for ranked in side] for side in (a, b)]
        self.reciprocal = [
            np.mean([reciprocal_ranks(ranked.ranks[order]) for ranked, order in side], axis=0) for side in self.sides
        ]
        self.differences = self.reciprocal[0] - self.reciprocal[1]

    def compare(self) -> Comparison:
        """Difference of the MRR, its interval and p, from each query's reciprocal rank averaged over its seeds."""
        return compare_paired(*self.reciprocal)

    def changes(self, number: int = NUMBER, sign: int = 0) -> list[Change]:
        """The queries that changed most, the largest first; only gains for `sign` 1, only losses for -1."""
        sizes = self.differences * sign if sign else np.abs(self.differences)
        rows = np.argsort(-sizes, kind="stable")[:number]
        return [self._change(row) for row in rows if sizes[row] > 0]

    def _change(self, row: int) -> Change:
        ranks = tuple(tuple(int(ranked.ranks[order[row]]) for ranked, order in side) for side in self.sides)
        (first_a, order_a), (first_b, order_b) = (side[0] for side in self.sides)
        tops = (first_a.top(int(order_a[row])), first_b.top(int(order_b[row])))
        return Change(first_a.query(int(order_a[row])), float(self.differences[row]), ranks, tops)


def _order(ranked: RankedQueries, reference: RankedQueries) -> np.ndarray:
    """The rows of `ranked` in the order of `reference`, int64[Q]."""
    files = f"{reference.path} and {ranked.path}"
    pools = {reference.pool_size, ranked.pool_size} - {None}
    if len(pools) > 1:
        raise UserError(f"{files}: pools of {reference.pool_size} and of {ranked.pool_size} codes")
    if ranked.urls == reference.urls:
        return np.arange(len(ranked.urls))
    places = {url: row for row, url in enumerate(ranked.urls)}
    if len(places) != len(ranked.urls) or sorted(places) != sorted(reference.urls):
        shared = len(places.keys() & set(reference.urls))
        raise UserError(f"{files}: other queries ({len(reference.urls)} and {len(ranked.urls)}, {shared} in both)")
    return np.array([places[url] for url in reference.urls])


def describe(comparison: Comparison) -> str:
    """A comparison in two lines."""
    interval, queries = comparison.interval, comparison.wins + comparison.losses + comparison.ties
    return (
        f"delta MRR {comparison.delta:+.4f}, {interval.confidence:.0%} interval {interval.low:+.4f} to "
        f"{interval.high:+.4f}, p {p_text(comparison.p, '= ')}\n"
        f"wins {comparison.wins:,}, losses {comparison.losses:,}, ties {comparison.ties:,} of {queries:,} queries"
    )


def p_text(p: float, equals: str = "") -> str:
    """A p with three digits; those of 10,000 draws say little more below 0.001."""
    return "< 0.001" if p < 0.001 else f"{equals}{p:.3f}"


def change_text(change: Change, names: tuple[str, str] = ("A", "B"), width: int = _WIDTH) -> str:
    """A change as lines: the query, then what each system ranks first; `=>` marks the query's own code."""
    lines = [f"{change.delta:+.3f}  {_cut(change.query, width)}"]
    for name, ranks, top in zip(names, change.ranks, change.tops, strict=True):
        lines.append(f"  {name}: rank {ranks_text(ranks)}")
        for place, (own, code) in enumerate(top, 1):
            lines.append(f"    {'=>' if own else '  '} {place}. {_cut(code, width)}")
    return "\n".join(lines)


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks under several seeds."""
    return ", ".join(f"{rank:,}" for rank in ranks)


def _cut(text: str, width: int) -> str:
    """A text in one line; of a url the end, which tells it from others."""
    if len(text) <= width:
        return text
    return f"…{text[1 - width :]}" if "://" in text and " " not in text else f"{text[: width - 1]}…"


def ranks_of(run: str | Path, split: str, system: str = "trained") -> RankedQueries:
    """The ranks of a run's output folder, or those in a file.

    Raises:
        UserError: the run has none of this split and system.
    """
    path = Path(run)
    if path.is_file():
        return load_ranks(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder or file")
    file = path / f"ranks-{split}-{system}.parquet"
    if not file.is_file():
        there = ", ".join(sorted(one.name for one in path.glob("ranks-*.parquet"))) or "none"
        raise UserError(f"{path}: no ranks of {split} by the {system} encoder; files of ranks: {there}")
    return load_ranks(file)
