"""What a study found, from the runs' own records: report.md, report.csv and the page report.html with pictures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from soft_trainer.errors import UserError
from soft_trainer.studies.compare import change_text
from soft_trainer.studies.report.cells import Cell, Difference, make_cells, make_differences
from soft_trainer.studies.report.pictures import pictures
from soft_trainer.studies.report.runs import ReportedRun, find_runs
from soft_trainer.studies.report.tables import (
    SIGNIFICANT,
    Table,
    column_labels,
    columns_of,
    csv_text,
    data_table,
    differences_table,
    escaped,
    markdown,
    results_table,
    row_label,
    runs_table,
)

TEMPLATE = Path(__file__).with_name("report.html")
MAIN = "test"
BACKGROUND = ("data", "runs", "left-out")  # sections that follow the pictures
TITLE = "Code search: what the runs found"


@dataclass(frozen=True)
class Section:
    """A part of the report: a table with notes below it, or a list."""

    name: str
    title: str
    table: Table | None = None
    notes: Sequence[str] = ()
    items: Sequence[str] = ()


@dataclass(frozen=True)
class Changes:
    """The queries that one cell gained and lost most, by heading."""

    title: str
    names: tuple[str, str]
    parts: Sequence[tuple[str, Sequence]]


@dataclass(frozen=True, eq=False)
class Report:
    """All that is reported.

    Args:
        runs: those that were read.
        cells: by evaluation set, "test" first.
        differences: of the test cells to InfoNCE.
        left_out: what was not read or not compared, and why.
    """

    runs: Sequence[ReportedRun]
    cells: Mapping[str, Sequence[Cell]]
    differences: Sequence[Difference]
    left_out: Sequence[str] = field(default_factory=list)

    @property
    def main_cells(self) -> Sequence[Cell]:
        """The cells of test, or of the first set where no run has it."""
        return next(iter(self.cells.values()))


def make_report(folders: Sequence[str | Path]) -> Report:
    """Read the runs below `folders` and compare them.

    Raises:
        UserError: a folder that does not exist, or nothing to report.
    """
    runs, left_out = find_runs(folders)
    splits = sorted({split for run in runs for split, _ in run.sets}, key=lambda one: (one != MAIN, one))
    notes, cells = dict(left_out), {}
    for split in splits:
        cells[split], repeated = make_cells(runs, split)
        notes |= repeated
    cells = {split: found for split, found in cells.items() if found}
    if not cells:
        raise UserError("the runs measured nothing: --do_eval and --do_predict make them")
    differences, problems = make_differences(next(iter(cells.values())))
    used = [run for run in runs if str(run.folder) not in notes]
    return Report(used, cells, differences, [*(f"{name}: {why}" for name, why in notes.items()), *problems])


# ---- What it says ----


def sections(report: Report) -> list[Section]:
    """The tables with their notes, in the order in which they are read."""
    (main, cells), *others = report.cells.items()
    found = [Section("results", f"MRR on {main}", results_table(cells, report.differences), _results_notes(report))]
    if report.differences:
        found.append(
            Section("differences", "Differences to InfoNCE", differences_table(report.differences), _TEST_NOTES)
        )
    found += [
        Section(f"on-{number}", f"MRR on {split}", results_table(one)) for number, (split, one) in enumerate(others)
    ]
    found.append(Section("data", "Data", data_table(cells)))
    found.append(Section("runs", "Runs", runs_table(report.runs), _RUN_NOTES))
    if report.left_out:
        found.append(Section("left-out", "Left out or not compared", items=report.left_out))
    return found


def _results_notes(report: Report) -> list[str]:
    notes = ["Mean over seeds; the best of an encoder in bold."]
    if any(one.p < SIGNIFICANT for one in report.differences):
        notes.append(f"†: differs from InfoNCE with p < {SIGNIFICANT} after correction.")
    if any(cell.paper is not None for cell in report.main_cells):
        notes.append(
            "Beside ours the figure of Li et al. (2023), Rethinking Negative Pairs in Code Search, on the whole of "
            "CodeSearchNet: the two compare where queries and pool are the same (see Data)."
        )
    return notes


_TEST_NOTES = (
    "Paired over queries: each query's reciprocal rank is averaged over the seeds that both sides have, and the "
    "differences are resampled 10,000 times. Interval: percentile bootstrap. p: randomisation test, two-sided; p "
    "(Holm) bounds the chance of any false finding among all rows of this table. Seeds are taken as they are: what "
    "another seed would change is not in the interval.",
)
_RUN_NOTES = (
    "Seconds a step count the whole training, with the fitting of the estimator, evaluations and checkpoints in it.",
)


def changes(report: Report) -> list[Changes]:
    """For each difference the queries that changed most."""
    labels = column_labels(columns_of(report.main_cells))
    found = []
    for one in report.differences:
        name = row_label(one.cell.row)
        title = f"{one.cell.row.encoder}, {labels[one.cell.column]}: {name}"
        found.append(Changes(title, (name, row_label(one.baseline.row)), (("Gained", one.gained), ("Lost", one.lost))))
    return found


def _summary(report: Report) -> str:
    runs, compared = len(report.runs), len(report.differences)
    sure = sum(one.p < SIGNIFICANT for one in report.differences)
    text = f"{runs} run{'s' * (runs != 1)}, {compared} comparison{'s' * (compared != 1)} with InfoNCE"
    return f"{text}, {sure} with p < {SIGNIFICANT} after correction." if compared else f"{text}."


# ---- The files ----


def markdown_text(report: Report) -> str:
    """The report without pictures."""
    blocks = [f"# {TITLE}", _summary(report)]
    for section in sections(report):
        blocks.append(f"## {section.title}")
        blocks += [markdown(section.table)] if section.table else []
        blocks += section.notes
        blocks += ["\n".join(f"- {escaped(item)}" for item in section.items)] if section.items else []
    found = changes(report)
    blocks += ["## Queries gained and lost most"] if found else []
    for group in found:
        lines = [change_text(change, group.names) for _, part in group.parts for change in part]
        # Indented, no sign in a query or a function is Markdown.
        blocks += [f"### {escaped(group.title)}", textwrap.indent("\n\n".join(lines), "    ")] if lines else []
    return "\n\n".join(blocks) + "\n"


def html_text(report: Report) -> str:
    """The report as one page that needs no other file."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        title=TITLE,
        summary=_summary(report),
        lead=[section for section in sections(report) if section.name not in BACKGROUND],
        rest=[section for section in sections(report) if section.name in BACKGROUND],
        pictures=pictures(report.main_cells, report.differences),
        changes=changes(report),
    )


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write `report.md`, `report.csv` and `report.html` aside, then rename them.

    Raises:
        UserError: the folder cannot be written, or matplotlib is not installed.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the pictures, which take time
        every = [cell for cells in report.cells.values() for cell in cells]
        texts = {
            "report.md": markdown_text(report),
            "report.csv": csv_text(every, report.differences),
            "report.html": html_text(report),
        }
        for name, text in texts.items():
            aside = folder / f"{name}.tmp"
            aside.write_text(text, encoding="utf-8")
            aside.replace(folder / name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    return [folder / name for name in texts]
