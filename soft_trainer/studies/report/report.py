"""Reports the results of runs from their records: report.md, report.csv and the page report.html with pictures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup, escape
from pandas import DataFrame

from soft_trainer.data.statistics import PAPER_ROWS
from soft_trainer.errors import UserError
from soft_trainer.evaluation.results import GRADED
from soft_trainer.files import write_text
from soft_trainer.studies.compare import change_text, p_text
from soft_trainer.studies.report.cells import (
    Cell,
    ReportedRun,
    column_labels,
    compare_with_infonce,
    find_runs,
    make_cells,
    method_labels,
    paper_mrr,
    value_text,
)
from soft_trainer.studies.report.pictures import pictures

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
METHOD = ("Loss", "Estimator", "Settings")  # headers of `Cell.labels`
TEXTS = ("Folder", "Encoder", *METHOD, "Language", "Data set", "Seeds", "Also differs in", "α / β / t / floor")  # left
TRAINING = {  # header -> name in the record of the training
    "Seed": "seed",
    "N": "codes that each query meets",
    "Epochs": "epochs",
    "Steps": "steps",
    "Learning rate": "learning rate",
    "Seconds a step": "seconds a step",
}
CSV_COLUMNS = (
    *("evaluation", "encoder", "language", "dataset", "pool", "system", "loss", "cancel", "estimator", "settings"),
    *("seeds", "mrr", "mrr_of_seeds", "paper_mrr", "delta", "low", "high", "p", "p_holm", "wins", "losses", "ties"),
)
SIGNIFICANT = 0.05


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
    cells: Sequence[Cell]  # of all evaluation sets, those of test first
    left_out: Sequence[str] = ()  # a line for each run that was not read or not compared, with the reason

    @property
    def main_cells(self) -> Sequence[Cell]:
        """The cells of test, or of the first set if no run has test."""
        return [cell for cell in self.cells if cell.evaluation == self.cells[0].evaluation]

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
    cells, repeated = make_cells(runs)
    if not cells:
        raise UserError("the runs measured nothing: --do_eval and --do_predict make them")
    left_out |= repeated
    report = Report([run for run in runs if str(run.folder) not in left_out], cells)
    problems = compare_with_infonce(report.main_cells)
    return replace(report, left_out=[*(f"{name}: {why}" for name, why in left_out.items()), *problems])


# ---- The tables, data frames of texts ----


class Best(str):
    """An entry that stands out; a note in parentheses behind it does not."""


def as_table(rows: Iterable[Mapping[str, str]], keep: str | None = None) -> DataFrame:
    """Makes a table from a mapping for each row, without the columns that are empty, other than `keep`."""
    table = DataFrame(list(rows), dtype=object)
    return table.loc[:, [(table[name] != "").any() or name == keep for name in table]]


def markdown(table: DataFrame) -> str:
    """Writes a table in Markdown, the best in bold up to a note in parentheses."""

    def entry(text: str) -> str:
        return re.sub(r"^[^(]*[^( ]", r"**\g<0>**", escaped(text)) if isinstance(text, Best) else escaped(text)

    align = ["left" if name in TEXTS else "right" for name in table]
    settings = {"tablefmt": "pipe", "disable_numparse": True, "colalign": align}
    return table.map(entry).to_markdown(index=False, headers=[escaped(name) for name in table], **settings)


def html_entry(text: str) -> Markup:
    """Writes an entry in HTML, the best in bold, a note in parentheses smaller."""
    main, _, note = text.partition(" (") if isinstance(text, Best) or text.endswith(")") else (text, "", "")
    main = Markup("<strong>{}</strong>").format(main) if isinstance(text, Best) else escape(main)
    return main + (Markup(" <small>({}</small>").format(note) if note else "")


def escaped(text: str) -> str:
    """Writes a text in one line of Markdown, with every character of markup escaped."""
    return " ".join(re.sub(r"[\\|*_`<\[]", r"\\\g<0>", text).split())


def mrr_table(cells: Sequence[Cell]) -> DataFrame:
    """Lays out MRR as the paper does: the best of an encoder bold, the paper's figure behind ours, † on a difference.

    A column "Overall" follows if all six languages of the paper are there.
    """
    labels = column_labels(cells)
    columns = list(labels.values())
    languages = [language for _, language, *_ in labels]
    entries = [(cell.encoder, *cell.labels, labels[cell.column], _mrr_entry(cell, cells)) for cell in cells]
    if set(PAPER_ROWS) <= set(languages) and len(set(languages)) == len(languages):
        columns.append("Overall")
        for row, in_row in itertools.groupby(cells, lambda cell: (cell.encoder, *cell.labels)):
            six = [cell for cell in in_row if cell.language in PAPER_ROWS]
            if len(six) == len(PAPER_ROWS):
                paper = paper_mrr(six[0], "overall")
                mean = np.mean([cell.mean() for cell in six])
                entries.append((*row, "Overall", f"{mean:.3f}" + ("" if paper is None else f" (paper {paper:.3f})")))
    lines = DataFrame(entries, columns=["Encoder", *METHOD, "column", "mrr"], dtype=object)
    table = lines.pivot_table("mrr", ["Encoder", *METHOD], "column", "first", sort=False).reindex(columns=columns)
    return as_table(table.fillna("").reset_index().to_dict("records"), keep="Estimator")


def _mrr_entry(cell: Cell, cells: Sequence[Cell]) -> str:
    rivals = (other.mean() for other in cells if (other.encoder, other.column) == (cell.encoder, cell.column))
    notes = {"paper": cell.paper} | {label: cell.mean(name) for name, label in GRADED.items()}
    note = ", ".join(f"{label} {value:.3f}" for label, value in notes.items() if value is not None)
    differs = "†" if cell.difference and cell.difference.p < SIGNIFICANT else ""
    text = f"{cell.mean():.3f}{differs}" + (f" ({note})" if note else "")
    return Best(text) if round(cell.mean(), 3) == round(max(rivals), 3) else text


def differences_table(cells: Sequence[Cell]) -> DataFrame:
    """Compares cells with InfoNCE: difference, interval, p, and the queries won and lost."""
    labels = column_labels(cells)
    return as_table(
        {
            "Encoder": cell.encoder,
            **dict(zip(METHOD, cell.labels, strict=True)),
            "Language": labels[cell.column],
            "Seeds": ", ".join(str(seed) for seed in difference.seeds if seed is not None),
            "Also differs in": ", ".join(difference.also),
            "Δ MRR": f"{comparison.delta:+.3f}",
            "95 % interval": f"{comparison.interval.low:+.3f} to {comparison.interval.high:+.3f}",
            "p": p_text(comparison.p),
            "p (Holm)": (Best if difference.p < SIGNIFICANT else str)(p_text(difference.p)),
            **{name.title(): f"{getattr(comparison, name):,}" for name in ("wins", "losses", "ties")},
        }
        for cell, difference, comparison in ((cell, cell.difference, cell.difference.comparison) for cell in cells)
    )


def data_table(cells: Sequence[Cell]) -> DataFrame:
    """Lists the columns of the report with their data set, queries and codes, and those of the paper."""
    rows = []
    first = {cell.column: cell for cell in reversed(cells)}
    for column, label in column_labels(cells).items():
        cell = first[column]
        *_, queries, codes = PAPER_ROWS.get(cell.language, (None, None))
        counts = {"Queries": cell.values("queries")[0], "Codes in the corpus": cell.pool}
        counts |= {"Queries in the paper": queries, "Codes in the paper": codes}
        counts = {name: "" if count is None else f"{int(count):,}" for name, count in counts.items()}
        rows.append({"Language": label, "Data set": cell.dataset, **counts})
    return as_table(rows)


def runs_table(runs: Sequence[ReportedRun]) -> DataFrame:
    """Lists every run with its folder, its settings and its time."""
    weights = ("alpha", "beta", "temperature", "floor")
    return as_table(
        {
            "Folder": str(run.folder),
            "Encoder": run.encoder,
            "Language": "+".join(run.record["languages"]),
            **dict(zip(METHOD, method_labels(run.loss, run.estimator), strict=False)),
            "α / β / t / floor": " / ".join(value_text(loss[name]) for name in weights if loss.get(name) is not None),
            **{header: value_text(run.record["training"].get(name)) for header, name in TRAINING.items()},
        }
        for run in runs
        for loss in [run.record["loss"]]
    )


def csv_text(cells: Iterable[Cell]) -> str:
    """Writes one line for each cell, with all digits."""
    lines = []
    for cell in cells:
        line = vars(cell) | {"settings": cell.labels[-1], "mrr": cell.mean(), "paper_mrr": cell.paper}
        line |= {"seeds": " ".join(str(run.seed) for run in cell.runs)}
        line |= {"mrr_of_seeds": " ".join(f"{mrr:.6f}" for mrr in cell.values("mrr"))}
        if difference := cell.difference:
            line |= asdict(difference.comparison) | difference.comparison.interval._asdict() | {"p_holm": difference.p}
        lines.append(line)
    return DataFrame(lines, columns=CSV_COLUMNS, dtype=object).to_csv(index=False)


# ---- The content ----


def sections(report: Report) -> list[Section]:
    """Returns the tables with their notes, in the order of the report."""
    sets = itertools.groupby(report.cells, lambda cell: cell.evaluation)
    (main, cells), *others = [(name, list(cells)) for name, cells in sets]
    notes = ["Mean over seeds; the best of an encoder in bold."]
    if any(cell.difference.p < SIGNIFICANT for cell in report.compared):
        notes.append(f"†: differs from InfoNCE with p < {SIGNIFICANT} after correction.")
    if any(cell.paper is not None for cell in cells):
        notes.append(PAPER_NOTE)
    made = [Section("results", f"MRR on {main}", mrr_table(cells), notes)]
    if report.compared:
        table = differences_table(report.compared)
        made.append(Section("differences", "Differences from InfoNCE", table, [TEST_NOTE]))
    for number, (name, other_cells) in enumerate(others):
        made.append(Section(f"on-{number}", f"MRR on {name}", mrr_table(other_cells)))
    made.append(Section("data", "Data", data_table(cells)))
    made.append(Section("runs", "Runs", runs_table(report.runs), [TIME_NOTE]))
    if report.left_out:
        made.append(Section("left-out", "Left out or not compared", items=report.left_out))
    return made


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
    environment.filters |= {each.__name__: each for each in (markdown, escaped, html_entry, change_text)}
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before the pictures, which take time
        made = sections(report)
        runs = len(report.runs)
        compared = len(report.compared)
        summary = f"{runs} run{'s' * (runs != 1)}, {compared} comparison{'s' * (compared != 1)} with InfoNCE"
        if compared:
            significant = sum(cell.difference.p < SIGNIFICANT for cell in report.compared)
            summary += f", {significant} with p < {SIGNIFICANT} after correction"
        content = {
            "title": TITLE,
            "summary": f"{summary}.",
            "lead": [section for section in made if section.name not in BACKGROUND],
            "rest": [section for section in made if section.name in BACKGROUND],
            "pictures": pictures(report.main_cells),
            "compared": report.compared,
            "labels": column_labels(report.main_cells),
            "text_headers": TEXTS,
        }
        texts = {
            "report.md": environment.get_template("report.md.jinja").render(content),
            "report.csv": csv_text(report.cells),
            "report.html": environment.get_template("report.html").render(content),
        }
        for name, text in texts.items():
            write_text(folder / name, text)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    return [folder / name for name in texts]
