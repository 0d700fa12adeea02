"""Compares two runs on the same queries: the difference in MRR, its uncertainty, and the queries that changed most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.evaluation.results import RankedQueries, load_ranks
from soft_trainer.studies.significance import Comparison, compare_paired, reciprocal_ranks
from soft_trainer.terminal import print_on_main

NUMBER = 10  # changes shown
WIDTH = 100  # characters shown of a query or a code


@dataclass(frozen=True)
class RankChange:
    """One query under two systems, a and b; `ranks` and `tops` have an entry for each of the two."""

    query: str  # its text, or the url of its code if the files have no texts
    delta: float  # reciprocal rank under a minus that under b, averaged over seeds
    ranks: tuple[tuple[int, ...], ...]  # under each seed
    tops: tuple[list[tuple[bool, str]], ...]  # the first three codes under the first seed: (is it the own code, text)


class Pairing:
    """Two systems on the same queries, each with one run or with one run for each of several seeds.

    Args:
        a, b: the ranks of every run, seeds in the same order. All are brought into the order of the first run.

    Raises:
        UserError: the queries or the corpus differ from those of the first run.
    """

    def __init__(self, a: Sequence[RankedQueries], b: Sequence[RankedQueries]):
        self.sides = [[(ranked, _order(ranked, a[0])) for ranked in side] for side in (a, b)]
        self.by_seed = [
            np.stack([reciprocal_ranks(ranked.ranks[order]) for ranked, order in side]) for side in self.sides
        ]  # of each side, float64[S, Q]
        self.reciprocal = [values.mean(axis=0) for values in self.by_seed]
        self.differences = self.reciprocal[0] - self.reciprocal[1]

    def compare(self) -> Comparison:
        """Compares the reciprocal ranks of the queries, averaged over seeds."""
        return compare_paired(*self.reciprocal)

    def changes(self, number: int = NUMBER, sign: int = 0) -> list[RankChange]:
        """The queries that changed most, the largest change first; `sign` 1 takes only gains, -1 only losses."""
        sizes = self.differences * sign if sign else np.abs(self.differences)
        rows = np.argsort(-sizes, kind="stable")[:number]
        return [self._change(row) for row in rows if sizes[row] > 0]

    def _change(self, row: int) -> RankChange:
        ranks = tuple(tuple(int(ranked.ranks[order[row]]) for ranked, order in side) for side in self.sides)
        first_runs = [(ranked, int(order[row])) for (ranked, order), *_ in self.sides]
        ranked, own_row = first_runs[0]
        tops = tuple(ranked.top(own_row) for ranked, own_row in first_runs)
        return RankChange(ranked.query(own_row), float(self.differences[row]), ranks, tops)


def _order(ranked: RankedQueries, reference: RankedQueries) -> np.ndarray:
    """The rows of `ranked` in the order of `reference`, int64[Q]."""
    files = f"{reference.path} and {ranked.path}"
    _check_corpora(reference, ranked)
    if ranked.urls == reference.urls:
        return np.arange(len(ranked.urls))
    places = {url: row for row, url in enumerate(ranked.urls)}
    if len(places) != len(ranked.urls) or sorted(places) != sorted(reference.urls):
        shared = len(places.keys() & set(reference.urls))
        counts = f"{len(reference.urls)} and {len(ranked.urls)}, {shared} in both"
        raise UserError(f"{files}: the queries differ ({counts})")
    return np.array([places[url] for url in reference.urls])


def _check_corpora(a: RankedQueries, b: RankedQueries) -> None:
    """Refuses two different corpora. Files that do not name their codes are compared by size, with a warning."""
    files = f"{a.path} and {b.path}"
    if len({a.pool_size, b.pool_size} - {None}) > 1:
        raise UserError(f"{files}: the corpora differ: {a.pool_size} and {b.pool_size} codes")
    if unnamed := [str(side.path) for side in (a, b) if side.corpus is None]:
        print_on_main(
            f"warning: {unnamed[0]} does not say which codes it ranked, as its version did not record them: only the "
            "sizes of the two corpora were compared"
        )
    elif a.corpus != b.corpus:
        raise UserError(f"{files}: the corpora differ: {a.pool_size} codes in each, but not the same")


def describe(comparison: Comparison) -> str:
    """A comparison in two lines."""
    interval, queries = comparison.interval, comparison.wins + comparison.losses + comparison.ties
    return (
        f"delta MRR {comparison.delta:+.4f}, 95% interval {interval.low:+.4f} to "
        f"{interval.high:+.4f}, p {p_text(comparison.p, '= ')}\n"
        f"wins {comparison.wins:,}, losses {comparison.losses:,}, ties {comparison.ties:,} of {queries:,} queries"
    )


def p_text(p: float, equals: str = "") -> str:
    """A p with three digits; 10,000 draws say little more below 0.001."""
    return "< 0.001" if p < 0.001 else f"{equals}{p:.3f}"


def change_text(change: RankChange, names: Sequence[str] = ("A", "B")) -> str:
    """A change as lines: the query, then the first codes of each system; `=>` marks the query's own code."""
    lines = [f"{change.delta:+.3f}  {shortened(change.query)}"]
    for name, ranks, top in zip(names, change.ranks, change.tops, strict=True):
        lines.append(f"  {name}: rank {', '.join(f'{rank:,}' for rank in ranks)}")
        for place, (own, code) in enumerate(top, 1):
            lines.append(f"    {'=>' if own else '  '} {place}. {shortened(code)}")
    return "\n".join(lines)


def shortened(text: str, width: int = WIDTH) -> str:
    """A text in one line of at most `width` characters. A url keeps its end, which tells it from others."""
    # `textwrap.shorten` leaves nothing of a text without spaces, such as a url or a Chinese docstring.
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    return f"…{text[1 - width :]}" if "://" in text and " " not in text else f"{text[: width - 1]}…"


def ranks_of(run: str | Path, split: str, system: str = "trained") -> RankedQueries:
    """The ranks in a run's output folder, or in a file.

    Raises:
        UserError: the run has no ranks of this split and system.
    """
    path = Path(run)
    if path.is_file():
        return load_ranks(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder or file")
    file = path / f"ranks-{split}-{system}.parquet"
    if not file.is_file():
        present = ", ".join(sorted(file.name for file in path.glob("ranks-*.parquet"))) or "none"
        raise UserError(f"{path}: no ranks of {split} by the {system} encoder; files of ranks: {present}")
    return load_ranks(file)
