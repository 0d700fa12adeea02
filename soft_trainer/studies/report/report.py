"""Reports the results of runs from their records: report.md, report.csv and the page report.html with pictures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from pandas import DataFrame

from soft_trainer.errors import UserError
from soft_trainer.files import write_text
from soft_trainer.studies.compare import change_text
from soft_trainer.studies.report import tables
from soft_trainer.studies.report.cells import Cell, compare_with_infonce, make_cells
from soft_trainer.studies.report.pictures import pictures
from soft_trainer.studies.report.records import ReportedRun, find_runs
from soft_trainer.studies.report.tables import SIGNIFICANT

MAIN = "test"
BACKGROUND = ("data", "runs", "left-out")  # sections that follow the pictures
TITLE = "Code search: the results of the runs"
PAPER_NOTE = (
    "Figures marked paper are those of Li et al. (2023), Rethinking Negative Pairs in Code Search, on the whole of "
    "CodeSearchNet. Compare them with ours only if queries and corpus are the same (see Data)."
)
TEST_NOTE = (
    "The test is paired over queries: each query's reciprocal rank is averaged over the seeds that both sides have, "
    "and the differences are resampled 10,000 times. Interval: percentile bootstrap. p: randomisation test, "
    "two-sided. p (Holm) bounds the chance of any false finding among all rows of this table. The interval does not "
    "cover the variation between seeds."
)
TIME_NOTE = "Seconds a step include the fitting of the estimator, evaluations and checkpoints."


@dataclass(frozen=True)
class Section:
    """A part of the report: a table with notes below it, or a list of items."""

    name: str
    title: str
    table: DataFrame | None = None
    notes: Sequence[str] = ()
    items: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Report:
    """The content of a report."""

    runs: Sequence[ReportedRun]
    cells: Mapping[str, Sequence[Cell]]  # by evaluation set, "test" first
    left_out: Sequence[str] = ()  # a line for each run that was not read or not compared, with the reason

    @property
    def main_cells(self) -> Sequence[Cell]:
        """The cells of test, or of the first set if no run has test."""
        return next(iter(self.cells.values()))

    @property
    def compared(self) -> Sequence[Cell]:
        """The main cells that have a difference from InfoNCE."""
        return [cell for cell in self.main_cells if cell.difference]


def make_report(folders: Sequence[str | Path]) -> Report:
    """Reads the runs below `folders` and compares them.

    Raises:
        UserError: a folder does not exist, or there is nothing to report.
    """
    runs, left_out = find_runs(folders)
    cells = {}
    for name in sorted({name for run in runs for name, _ in run.sets}, key=lambda name: (name != MAIN, name)):
        cells[name], repeated = make_cells(runs, name)
        left_out |= repeated
    cells = {name: made for name, made in cells.items() if made}
    if not cells:
        raise UserError("the runs measured nothing: --do_eval and --do_predict make them")
    problems = compare_with_infonce(next(iter(cells.values())))
    used = [run for run in runs if str(run.folder) not in left_out]
    return Report(used, cells, [*(f"{name}: {why}" for name, why in left_out.items()), *problems])


# ---- The content ----


def sections(report: Report) -> list[Section]:
    """The tables with their notes, in the order of the report."""
    (main, cells), *others = report.cells.items()
    notes = ["Mean over seeds; the best of an encoder in bold."]
    if any(cell.difference.p < SIGNIFICANT for cell in report.compared):
        notes.append(f"†: differs from InfoNCE with p < {SIGNIFICANT} after correction.")
    if any(cell.paper is not None for cell in cells):
        notes.append(PAPER_NOTE)
    made = [Section("results", f"MRR on {main}", tables.mrr_table(cells), notes)]
    if report.compared:
        table = tables.differences_table(report.compared)
        made.append(Section("differences", "Differences from InfoNCE", table, [TEST_NOTE]))
    for number, (name, other_cells) in enumerate(others):
        made.append(Section(f"on-{number}", f"MRR on {name}", tables.mrr_table(other_cells)))
    made.append(Section("data", "Data", tables.data_table(cells)))
    made.append(Section("runs", "Runs", tables.runs_table(report.runs), [TIME_NOTE]))
    if report.left_out:
        made.append(Section("left-out", "Left out or not compared", items=report.left_out))
    return made


def _summary(report: Report) -> str:
    runs, compared = len(report.runs), len(report.compared)
    significant = sum(cell.difference.p < SIGNIFICANT for cell in report.compared)
    text = f"{runs} run{'s' * (runs != 1)}, {compared} comparison{'s' * (compared != 1)} with InfoNCE"
    return f"{text}, {significant} with p < {SIGNIFICANT} after correction." if compared else f"{text}."


# ---- The files ----


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Writes `report.md`, `report.csv` and `report.html`, a page that needs no other file.

    Raises:
        UserError: the folder cannot be written, or matplotlib is not installed.
    """
    folder = Path(folder)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    for function in (tables.markdown, tables.escaped, tables.html_entry, change_text):
        environment.filters[function.__name__] = function
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the pictures, which take time
        made = sections(report)
        content = {
            "title": TITLE,
            "summary": _summary(report),
            "lead": [section for section in made if section.name not in BACKGROUND],
            "rest": [section for section in made if section.name in BACKGROUND],
            "pictures": pictures(report.main_cells),
            "compared": report.compared,
            "labels": tables.column_labels(report.main_cells),
            "text_headers": tables.TEXTS,
        }
        texts = {
            "report.md": environment.get_template("report.md.jinja").render(content),
            "report.csv": tables.csv_text(itertools.chain(*report.cells.values())),
            "report.html": environment.get_template("report.html").render(content),
        }
        for name, text in texts.items():
            write_text(folder / name, text)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    return [folder / name for name in texts]
