"""The cells of a report, their comparison with InfoNCE, and the paper's figures for them.

A row is an encoder with a loss, an estimator and those settings in which its runs differ. A column is a language with
its data set and corpus. A cell holds the runs of one row and column, one for each seed.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.estimators.registry import ESTIMATORS
from soft_trainer.evaluation.results import SYSTEMS
from soft_trainer.loss_settings import LOSSES
from soft_trainer.options.fields import LANGUAGES
from soft_trainer.studies.compare import Pairing, RankChange
from soft_trainer.studies.report.records import ReportedRun
from soft_trainer.studies.significance import Comparison, holm

PAPER = Path(__file__).with_name("paper.csv")  # Li et al. 2023, every MRR of their tables
CHANGES = 5  # queries shown that gained, and as many that lost
ENCODERS = ("codebert", "graphcodebert", "unixcoder")
LOSS_ORDER = ("info_nce", "bce", "weighted_info_nce", "kl_regularization", "soft_info_nce")  # of the paper's tables
BASELINES = {"untrained": "none (zero-shot)", "lexical": "none (lexical BM25)"}


@dataclass(frozen=True)
class Column:
    """The place where queries are ranked."""

    language: str
    dataset: str
    pool: int  # codes in the corpus

    @property
    def order(self) -> tuple:
        """Sorts columns from Ruby to Go; other languages follow."""
        return (_position(self.language, LANGUAGES), self.language, self.dataset, self.pool)


@dataclass(frozen=True)
class Row:
    """The method that was measured; loss, cancel and estimator are names on the command line, empty unless trained."""

    encoder: str
    system: str  # "trained", "untrained" or "lexical"
    loss: str = ""
    cancel: str = ""
    estimator: str = ""
    settings: tuple[tuple[str, object], ...] = ()  # all else that differs among the runs of this method

    @property
    def labels(self) -> tuple[str, str, str]:
        """Loss, estimator and settings in words."""
        cancel = f", {self.cancel} cancelled".replace("_", "-") if self.cancel else ""
        settings = ", ".join(f"{name} {value_text(value)}" for name, value in self.settings if value is not None)
        loss, estimator = method_labels(self.loss, self.estimator)
        return BASELINES.get(self.system, loss + cancel), estimator, settings

    @property
    def label(self) -> str:
        """The row in one line, without its encoder."""
        return ", ".join(filter(None, self.labels))


def method_labels(loss: str, estimator: str) -> tuple[str, str]:
    """The labels of a loss and an estimator, their names if they have none."""
    return tuple(
        table[name].label if name in table else name for table, name in ((LOSSES, loss), (ESTIMATORS, estimator))
    )


def value_text(value) -> str:
    """A setting as text, None as an empty one."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, eq=False)
class Cell:
    """The runs of one row in one column of an evaluation set."""

    row: Row
    column: Column
    split: str  # the evaluation set, "test" for example
    runs: tuple[ReportedRun, ...]  # one for each seed, by seed
    paper: float | None = None  # the MRR in the paper, if it has one for these settings

    def key(self, run: ReportedRun) -> str:
        """The name of this evaluation set and language in a run's results."""
        return run.sets[self.split, self.column.language]

    def values(self, metric: str) -> list:
        """A metric under each seed; None under a seed that lacks it."""
        return [run.record["results"][self.key(run)][self.row.system].get(metric) for run in self.runs]

    def mean(self, metric: str) -> float | None:
        """A metric, averaged over seeds, None if a run did not measure it."""
        values = self.values(metric)
        return None if None in values else float(np.mean(values))

    @cached_property
    def mrr(self) -> float:
        """The MRR, averaged over seeds."""
        return self.mean("mrr")

    @property
    def is_baseline(self) -> bool:
        """True for plain InfoNCE, which the others are compared with."""
        return self.row.loss == "info_nce" and not self.row.cancel


def make_cells(runs: Iterable[ReportedRun], split: str) -> tuple[list[Cell], dict[str, str]]:
    """The cells of a split in the order of the paper's table, and the runs that repeat the seed of another run."""
    groups: dict[Row, dict[Column, list[ReportedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for (name, language), key in run.sets.items():
            results = run.record["results"][key] if name == split else {}
            for system in (system for system in SYSTEMS if system in results):
                column = Column(language, run.record["dataset"], int(results[system]["pool_size"]))
                method = (run.loss, run.cancel, run.estimator) if system == "trained" else ()
                groups[Row(run.encoder, system, *method)][column].append(run)
    cells, repeated = [], {}
    for row, columns in groups.items():
        varying = _varying(columns.values(), row.system)
        for column, members in columns.items():
            by_row: dict[Row, dict[int | None, ReportedRun]] = defaultdict(dict)
            for run in sorted(members, key=lambda run: (str(run.seed), str(run.folder))):
                settings = _settings(run, row.system)
                full_row = replace(row, settings=tuple((name, settings.get(name)) for name in varying))
                first = by_row[full_row].setdefault(run.seed, run)
                if first is not run and row.system == "trained":
                    repeated[str(run.folder)] = f"the settings and the seed of {first.folder}"
            for full_row, seeds in by_row.items():
                run, language = next(iter(seeds.values())), column.language
                in_paper = row.system == "trained" and run.record["languages"] == [language]
                paper = paper_mrr(run.profile, language, run.loss, run.estimator, run.settings) if in_paper else None
                cells.append(Cell(full_row, column, split, tuple(seeds.values()), paper))
    return sorted(cells, key=_order), repeated


def _settings(run: ReportedRun, system: str) -> Mapping[str, object]:
    """The settings that a system's result depends on."""
    encoder = ("base model", *run.record.get("encoder", {}))
    names = {"trained": run.settings, "untrained": encoder, "lexical": ()}[system]
    return {name: value for name, value in run.settings.items() if name in names}


def _varying(columns: Iterable[Sequence[ReportedRun]], system: str) -> list[str]:
    """The settings in which runs of one column differ; those that differ between languages alone make no new row."""
    varying: dict[str, None] = {}
    for runs in columns:
        settings = [(run.seed, _settings(run, system)) for run in runs]
        for name in dict.fromkeys(name for _, own in settings for name in own):
            values = defaultdict(set)
            for seed, own in settings:
                # A trained estimator may have another model for each seed and is one setting still.
                values[seed if name == "estimator_model" else None].add(str(own.get(name)))
            if any(len(different) > 1 for different in values.values()):
                varying[name] = None
    return list(varying)


def _order(cell: Cell) -> tuple:
    """Sorts cells as the paper's table does: by encoder, loss, estimator, then settings, then language."""
    row = cell.row
    return (
        *(_position(cell.runs[0].profile, ENCODERS), row.encoder),
        *(_position(row.system, BASELINES), _position(row.loss, LOSS_ORDER), row.cancel),
        *(_position(row.estimator, ESTIMATORS), row.estimator),
        # Numbers first, by size, then texts.
        [(not (number := isinstance(v, int | float)), v if number else 0, str(v)) for _, v in row.settings],
        cell.column.order,
    )


def _position(name: str | None, names: Iterable[str]) -> int:
    names = list(names)
    return names.index(name) if name in names else len(names)


# ---- Against InfoNCE ----


@dataclass(frozen=True, eq=False)
class Difference:
    """A cell against the InfoNCE of its encoder and column."""

    cell: Cell
    baseline: Cell
    seeds: tuple  # those that both have; only they are compared
    comparison: Comparison  # of the queries' reciprocal ranks, averaged over these seeds
    differences: np.ndarray  # float64[Q], one for each query
    gained: Sequence[RankChange]  # the queries that gained most
    lost: Sequence[RankChange]
    also: tuple[str, ...]  # settings other than loss and weights in which the two differ
    p: float = 1.0  # after Holm's correction over all differences of the report


def make_differences(cells: Sequence[Cell]) -> tuple[list[Difference], list[str]]:
    """Every trained cell against its baseline, p corrected over all; and why others are not compared."""
    differences, problems = [], []
    for cell in cells:
        if cell.row.system == "trained" and not cell.is_baseline:
            try:
                differences.append(_difference(cell, cells))
            except UserError as error:
                problems.append(f"{cell.runs[0].folder} is not compared with InfoNCE: {error}")
    corrected = holm([difference.comparison.p for difference in differences])
    return [replace(difference, p=float(p)) for difference, p in zip(differences, corrected, strict=True)], problems


def _difference(cell: Cell, cells: Sequence[Cell]) -> Difference:
    """A cell against InfoNCE of its encoder and column; of several, the one that shares most settings, then seeds.

    Raises:
        UserError: there is no InfoNCE, the two share no seed or rank other queries, or ranks cannot be read.
    """
    place = (cell.row.encoder, cell.column)
    candidates = [other for other in cells if other.is_baseline and (other.row.encoder, other.column) == place]
    if not candidates:
        raise UserError("no run of InfoNCE with this encoder, language, data set and corpus")
    baseline = min(candidates, key=lambda other: (len(_also(cell, other)), -len(_common_seeds(cell, other))))
    seeds, also = _common_seeds(cell, baseline), _also(cell, baseline)
    if not seeds:
        raise UserError("no seed in common")
    sides = ([run.ranks(each.key(run)) for run in each.runs if run.seed in seeds] for each in (cell, baseline))
    pairing = Pairing(*sides)
    gained, lost = (pairing.changes(CHANGES, sign) for sign in (1, -1))
    return Difference(cell, baseline, seeds, pairing.compare(), pairing.differences, gained, lost, also)


def _also(cell: Cell, other: Cell) -> tuple[str, ...]:
    """Returns the settings in which two cells differ, other than the loss, its weights and the estimator."""
    ours, theirs = cell.runs[0], other.runs[0]
    of_method = {*ours.record["loss"], *ours.record.get("estimator", {}), *theirs.record.get("estimator", {})}
    names = (name for name in dict.fromkeys([*ours.settings, *theirs.settings]) if name not in of_method)
    return tuple(name for name in names if ours.settings.get(name) != theirs.settings.get(name))


def _common_seeds(cell: Cell, other: Cell) -> tuple:
    theirs = {run.seed for run in other.runs}
    return tuple(run.seed for run in cell.runs if run.seed in theirs)


# ---- The paper's figures ----


@cache
def _paper_rows() -> list[dict[str, str]]:
    with PAPER.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def paper_mrr(profile: str | None, language: str, loss: str, estimator: str, settings: Mapping) -> float | None:
    """The MRR in the tables of Li et al. (2023), None if they have none for these settings.

    Args:
        profile, loss, estimator: names on the command line.
        language: one of the six, or "overall" for their mean.
        settings: of the run; they must agree with those that the paper states. It cancels nothing unless it says so.
    """
    for row in _paper_rows():
        named = (row["encoder"], row["language"], row["loss"]) == (profile, language, loss)
        if named and row["estimator"] in ("", estimator):  # Table 3 names no estimator for its cancellation
            stated = {"cancel": "none"} | dict(pair.split("=") for pair in row["settings"].split())
            if all(value_text(settings.get(name, "none")) == value for name, value in stated.items()):
                return float(row["mrr"])
    return None
