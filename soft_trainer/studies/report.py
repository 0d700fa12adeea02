"""Writes a Markdown report on finished runs, with tables, paired tests against a baseline, and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from soft_trainer.errors import UserError
from soft_trainer.evaluation.figures import draw_training
from soft_trainer.evaluation.ranked_queries import LABELS
from soft_trainer.evaluation.significance import difference_text, holm
from soft_trainer.studies.compare import Pairing, SetComparison, p_text, ranks_of
from soft_trainer.system.files import (
    NUMBERS,
    RANKS,
    RECORD,
    TRAINING_PICTURE,
    check_writable,
    read_json,
    reporting_disk_errors,
    unfinished,
    write_text,
)
from soft_trainer.system.terminal import print_on_main, table

PAGE = "report.md"
TEST_NOTE = (
    "Differences are paired by query, over the seeds that both methods have. The 95 % intervals and p are over seeds "
    "and queries, as crossed random effects. With one seed, they are over queries only and say nothing about other "
    "seeds. p is two-sided, with Holm's correction for all rows on this page."
)
ONE_SEED = "**For this seed:** with another seed, a method may be better or worse, whatever its interval and p say."
TRAINING = ("learning rate", "epochs", "functions compared per query", "seconds per step, with evaluations")


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A finished run, read from its output folder."""

    folder: Path
    method: str  # the path below the searched folder, without the seed at the end
    seed: int | None
    record: Mapping
    log: Sequence[Mapping]

    @property
    def results(self) -> Mapping[str, Mapping]:
        """The metrics, keyed by evaluation set and system."""
        return self.record["results"]


@dataclass(frozen=True, eq=False)
class Difference:
    """The difference between a method and the baseline on one evaluation set."""

    method: str
    comparison: SetComparison  # over the seeds that both have
    missing: tuple[str, ...]  # the seeds that only one of the two has


# ---- Runs ----


def find_runs(folders: Sequence[str | Path]) -> tuple[dict[str, list[ReportedRun]], list[str]]:
    """Finds finished runs in folders and their subfolders.

    Returns:
        `{method: runs}`, and a message for each skipped folder.

    Raises:
        UserError: a folder does not exist, or no run has finished.
    """
    runs: dict[Path, ReportedRun] = {}  # by real path, so that a folder that is given twice counts once
    excluded = []
    for root in map(Path, folders):
        if not root.is_dir():
            raise UserError(f"{root}: no such folder")
        found = set()
        for name in (RECORD, NUMBERS, RANKS):
            found.update(path.parent for path in root.rglob(name))
        for folder in sorted(found):
            try:
                runs.setdefault(folder.resolve(), _read_run(folder, root))
            except UserError as error:
                excluded.append(f"{folder}: {error}")
    if not runs:
        raise UserError("; ".join(["no finished run found", *excluded]))
    for line in excluded:
        print_on_main(f"warning: skipping {line}")
    methods: dict[str, list[ReportedRun]] = {}
    for run in sorted(runs.values(), key=lambda run: (run.method, str(run.seed))):
        methods.setdefault(run.method, []).append(run)
    return methods, excluded


def _read_run(folder: Path, root: Path) -> ReportedRun:
    """Reads a run from its output folder. Raises UserError if the run is unfinished or has no results to report."""
    path = folder / RECORD
    if not path.is_file():
        raise UserError(f"unfinished: has ranks but no {RECORD}")
    if problem := unfinished(folder):
        raise UserError(problem)
    record = read_json(path)
    if "loss" not in record or not record.get("results"):
        raise UserError("not a training run with results")
    seed = record["training"].get("seed")
    parts = folder.relative_to(root).parts or (folder.resolve().name,)
    if len(parts) > 1 and parts[-1] == str(seed):
        parts = parts[:-1]
    log = []
    state = folder / "trainer_state.json"
    if state.is_file():
        log = read_json(state)["log_history"]
    return ReportedRun(folder, "/".join(parts), seed, record, log)


def choose_baseline(methods: Mapping[str, Sequence[ReportedRun]], name: str | None) -> str:
    """Returns the method called `name` or, by default, InfoNCE if a run used it, and otherwise the first method.

    Raises:
        UserError: no method is called `name`.
    """
    if name is not None:
        if name not in methods:
            raise UserError(f"baseline={name}: no such method; the methods are {', '.join(methods)}")
        return name
    for method, runs in methods.items():
        loss = runs[0].record["loss"]
        plain = loss.get("cancel", "none") == "none" and not loss.get("distill_weight")
        if loss["loss"] == "info_nce" and plain:
            return method
    return next(iter(methods))


# ---- Differences ----


def compare_with(baseline: str, methods: Mapping[str, Sequence[ReportedRun]], name: str) -> tuple[list, list[str]]:
    """Compares every method with the baseline on one evaluation set.

    Returns:
        The differences, and a message for each method that cannot be compared.
    """
    differences = []
    problems = []
    by_seed = {}  # the runs of each method that have results on this set
    for method, runs in methods.items():
        by_seed[method] = {run.seed: run for run in runs if name in run.results}
    theirs = by_seed[baseline]
    for method, ours in by_seed.items():
        if method == baseline or not ours or not theirs:
            continue
        shared = sorted(ours.keys() & theirs.keys(), key=str)
        missing = tuple(sorted(map(str, ours.keys() ^ theirs.keys())))
        if not shared:
            problems.append(f"{method} on {name}: no seed in common with {baseline}")
            continue
        try:
            ranks = []
            for by_this_seed in (ours, theirs):
                ranks.append([ranks_of(by_this_seed[seed].folder, name) for seed in shared])
            comparison = SetComparison(name, tuple(Pairing(*ranks).by_seed))
        except UserError as error:
            problems.append(f"{method} on {name}: {error}")
            continue
        differences.append(Difference(method, comparison, missing))
    return differences, problems


# ---- The page ----


def write_report(folders: Sequence[str | Path], output_dir: str | Path, baseline: str | None = None) -> Path:
    """Writes `report.md` and its figures. Returns the path of the page.

    Args:
        baseline: the method to compare with; see `choose_baseline`.

    Raises:
        UserError: there is nothing to report, or the folder cannot be written to.
    """
    methods, excluded = find_runs(folders)
    runs = list(chain.from_iterable(methods.values()))
    baseline = choose_baseline(methods, baseline)
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.results)
    compared = {}
    differences = []
    for name in names:
        compared[name], problems = compare_with(baseline, methods, name)
        differences += compared[name]
        excluded += problems
    p_values = [each.comparison.compare().p for each in differences]
    p_of = dict(zip(differences, holm(p_values), strict=True))
    summary = f"Runs: {len(runs)}. Methods: {len(methods)}, compared with {baseline}. `--baseline` chooses another."
    parts = ["# Results", summary]
    for name in names:
        parts += [f"## MRR on {name}", results_table(name, methods, compared[name], p_of)]
    if differences:
        parts.append(TEST_NOTE)
    if any(len(each.comparison.differences) == 1 for each in differences):
        parts.insert(1, ONE_SEED)
    output_dir = Path(output_dir)
    check_writable(output_dir, f"output_dir={output_dir}")
    with reporting_disk_errors(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        logs = {}
        for method, of_method in methods.items():
            logs[method] = [run.log for run in of_method]
        if picture := draw_training(logs, output_dir / TRAINING_PICTURE):
            parts.append(f"## Training\n\n![Loss and MRR by step]({picture.name})")
        parts += ["## Runs", runs_table(runs)]
        if excluded:
            parts += ["## Skipped or not compared", "\n".join(f"- {line}" for line in excluded)]
        write_text(output_dir / PAGE, "\n\n".join(parts) + "\n")
    return output_dir / PAGE


def results_table(
    name: str,
    methods: Mapping[str, Sequence[ReportedRun]],
    differences: Sequence[Difference],
    p_of: Mapping[Difference, float],
) -> str:
    """Returns a table of all methods' MRR on one evaluation set. Encoders before training and BM25 come first."""
    rows = []
    for system in ("untrained", "lexical"):
        measured = _measured(methods, name, system)
        values = set()
        sizes = set()
        for mrrs, size in measured.values():
            values.update(round(mrr, 4) for mrr in mrrs)
            sizes.add(size)
        if len(values) == 1 and len(sizes) == 1:
            rows.append([LABELS[system], None, *values, *sizes, None, None, None])
            continue
        for method, (mrrs, size) in measured.items():
            rows.append([f"{LABELS[system]} of {method}", len(mrrs), float(np.mean(mrrs)), size, None, None, None])
    by_name = {each.method: each for each in differences}
    for method, (mrrs, size) in _measured(methods, name, "trained").items():
        compared = [None, None, None]
        if method in by_name:
            difference = by_name[method]
            result = difference.comparison.compare()
            text = difference_text(result.delta, result.interval)
            compared = [text, p_text(p_of[difference]), ", ".join(difference.missing)]
        rows.append([method, len(mrrs), float(np.mean(mrrs)), size, *compared])
    headers = [
        "method",
        "seeds",
        "MRR",
        "functions in the corpus",
        "difference (95 % interval)",
        "p",
        "seeds without a partner",
    ]
    return table(headers, rows, floats=".4f", text=["p", "functions in the corpus"])


def _measured(methods: Mapping[str, Sequence[ReportedRun]], name: str, system: str) -> dict[str, tuple]:
    """Returns the MRRs of a system's runs, and the sizes of their corpora as text, keyed by method."""
    measured = {}
    for method, runs in methods.items():
        mrrs = []
        sizes = set()
        for run in runs:
            metrics = run.results.get(name, {}).get(system)
            if metrics is not None:
                mrrs.append(metrics["mrr"])
                sizes.add(metrics.get("pool_size"))
        if mrrs:
            known = sorted(sizes - {None})
            measured[method] = mrrs, ", ".join(f"{size:,.0f}" for size in known)  # MRR depends on the corpus size
    return measured


def runs_table(runs: Sequence[ReportedRun]) -> str:
    """Returns a table of all runs with their seeds and settings, and a column for each option that differs."""
    options = [run.record.get("options", {}) for run in runs]
    shown = {"seed", "learning_rate", "num_train_epochs"}.union(*(run.record["loss"] for run in runs))
    names = dict.fromkeys(chain.from_iterable(options))
    differing = []
    for name in names:
        values = {str(each.get(name)) for each in options}
        if name not in shown and len(values) > 1:
            differing.append(name)
    rows = []
    for run, of_run in zip(runs, options, strict=True):
        training = run.record["training"]
        loss = run.record["loss"].items()
        settings = ", ".join(f"{name} {value}" for name, value in loss if value is not None)
        values = [*map(training.get, TRAINING), *map(of_run.get, differing)]
        rows.append([str(run.folder), run.seed, settings, *values])
    return table(["folder", "seed", "settings", *TRAINING, *differing], rows, floats="g")
