"""Compares runs, or methods over several seeds, on the same queries, by MRR with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.evaluation.ranked_queries import RankedQueries, load_ranks
from soft_trainer.evaluation.significance import (
    LEAST_CHANGED,
    Comparison,
    Interval,
    compare_crossed,
    compare_paired,
    difference_text,
    reciprocal_ranks,
)
from soft_trainer.system.files import RANKS, files_matching, ranks_file, unfinished
from soft_trainer.system.terminal import shortened


def ranks_of(run: str | Path, split: str, system: str = "trained") -> RankedQueries:
    """Reads the rank of each query's relevant function, from a run's output folder or from a `ranks-*.parquet` file.

    Raises:
        UserError: the run has no ranks for this split and system, or the encoder has changed since the run.
    """
    path = Path(run)
    if path.is_dir():
        path /= ranks_file(split, system)
        if not path.is_file():
            if problem := unfinished(path.parent):
                raise UserError(f"{path.parent}: {problem}")
            present = ", ".join(files_matching(path.parent, (RANKS,))) or "none"
            raise UserError(
                f"{path.parent}: no ranks of {split} by {system} (files of ranks: {present}); `soft-trainer evaluate "
                "FOLDER --output_dir DIR` writes ranks to DIR"
            )
    ranked = load_ranks(path)
    ranked.check_encoder()
    return ranked


# ---- Two systems on the same queries ----


class Pairing:
    """The ranks of two systems on the same queries. Each system has one run, or one run per seed.

    Args:
        a, b: the ranks of each system's runs, with seeds in the same order. Each run is reordered to match the first.

    Raises:
        UserError: a run has different queries or a different corpus from the first run.
    """

    def __init__(self, a: Sequence[RankedQueries], b: Sequence[RankedQueries]):
        self.sides = []
        self.by_seed = []  # each system's reciprocal ranks, float64[S, Q]
        for runs in (a, b):
            side = []
            reciprocal = []
            for ranked in runs:
                order = _order(ranked, a[0])
                side.append((ranked, order))
                reciprocal.append(reciprocal_ranks(ranked.ranks[order]))
            self.sides.append(side)
            self.by_seed.append(np.stack(reciprocal))
        self.reciprocal = [values.mean(axis=0) for values in self.by_seed]
        self.differences = self.reciprocal[0] - self.reciprocal[1]

    def compare(self) -> Comparison:
        """Returns the paired comparison of the two systems' first runs."""
        a, b = self.by_seed
        return compare_paired(a[0], b[0])

    def changes(self, number: int = 10) -> list[str]:
        """Describes the queries whose reciprocal ranks differ most between the systems, largest difference first.

        Each text has the difference and the query, and for each system its ranks, one per seed, and its top three
        functions with the first seed, relevant ones with `=>`.
        """
        sizes = np.abs(self.differences)
        largest = np.argsort(-sizes, kind="stable")[:number]
        changes = []
        for row in largest[sizes[largest] > 0].tolist():
            query = self.sides[0][0][0].rows["query"][row].as_py()  # the other runs are in this run's order
            lines = [f"{self.differences[row]:+.3f}  {shortened(query)}"]
            for name, side in zip("AB", self.sides, strict=True):
                ranks = [f"{int(ranked.ranks[order[row]]):,}" for ranked, order in side]
                lines.append(f"  {name}: rank {', '.join(ranks)}")
                ranked, order = side[0]
                for rank, (relevant, code) in enumerate(ranked.top(int(order[row])), 1):
                    mark = "=>" if relevant else "  "
                    lines.append(f"    {mark} {rank}. {shortened(code)}")
            changes.append("\n".join(lines))
        return changes


def _order(ranked: RankedQueries, reference: RankedQueries) -> np.ndarray:
    """Returns, for each query in `reference`, its row in `ranked`, int64[Q].

    Raises:
        UserError: the queries or the corpora differ.
    """
    files = f"{reference.path} and {ranked.path}"
    if reference.corpus != ranked.corpus:
        raise UserError(f"{files}: the corpora of {reference.pool_size} and {ranked.pool_size} functions differ")
    own = ranked.queries
    expected = reference.queries
    if own == expected:
        return np.arange(len(own))
    row_of = {query: row for row, query in enumerate(own)}
    if len(row_of) < len(own) or sorted(row_of) != sorted(expected):
        shared = len(row_of.keys() & set(expected))
        raise UserError(f"{files}: the queries differ ({len(expected)} and {len(own)}, {shared} in both)")
    return np.array([row_of[query] for query in expected])


def verdict(a: float, b: float, comparison: Comparison) -> str:
    """Returns one line that reports which system is better, or that neither is clearly better.

    Args:
        a, b: the MRR of each system.
        comparison: their comparison.
    """
    interval = comparison.interval
    if comparison.winner == "a":
        return f"For this seed, A is better: {a:.3f} against {b:.3f}, {difference_text(a - b, interval, digits=3)}"
    if comparison.winner == "b":
        reverse = Interval(-interval.high, -interval.low)
        return f"For this seed, B is better: {b:.3f} against {a:.3f}, {difference_text(b - a, reverse, digits=3)}"
    line = f"Neither is clearly better: A {a:.3f}, B {b:.3f}, A - B {difference_text(a - b, interval, digits=3)}"
    changed = comparison.wins + comparison.losses
    if 0 < changed < LEAST_CHANGED:
        line += f". Only {changed} {'query' if changed == 1 else 'queries'} changed rank, too few to tell"
    return line


def describe(comparison: Comparison) -> str:
    """Formats a comparison as two lines: the difference in MRR with its p-value, then wins, losses and ties."""
    queries = comparison.wins + comparison.losses + comparison.ties
    return (
        f"A - B: MRR {difference_text(comparison.delta, comparison.interval)}, p {p_text(comparison.p, '= ')}\n"
        f"wins {comparison.wins:,}, losses {comparison.losses:,}, ties {comparison.ties:,} of {queries:,} queries"
    )


def p_text(p: float, equals: str = "") -> str:
    """Formats a p-value, such as "0.012" or "< 0.001". With 10,000 draws, a fourth digit would be noise."""
    if p < 0.001:
        return "< 0.001"
    return f"{equals}{p:.3f}"


# ---- Two methods over several seeds ----


@dataclass(frozen=True)
class SetComparison:
    """Two methods' reciprocal ranks on the queries of one evaluation set."""

    name: str
    reciprocal: tuple[np.ndarray, np.ndarray]  # the reciprocal ranks of each method, float64[S, Q]

    @property
    def differences(self) -> np.ndarray:
        """The first method's reciprocal ranks minus the second's, for each seed and query, float64[S, Q]."""
        return self.reciprocal[0] - self.reciprocal[1]

    def compare(self) -> Comparison:
        """Returns the comparison of the two methods over seeds and queries."""
        return compare_crossed([self.differences])
