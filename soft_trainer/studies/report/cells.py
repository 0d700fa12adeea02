"""The runs and the cells of a report, their comparison with InfoNCE, and the paper's figures for them.

A row is an encoder with a loss, an estimator and those settings in which its runs differ. A column is a language with
its data set and corpus. A cell holds the runs of one row and column, one for each seed.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.estimators.registry import ESTIMATORS
from soft_trainer.evaluation.results import SYSTEMS
from soft_trainer.files import NUMBERS, RECORD, record_path
from soft_trainer.loss_settings import LOSSES
from soft_trainer.options.fields import LANGUAGES
from soft_trainer.studies.compare import Pairing, RankChange, ranks_of
from soft_trainer.studies.significance import Comparison, holm

PAPER = Path(__file__).with_name("paper.csv")  # Li et al. 2023, every MRR of their tables
PAPER_FIGURES = list(csv.DictReader(PAPER.read_text(encoding="utf-8").splitlines()))
CHANGES = 5  # queries shown that gained, and as many that lost
ENCODERS = ("codebert", "graphcodebert", "unixcoder")
LOSS_ORDER = ("info_nce", "bce", "weighted_info_nce", "kl_regularization", "soft_info_nce")  # of the paper's tables
BASELINES = {"untrained": "none (zero-shot)", "lexical": "none (lexical BM25)"}
LABELS = {"javascript": "JavaScript", "php": "PHP", "typescript": "TypeScript", "cpp": "C++", "c_sharp": "C#"}
# Entries of a record that seeds or languages of one setting may differ in.
_NOT_SETTINGS = ("loss", "estimator", "name", "profile", "seed", "steps", "train runtime, s", "seconds a step")
_ESTIMATOR_NAMES = {each.estimator_class.__name__: name for name, each in ESTIMATORS.items() if each.estimator_class}


# ---- Runs ----


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run as its output folder describes it."""

    folder: Path
    record: Mapping  # of `Run.record`
    log: Sequence[Mapping]  # `log_history` of `trainer_state.json`, empty if the run did not train
    encoder: str  # a short name
    profile: str | None  # None for random weights, which the paper did not measure
    loss: str
    cancel: str  # kind and number of the false-negative cancellation, such as "top_k 3"; empty if there is none
    estimator: str  # name on the command line; "none" if the loss does not use one
    seed: int | None
    settings: Mapping[str, object]  # of encoder, loss, estimator and training, without seed and times
    sets: Mapping[tuple[str, str], str]  # (evaluation set, language) -> key of the results, such as "test-ruby"


def find_runs(folders: Iterable[str | Path]) -> tuple[list[ReportedRun], dict[str, str]]:
    """Finds all runs below `folders`, and the reason for each folder that is left out.

    Raises:
        UserError: a folder does not exist, or no run can be read.
    """
    places: dict[Path, Path] = {}  # real path -> path as named: a folder that is named twice counts once
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        found = {path.parent for name in (RECORD, NUMBERS, "ranks-*.parquet") for path in folder.rglob(name)}
        for place in sorted(found):
            places.setdefault(place.resolve(), place)
    runs = []
    left_out = {}
    for folder in places.values():
        try:
            runs.append(read_run(folder))
        except FileNotFoundError:
            left_out[str(folder)] = f"not finished: it has ranks but no {RECORD}"
        except (AttributeError, KeyError, TypeError) as error:
            left_out[str(folder)] = f"{record_path(folder).name} is not that of a code-search run: it lacks {error}"
        except UserError as error:
            left_out[str(folder)] = str(error)
        except (OSError, ValueError) as error:
            left_out[str(folder)] = f"cannot be read: {error}"
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out.items())
        raise UserError(f"no finished run (a folder with {RECORD}) was found{': ' if reasons else ''}{reasons}")
    return runs, left_out


def read_run(folder: Path) -> ReportedRun:
    """Reads one run.

    Raises:
        UserError: the run was measured, but not trained.
        OSError, ValueError, AttributeError, KeyError, TypeError: its record is not there or not that of a run.
    """
    record = json.loads(record_path(folder).read_text(encoding="utf-8"))
    state = folder / "trainer_state.json"
    if "results" in record and "loss" not in record:
        raise UserError("measured by `soft-trainer evaluate`, not trained; `soft-trainer compare` reads it")
    for metrics in (metrics for systems in record["results"].values() for metrics in systems.values()):
        _ = metrics["mrr"], metrics["pool_size"]
    base, languages, _ = (record[name] for name in ("base_model", "languages", "dataset"))
    encoder = record.get("encoder", {})
    loss = record["loss"]
    estimator = record.get("estimator", {})
    kind = loss.get("cancel", "none")
    number = loss.get({"top_k": "cancel_k", "ratio": "cancel_ratio"}.get(kind), "")
    cancel = "" if kind == "none" else f"{kind} {number}"
    class_name = loss.get("estimator") or "none"
    name = estimator.get("name") or _ESTIMATOR_NAMES.get(class_name, class_name)
    settings = {"base model": base, "trained on": "+".join(languages)}
    for part in (encoder, loss, estimator, record["training"]):
        settings |= {name: value for name, value in part.items() if name not in _NOT_SETTINGS}
    plain = (str, int, float)  # anything else is compared by its text
    sets = {}
    for key in record["results"]:
        own = [name for name in languages if len(languages) > 1 and key.endswith(f"-{name}")]
        sets[(key.removesuffix(f"-{own[0]}"), own[0]) if own else (key, "+".join(languages))] = key
    return ReportedRun(
        folder=folder,
        record=record,
        log=json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.is_file() else [],
        encoder=encoder.get("name") or (base or "random weights").rstrip("/").rsplit("/", 1)[-1],
        profile=encoder.get("profile") if base else None,
        loss=loss["loss"],
        cancel=cancel,
        estimator=name if cancel or loss["loss"] != "info_nce" else "none",
        seed=record["training"].get("seed"),
        settings={name: v if isinstance(v, plain) else str(v) for name, v in settings.items() if v is not None},
        sets=sets,
    )


# ---- Cells ----


@dataclass(eq=False)
class Difference:
    """A cell against the InfoNCE of its encoder and column."""

    baseline: Cell
    seeds: tuple  # those that both have; only they are compared
    comparison: Comparison  # of the queries' reciprocal ranks, averaged over these seeds
    differences: np.ndarray  # float64[Q], one for each query
    gained: Sequence[RankChange]  # the queries that gained most
    lost: Sequence[RankChange]
    also: tuple[str, ...]  # settings other than loss and weights in which the two differ
    p: float = 1.0  # after Holm's correction over all differences of the report


@dataclass(eq=False)
class Cell:
    """The runs of one row in one column of an evaluation set."""

    evaluation: str  # the evaluation set, "test" for example
    encoder: str
    system: str  # "trained", "untrained" or "lexical"
    loss: str  # like cancel and estimator a name on the command line, empty unless trained
    cancel: str
    estimator: str
    settings: tuple[tuple[str, object], ...]  # all else that differs among the runs of this method
    language: str
    dataset: str
    pool: int  # codes in the corpus
    runs: tuple[ReportedRun, ...]  # one for each seed, by seed
    difference: Difference | None = None  # from InfoNCE, if they can be compared

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

    @property
    def column(self) -> tuple:
        """The place where queries are ranked, in the order of columns: from Ruby to Go, then other languages."""
        return (_position(self.language, LANGUAGES), self.language, self.dataset, self.pool)

    def key(self, run: ReportedRun) -> str:
        """Returns the name of this evaluation set and language in a run's results."""
        return run.sets[self.evaluation, self.language]

    def values(self, metric: str) -> list:
        """Returns a metric under each seed; None under a seed that lacks it."""
        return [run.record["results"][self.key(run)][self.system].get(metric) for run in self.runs]

    def mean(self, metric: str = "mrr") -> float | None:
        """Returns a metric, averaged over seeds, None if a run did not measure it."""
        values = self.values(metric)
        return None if None in values else float(np.mean(values))

    @property
    def paper(self) -> float | None:
        """The MRR in the paper, if it has one for these settings."""
        return paper_mrr(self, self.language) if self.runs[0].record["languages"] == [self.language] else None

    @property
    def is_baseline(self) -> bool:
        """True for plain InfoNCE, which the others are compared with."""
        return self.loss == "info_nce" and not self.cancel


def method_labels(loss: str, estimator: str) -> tuple[str, str]:
    """Returns the labels of a loss and an estimator, their names if they have none."""
    names = ((LOSSES, loss), (ESTIMATORS, estimator))
    return tuple(table[name].label if name in table else name for table, name in names)


def value_text(value) -> str:
    """Formats a setting, None as an empty text."""
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def make_cells(runs: Iterable[ReportedRun]) -> tuple[list[Cell], dict[str, str]]:
    """Makes the cells, those of test first, in the order of the paper's table; and names runs that repeat a seed."""
    methods: dict[tuple, list[tuple[tuple, ReportedRun, Mapping]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (str(run.seed), str(run.folder))):
        for (evaluation, language), key in run.sets.items():
            for system, metrics in run.record["results"][key].items():
                method = (run.loss, run.cancel, run.estimator) if system == "trained" else ("", "", "")
                place = (language, run.record["dataset"], int(metrics["pool_size"]))
                if system in SYSTEMS:
                    # An untrained encoder depends on its own settings alone, BM25 on none.
                    encoder = {"base model", *run.record.get("encoder", {})} if system == "untrained" else ()
                    names = run.settings if system == "trained" else encoder
                    settings = {name: value for name, value in run.settings.items() if name in names}
                    methods[evaluation, run.encoder, system, *method].append((place, run, settings))
    cells = {}
    repeated = {}
    for method, members in methods.items():
        names = _varying(members)
        for place, run, settings in members:
            cell = (*method, tuple((name, settings.get(name)) for name in names), *place)
            first = cells.setdefault(cell, {}).setdefault(run.seed, run)
            if first is not run and method[2] == "trained":
                repeated[str(run.folder)] = f"the settings and the seed of {first.folder}"
    return sorted((Cell(*cell, tuple(seeds.values())) for cell, seeds in cells.items()), key=_order), repeated


def _varying(members: Sequence[tuple[tuple, ReportedRun, Mapping]]) -> list[str]:
    """Returns the settings in which runs of one column differ; a difference between languages makes no new row."""
    names = dict.fromkeys(name for *_, settings in members for name in settings)
    values = defaultdict(set)
    for name, (place, run, settings) in itertools.product(names, members):
        # A trained estimator may have another model for each seed and is one setting still.
        values[name, place, run.seed if name == "estimator_model" else None].add(str(settings.get(name)))
    varying = {name for (name, *_), different in values.items() if len(different) > 1}
    return [name for name in names if name in varying]


def _order(cell: Cell) -> tuple:
    """Sorts cells as the paper's table does: by encoder, loss, estimator, then settings, then language."""
    return (
        *(cell.evaluation != "test", cell.evaluation),
        *(_position(cell.runs[0].profile, ENCODERS), cell.encoder),
        *(_position(cell.system, BASELINES), _position(cell.loss, LOSS_ORDER), cell.cancel),
        *(_position(cell.estimator, ESTIMATORS), cell.estimator),
        # Numbers first, by size, then texts.
        [(not (number := isinstance(v, int | float)), v if number else 0, str(v)) for _, v in cell.settings],
        cell.column,
    )


def _position(name: str | None, names: Iterable[str]) -> int:
    names = list(names)
    return names.index(name) if name in names else len(names)


def column_labels(cells: Iterable[Cell]) -> dict[tuple, str]:
    """Labels the columns of some cells, Ruby to Go: the language, with data set and corpus size if it has several."""
    columns = sorted({cell.column for cell in cells})
    shared = Counter(place for _, language, dataset, _ in columns for place in (language, (language, dataset)))
    labels = {}
    for column in columns:
        _, language, dataset, pool = column
        name = "+".join(LABELS.get(each, each.title()) for each in language.split("+"))
        detail = [dataset] if shared[language] > 1 else []
        detail += [f"{pool:,} codes"] if shared[language, dataset] > 1 else []
        labels[column] = f"{name} ({', '.join(detail)})" if detail else name
    return labels


# ---- Against InfoNCE ----


def compare_with_infonce(cells: Sequence[Cell]) -> list[str]:
    """Compares every trained cell with its baseline, p corrected over all; returns why others are not compared."""
    compared = []
    problems = []
    for cell in cells:
        if cell.system == "trained" and not cell.is_baseline:
            try:
                cell.difference = _difference(cell, cells)
                compared.append(cell.difference)
            except UserError as error:
                problems.append(f"{cell.runs[0].folder} is not compared with InfoNCE: {error}")
    for difference, p in zip(compared, holm([each.comparison.p for each in compared]), strict=True):
        difference.p = float(p)
    return problems


def _difference(cell: Cell, cells: Sequence[Cell]) -> Difference:
    """Compares a cell with the InfoNCE of its encoder and column that shares most settings, then seeds, with it."""
    place = (cell.encoder, cell.column)
    candidates = [other for other in cells if other.is_baseline and (other.encoder, other.column) == place]
    if not candidates:
        raise UserError("no run of InfoNCE with this encoder, language, data set and corpus")
    theirs = {other: {run.seed for run in other.runs} for other in candidates}
    common = {other: tuple(run.seed for run in cell.runs if run.seed in theirs[other]) for other in candidates}
    baseline = min(candidates, key=lambda other: (len(_also(cell, other)), -len(common[other])))
    seeds = common[baseline]
    also = _also(cell, baseline)
    if not seeds:
        raise UserError("no seed in common")
    pairing = Pairing(
        *([ranks_of(run.folder, each.key(run)) for run in each.runs if run.seed in seeds] for each in (cell, baseline))
    )
    gained, lost = (pairing.changes(CHANGES, sign) for sign in (1, -1))
    return Difference(baseline, seeds, pairing.compare(), pairing.differences, gained, lost, also)


def _also(cell: Cell, other: Cell) -> tuple[str, ...]:
    """Returns the settings in which two cells differ, other than the loss, its weights and the estimator."""
    ours = cell.runs[0]
    theirs = other.runs[0]
    of_method = {*ours.record["loss"], *ours.record.get("estimator", {}), *theirs.record.get("estimator", {})}
    names = (name for name in dict.fromkeys([*ours.settings, *theirs.settings]) if name not in of_method)
    return tuple(name for name in names if ours.settings.get(name) != theirs.settings.get(name))


# ---- The paper's figures ----


def paper_mrr(cell: Cell, language: str) -> float | None:
    """Returns the MRR in the tables of Li et al. (2023), None if they have none for the settings of a cell.

    The settings must agree with those that the paper states. It cancels nothing unless it says so.

    Args:
        language: one of the six, or "overall" for their mean.
    """
    run = cell.runs[0]
    for figure in PAPER_FIGURES:
        named = (figure["encoder"], figure["language"], figure["loss"]) == (run.profile, language, cell.loss)
        if named and figure["estimator"] in ("", cell.estimator):  # Table 3 names no estimator for its cancellation
            stated = {"cancel": "none"} | dict(pair.split("=") for pair in figure["settings"].split())
            if all(value_text(run.settings.get(name, "none")) == value for name, value in stated.items()):
                return float(figure["mrr"])
    return None
