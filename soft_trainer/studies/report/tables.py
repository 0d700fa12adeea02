"""The tables of a report, in one form that Markdown and HTML are written from, and the CSV file."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from soft_trainer.data.statistics import PAPER_ROWS
from soft_trainer.evaluation.results import GRADED
from soft_trainer.options.fields import LANGUAGES
from soft_trainer.studies.compare import p_text
from soft_trainer.studies.report.cells import Cell, Column, Difference, Row, method_labels, paper_mrr, value_text
from soft_trainer.studies.report.records import ReportedRun

LANGUAGE_LABELS = dict(zip(LANGUAGES, ("Ruby", "Python", "Java", "JavaScript", "PHP", "Go"), strict=True))
METHOD = ("Loss", "Estimator", "Settings")  # headers of `Row.labels`
DATA = ("Language", "Data set", "Queries", "Codes in the corpus", "Queries in the paper", "Codes in the paper")
TRAINING = {  # header -> name in the record of the training
    "Seed": "seed",
    "N": "codes that each query meets",
    "Epochs": "epochs",
    "Steps": "steps",
    "Learning rate": "learning rate",
    "Seconds a step": "seconds a step",
}
SIGNIFICANT = 0.05


class Entry(NamedTuple):
    """One entry of a table: a text, whether it is the best of its kind, and a smaller text behind it."""

    text: str
    best: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Headers and rows of entries; the first `left` columns are texts, the others numbers."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    left: int = 1


def make_table(rows: Iterable[Mapping[str, Entry | str]], left: int, keep: Sequence[str] = ()) -> Table:
    """A table from a mapping for each row, header -> entry; an empty column is left out unless it is in `keep`."""
    rows = [{name: v if isinstance(v, Entry) else Entry(v) for name, v in row.items()} for row in rows]
    headers = [name for name in rows[0] if name in keep or any(row[name].text for row in rows)]
    left = len(set(headers) & set(list(rows[0])[:left]))
    return Table(headers, [[row[name] for name in headers] for row in rows], left)


def markdown(table: Table) -> str:
    """A table in Markdown: the best in bold, notes in parentheses."""
    from tabulate import tabulate  # costs start-up time, as in soft_trainer.terminal

    def text(entry: Entry) -> str:
        bold = f"**{escaped(entry.text)}**" if entry.best else escaped(entry.text)
        return f"{bold} ({escaped(entry.note)})" if entry.note else bold

    rows = [[text(entry) for entry in row] for row in table.rows]
    headers = [escaped(header) for header in table.headers]
    align = ["left" if place < table.left else "right" for place in range(len(headers))]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=align)


def escaped(text: str) -> str:
    """A text in one line of Markdown, with every character of markup escaped."""
    for sign in "\\|*_`<[":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def column_labels(cells: Iterable[Cell]) -> dict[Column, str]:
    """The columns of some cells, Ruby to Go: the language, with data set and corpus size where they tell it apart."""
    columns = sorted({cell.column for cell in cells}, key=lambda column: column.order)
    labels = {}
    for column in columns:
        name = "+".join(LANGUAGE_LABELS.get(language, language) for language in column.language.split("+"))
        same_language = [other for other in columns if other.language == column.language]
        same_dataset = [other for other in same_language if other.dataset == column.dataset]
        detail = [column.dataset] if len(same_language) > 1 else []
        detail += [f"{column.pool:,} codes"] if len(same_dataset) > 1 else []
        labels[column] = f"{name} ({', '.join(detail)})" if detail else name
    return labels


def mrr_table(cells: Sequence[Cell], differences: Sequence[Difference] = ()) -> Table:
    """MRR in the paper's layout: the best of an encoder in bold, the paper's figure behind ours, † on a difference.

    A column "Overall" follows if all six languages are there.
    """
    labels = column_labels(cells)
    by_place = {(cell.row, cell.column): cell for cell in cells}
    significant = {difference.cell for difference in differences if difference.p < SIGNIFICANT}
    rows = []
    for row in dict.fromkeys(cell.row for cell in cells):
        in_row = {label: by_place.get((row, column)) for column, label in labels.items()}
        rows.append({"Encoder": row.encoder} | dict(zip(METHOD, row.labels, strict=True)))
        rows[-1] |= {label: _mrr_entry(cell, cells, significant) for label, cell in in_row.items()}
        if [column.language for column in labels] == list(LANGUAGES):
            rows[-1]["Overall"] = _overall_entry(row, list(in_row.values()))
    return make_table(rows, left=4, keep=["Estimator"])


def _mrr_entry(cell: Cell | None, cells: Sequence[Cell], significant: set[Cell]) -> Entry:
    if cell is None:
        return Entry("")
    rivals = (other.mrr for other in cells if (other.row.encoder, other.column) == (cell.row.encoder, cell.column))
    best = round(cell.mrr, 3) == round(max(rivals), 3)
    beside = {"paper": cell.paper} | {label: cell.mean(name) for name, label in GRADED.items()}
    note = ", ".join(f"{label} {value:.3f}" for label, value in beside.items() if value is not None)
    return Entry(f"{cell.mrr:.3f}{'†' if cell in significant else ''}", best, note)


def _overall_entry(row: Row, in_row: Sequence[Cell | None]) -> Entry:
    if None in in_row:
        return Entry("")
    run = in_row[0].runs[0]
    paper = paper_mrr(run.profile, "overall", row.loss, row.estimator, run.settings)
    return Entry(f"{np.mean([cell.mrr for cell in in_row]):.3f}", note="" if paper is None else f"paper {paper:.3f}")


def differences_table(differences: Sequence[Difference]) -> Table:
    """Every cell against InfoNCE: difference, interval, p, and the queries won and lost."""
    labels = column_labels(difference.cell for difference in differences)
    return make_table(
        [
            {
                "Encoder": cell.row.encoder,
                **dict(zip(METHOD, cell.row.labels, strict=True)),
                "Language": labels[cell.column],
                "Seeds": ", ".join(str(seed) for seed in difference.seeds if seed is not None),
                "Also differs in": ", ".join(difference.also),
                "Δ MRR": f"{comparison.delta:+.3f}",
                "95 % interval": f"{comparison.interval.low:+.3f} to {comparison.interval.high:+.3f}",
                "p": p_text(comparison.p),
                "p (Holm)": Entry(p_text(difference.p), difference.p < SIGNIFICANT),
                "Wins": f"{comparison.wins:,}",
                "Losses": f"{comparison.losses:,}",
                "Ties": f"{comparison.ties:,}",
            }
            for difference in differences
            for cell, comparison in [(difference.cell, difference.comparison)]
        ],
        left=7,
    )


def data_table(cells: Sequence[Cell]) -> Table:
    """The columns of the report with their data set, queries and codes, and those of the paper."""
    rows = []
    for column, label in column_labels(cells).items():
        queries = next(cell.values("queries")[0] for cell in cells if cell.column == column)
        _, _, *in_paper = PAPER_ROWS.get(column.language, (None,) * 4)
        counts = ("" if count is None else f"{int(count):,}" for count in (queries, column.pool, *in_paper))
        rows.append(dict(zip(DATA, (label, column.dataset, *counts), strict=True)))
    return make_table(rows, left=2)


def runs_table(runs: Sequence[ReportedRun]) -> Table:
    """Every run with its folder, its settings and its time."""
    rows = []
    for run in runs:
        weights = (run.record["loss"].get(name) for name in ("alpha", "beta", "temperature", "floor"))
        rows.append(
            {
                "Folder": str(run.folder),
                "Encoder": run.encoder,
                "Language": "+".join(run.record["languages"]),
                **dict(zip(METHOD, method_labels(run.loss, run.estimator), strict=False)),
                "α / β / t / floor": " / ".join(value_text(value) for value in weights if value is not None),
                **{header: value_text(run.record["training"].get(name)) for header, name in TRAINING.items()},
            }
        )
    return make_table(rows, left=6)


CSV_COLUMNS = (
    *("evaluation", "encoder", "language", "dataset", "pool", "system", "loss", "cancel", "estimator", "settings"),
    *("seeds", "mrr", "mrr_of_seeds", "paper_mrr", "delta", "low", "high", "p", "p_holm", "wins", "losses", "ties"),
)


def csv_text(groups: Iterable[Sequence[Cell]], differences: Sequence[Difference]) -> str:
    """One line for each cell of every evaluation set, with all digits."""
    by_cell = {difference.cell: difference for difference in differences}
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for cell in itertools.chain.from_iterable(groups):
        line = asdict(cell.row) | asdict(cell.column)
        line |= {"evaluation": cell.split, "settings": cell.row.labels[-1]}
        line |= {"seeds": " ".join(str(run.seed) for run in cell.runs), "mrr": cell.mrr, "paper_mrr": cell.paper}
        line |= {"mrr_of_seeds": " ".join(f"{mrr:.6f}" for mrr in cell.values("mrr"))}
        if difference := by_cell.get(cell):
            comparison = difference.comparison
            line |= asdict(comparison) | comparison.interval._asdict() | {"p_holm": difference.p}
        writer.writerow(line)
    return file.getvalue()
