"""The cells of a report: which runs are seeds of one setting, what a cell is compared with, and what the paper has.

A row is an encoder with a loss, an estimator and those settings in which its runs differ; a column is a language with
its data set and pool; a cell holds the seeds of one row and column.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from soft_trainer.arguments import LANGUAGES
from soft_trainer.errors import UserError
from soft_trainer.evaluation.results import SYSTEMS
from soft_trainer.studies.compare import Change, Pairing
from soft_trainer.studies.report.runs import ReportedRun
from soft_trainer.studies.significance import Comparison, holm

PAPER = Path(__file__).with_name("paper.csv")  # Li et al. 2023, every MRR of their tables
CHANGES = 5  # queries shown that gained, and as many that lost
_ENCODERS = ("codebert", "graphcodebert", "unixcoder")
_LOSSES = ("info_nce", "bce", "weighted_info_nce", "kl_regularization", "soft_info_nce")
_ESTIMATORS = ("none", "bm25", "trained_model", "simcse")


@dataclass(frozen=True)
class Column:
    """Where queries are ranked: a language, the data set, and how many codes are in the pool."""

    language: str
    dataset: str
    pool: int


@dataclass(frozen=True)
class Row:
    """What was measured.

    Args:
        encoder: its short name.
        system: "trained", "untrained" or "lexical".
        loss, cancel, estimator: names on the command line; empty unless trained.
        settings: (name, value) of what else differs among the runs of this encoder, loss and estimator.
    """

    encoder: str
    system: str
    loss: str = ""
    cancel: str = ""
    estimator: str = ""
    settings: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, eq=False)
class Cell:
    """The seeds of one row in one column.

    Args:
        split: the evaluation set, "test" for example.
        runs: one for each seed, by seed.
        paper: the MRR in the paper, None where it has none for these settings.
    """

    row: Row
    column: Column
    split: str
    runs: tuple[ReportedRun, ...]
    paper: float | None = None

    @cached_property
    def mrrs(self) -> list[float]:
        """The MRR under each seed."""
        return [self.metrics(run)["mrr"] for run in self.runs]

    @property
    def mrr(self) -> float:
        """The MRR, averaged over seeds."""
        return float(np.mean(self.mrrs))

    def key(self, run: ReportedRun) -> str:
        """What the run calls this evaluation set in this language."""
        return run.sets[self.split, self.column.language]

    def metrics(self, run: ReportedRun) -> Mapping:
        """What one of the runs measured."""
        return run.record["results"][self.key(run)][self.row.system]

    def mean(self, name: str) -> float | None:
        """A metric, averaged over seeds, None where it was not measured."""
        found = [self.metrics(run).get(name) for run in self.runs]
        return None if None in found else float(np.mean(found))

    @property
    def is_baseline(self) -> bool:
        """Whether this is InfoNCE as it is, which the others are compared with."""
        return self.row.loss == "info_nce" and not self.row.cancel


@dataclass(frozen=True, eq=False)
class Difference:
    """A cell against the InfoNCE of its encoder and column.

    Args:
        seeds: those that both have; only they are compared.
        comparison: of the queries' reciprocal ranks, averaged over these seeds.
        differences: float64[Q], by query.
        gained, lost: the queries that changed most.
        also: settings, beside loss and weights, in which the two differ.
        p: after Holm's correction over all differences of the report.
    """

    cell: Cell
    baseline: Cell
    seeds: tuple
    comparison: Comparison
    differences: np.ndarray = field(repr=False)
    gained: Sequence[Change]
    lost: Sequence[Change]
    also: tuple[str, ...] = ()
    p: float = 1.0


def make_cells(runs: Iterable[ReportedRun], split: str) -> tuple[list[Cell], dict[str, str]]:
    """The cells of a split in the order of the paper's table, and the runs that repeat the seed of another."""
    groups: dict[tuple[Row, Column], list[ReportedRun]] = defaultdict(list)
    for run in runs:
        for (name, language), key in run.sets.items():
            measured = run.record["results"][key] if name == split else {}
            for system in (one for one in SYSTEMS if one in measured):
                column = Column(language, run.record["dataset"], int(measured[system]["pool_size"]))
                groups[_bare_row(run, system), column].append(run)
    cells, repeated = [], {}
    for (row, column), members in groups.items():
        varying = _varying(groups, row)
        seeds: dict[tuple[Row, object], ReportedRun] = {}
        for run in sorted(members, key=lambda run: (str(run.seed), str(run.folder))):
            facts = _settings(run, row.system)
            full = replace(row, settings=tuple((name, facts.get(name)) for name in varying))
            first = seeds.setdefault((full, run.seed), run)
            if first is not run and row.system == "trained":
                repeated[str(run.folder)] = f"the settings and the seed of {first.folder}"
        for full in dict.fromkeys(row for row, _ in seeds):
            chosen = tuple(run for (other, _), run in seeds.items() if other == full)
            cells.append(Cell(full, column, split, chosen, _paper_of(full, column.language, chosen[0])))
    return sorted(cells, key=_place), repeated


def _bare_row(run: ReportedRun, system: str) -> Row:
    """The row of a run without its settings."""
    if system != "trained":
        return Row(run.encoder, system)
    loss = run.record["loss"]
    kind = loss.get("cancel", "none")
    number = loss.get({"top_k": "cancel_k", "ratio": "cancel_ratio"}.get(kind, ""), "")
    return Row(run.encoder, system, run.loss, "" if kind == "none" else f"{kind} {number}", run.estimator)


def _settings(run: ReportedRun, system: str) -> Mapping[str, object]:
    """The settings that a system's result depends on."""
    encoder = ("base model", *run.record.get("encoder", {}))
    kept = {"trained": run.settings, "untrained": encoder, "lexical": ()}[system]
    return {name: value for name, value in run.settings.items() if name in kept}


def _varying(groups: Mapping[tuple[Row, Column], Sequence[ReportedRun]], row: Row) -> list[str]:
    """The settings in which runs of a row differ within some column: those between languages make no new row."""
    names: dict[str, None] = {}
    for (other, _), runs in groups.items():
        if other == row:
            facts = {run: _settings(run, row.system) for run in runs}
            every = dict.fromkeys(name for one in facts.values() for name in one)
            names |= {name: None for name in every if _varies(name, facts)}
    return list(names)


def _varies(name: str, facts: Mapping[ReportedRun, Mapping]) -> bool:
    """Whether a setting differs. An estimator's own model may be another for each seed, and is one setting still."""
    values = defaultdict(set)
    for run, one in facts.items():
        values[run.seed if name == "estimator_model" else None].add(str(one.get(name)))
    return any(len(different) > 1 for different in values.values())


def _place(cell: Cell) -> tuple:
    """The order of the paper's table: encoders, then losses, then estimators; languages from Ruby to Go."""
    row, column, profile = cell.row, cell.column, cell.runs[0].profile

    def rank(names: Sequence[str], name: str | None) -> int:
        return names.index(name) if name in names else len(names)

    return (
        *(rank(_ENCODERS, profile), row.encoder),
        *(SYSTEMS.index(row.system) if row.system != "trained" else len(SYSTEMS), rank(_LOSSES, row.loss)),
        *(row.cancel, rank(_ESTIMATORS, row.estimator), row.estimator, [_sortable(v) for _, v in row.settings]),
        *(rank(LANGUAGES, column.language), column.language, column.dataset, column.pool),
    )


def _sortable(value) -> tuple:
    number = isinstance(value, (int, float))
    return (not number, value if number else 0, str(value))


# ---- Against InfoNCE ----


def make_differences(cells: Sequence[Cell]) -> tuple[list[Difference], list[str]]:
    """Every trained cell against its baseline, p corrected over all of them; and why others are not compared."""
    found, problems = [], []
    for cell in cells:
        if cell.row.system != "trained" or cell.is_baseline:
            continue
        try:
            found.append(_difference(cell, _baseline(cell, cells)))
        except UserError as error:
            problems.append(f"{cell.runs[0].folder} is not compared with InfoNCE: {error}")
    corrected = holm([one.comparison.p for one in found]) if found else ()
    return [replace(one, p=float(p)) for one, p in zip(found, corrected, strict=True)], problems


def _baseline(cell: Cell, cells: Sequence[Cell]) -> Cell:
    """InfoNCE of the same encoder and column; of several the one with most of the settings, then of the seeds."""
    candidates = [
        other
        for other in cells
        if other.is_baseline and (other.row.encoder, other.column) == (cell.row.encoder, cell.column)
    ]
    if not candidates:
        raise UserError("no run of InfoNCE with this encoder, language, data set and pool")
    return min(candidates, key=lambda other: (len(_also(cell, other)), -len(_common_seeds(cell, other))))


def _also(cell: Cell, other: Cell) -> tuple[str, ...]:
    """Settings in which two cells differ beside the loss, its weights and the estimator."""
    ours, theirs = (one.runs[0] for one in (cell, other))
    own = {*ours.record["loss"], *ours.record.get("estimator", {}), *theirs.record.get("estimator", {})}
    names = dict.fromkeys([*ours.settings, *theirs.settings])
    differ = (name for name in names if ours.settings.get(name) != theirs.settings.get(name))
    return tuple(name for name in differ if name not in own)


def _common_seeds(cell: Cell, other: Cell) -> tuple:
    theirs = {run.seed for run in other.runs}
    return tuple(run.seed for run in cell.runs if run.seed in theirs)


def _difference(cell: Cell, baseline: Cell) -> Difference:
    """The paired comparison of two cells.

    Raises:
        UserError: no seed in common, ranks that cannot be read, or other queries.
    """
    seeds = _common_seeds(cell, baseline)
    if not seeds:
        raise UserError("no seed in common")
    sides = (
        [run.ranks(one.key(run)) for seed in seeds for run in one.runs if run.seed == seed] for one in (cell, baseline)
    )
    pairing = Pairing(*sides)
    gained, lost = (pairing.changes(CHANGES, sign) for sign in (1, -1))
    comparison, also = pairing.compare(), _also(cell, baseline)
    return Difference(cell, baseline, seeds, comparison, pairing.differences, gained, lost, also)


# ---- The paper's figures ----


@cache
def _paper_rows() -> list[dict[str, str]]:
    with PAPER.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def paper_mrr(profile: str | None, language: str, loss: str, estimator: str, settings: Mapping) -> float | None:
    """The MRR in the tables of Li et al. (2023), None where they have none for these settings.

    Args:
        profile, loss, estimator: names on the command line.
        language: one of the six, or "overall" for their mean.
        settings: of the run; those that the paper states must agree, and what it does not cancel must not be.
    """
    for row in _paper_rows():
        named = (row["encoder"], row["language"], row["loss"]) == (profile, language, loss)
        if named and row["estimator"] in ("", estimator):  # Table 4 names no estimator
            stated = {"cancel": "none"} | dict(pair.split("=") for pair in row["settings"].split())
            if all(_same(settings.get(name, "none"), value) for name, value in stated.items()):
                return float(row["mrr"])
    return None


def _same(value, stated: str) -> bool:
    return f"{value:g}" == stated if isinstance(value, (int, float)) else value == stated


def _paper_of(row: Row, language: str, run: ReportedRun) -> float | None:
    if row.system != "trained" or run.record["languages"] != [language]:
        return None
    return paper_mrr(run.profile, language, run.loss, row.estimator, run.settings)
