"""Compares two methods over several sets and seeds: the difference in MRR with an interval over seeds and queries."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.evaluation.results import RankedQueries
from soft_trainer.studies.compare import Pairing, p_text, ranks_of
from soft_trainer.studies.significance import Interval, randomisation_test, stratified_bootstrap
from soft_trainer.terminal import table


@dataclass(frozen=True)
class SetComparison:
    """Two methods on the queries of one set."""

    name: str
    seeds: int
    reciprocal: tuple[np.ndarray, np.ndarray]  # of each method, float64[S, Q]

    @property
    def differences(self) -> np.ndarray:
        """The difference of each seed and query, float64[S, Q]."""
        return self.reciprocal[0] - self.reciprocal[1]


@dataclass(frozen=True)
class PooledComparison:
    """Two methods over all sets; the MRR is the mean over all queries of all sets, averaged over seeds."""

    sets: tuple[SetComparison, ...]

    @property
    def means(self) -> tuple[float, float]:
        """The MRR of each method."""
        return tuple(
            float(np.concatenate([each.reciprocal[side].mean(0) for each in self.sets]).mean()) for side in (0, 1)
        )

    def interval(self, sets: Sequence[SetComparison] | None = None) -> Interval:
        """The bootstrap interval of the difference, over the seeds and the queries of each set."""
        return stratified_bootstrap([each.differences for each in sets or self.sets])

    @property
    def p(self) -> float:
        """The two-sided p of the randomisation test over queries, averaged over seeds."""
        differences = np.concatenate([each.differences.mean(0) for each in self.sets])
        return randomisation_test(differences, np.zeros_like(differences))

    def describe(self) -> str:
        """A table with a line for each set, and the difference over all."""
        rows = []
        for each in self.sets:
            interval = self.interval([each])
            a, b = (values.mean() for values in each.reciprocal)
            rows.append([each.name, each.seeds, each.reciprocal[0].shape[1], a, b, difference_text(a - b, interval)])
        a, b = self.means
        rows.append(["all", None, sum(row[2] for row in rows), a, b, difference_text(a - b, self.interval())])
        header = ["set", "seeds", "queries", "MRR of A", "MRR of B", "A - B (95 %)"]
        return f"{table(header, rows, floats='.4f')}\n\np {p_text(self.p, '= ')} (randomisation test over queries)"


def difference_text(delta: float, interval: Interval) -> str:
    """A difference in MRR with its interval."""
    return f"{delta:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"


def compare_patterns(a: str, b: str, split: str = "test", system: str = "trained") -> PooledComparison:
    """Compares the runs of two patterns, such as `outputs/study/*/ours/*`.

    Runs are pairs if the text in place of each `*` is the same. Pairs with the same queries are seeds of one set.

    Args:
        split: evaluation sets by comma; a pair of runs may lack some of them.

    Raises:
        UserError: a pattern without `*` or without runs, a run without a partner, or one without ranks.
    """
    folders = [_folders(pattern) for pattern in (a, b)]
    for one, other, pattern in ((*folders, b), (*folders[::-1], a)):
        if alone := sorted(one.keys() - other.keys()):
            raise UserError(f"{one[alone[0]]}: no run of {pattern} is its partner")
    sets: dict[tuple, list[tuple[str, list[RankedQueries]]]] = {}
    for parts in sorted(folders[0]):
        pair = [side[parts] for side in folders]
        names = split.split(",")
        present = [name for name in names if any((run / f"ranks-{name}-{system}.parquet").is_file() for run in pair)]
        for name in present or names:  # without any, the first is named as missing
            ranked = [ranks_of(run, name, system) for run in pair]
            key = (tuple(sorted(ranked[0].urls)), ranked[0].pool_size, ranked[0].corpus)
            sets.setdefault(key, []).append(("/".join((*parts, name)), ranked))
    return PooledComparison(tuple(map(_set, sets.values())))


def _folders(pattern: str) -> dict[tuple[str, ...], Path]:
    """The run folders of a pattern by the texts in place of its stars."""
    if "*" not in pattern:
        raise UserError(f"{pattern}: write * in place of the sets and seeds, in both patterns or in none")
    expression = re.compile("([^/]*)".join(map(re.escape, pattern.rstrip("/").split("*"))))
    matches = {folder: expression.fullmatch(folder) for folder in glob.glob(pattern.rstrip("/"))}
    folders = {match.groups(): Path(folder) for folder, match in matches.items() if match and Path(folder).is_dir()}
    if not folders:
        raise UserError(f"{pattern}: no such folders")
    return folders


def _set(seeds: Sequence[tuple[str, list[RankedQueries]]]) -> SetComparison:
    """The comparison of one set, from the name and the two rankings of each seed."""
    names, rankings = zip(*seeds, strict=True)
    return SetComparison(_common(names), len(names), tuple(Pairing(*zip(*rankings, strict=True)).by_seed))


def _common(names) -> str:
    """The parts that the names of a set's runs share."""
    parts = list(zip(*(name.split("/") for name in names), strict=True))
    return "/".join(values[0] for values in parts if len(set(values)) == 1) or "all"
