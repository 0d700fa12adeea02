"""The tables of a report, as rows of cells that Markdown, CSV and HTML are written from."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from soft_trainer.arguments import LANGUAGES
from soft_trainer.data.statistics import PAPER_ROWS
from soft_trainer.evaluation.results import GRADED
from soft_trainer.studies.compare import p_text
from soft_trainer.studies.report.cells import Cell, Column, Difference, Row, paper_mrr
from soft_trainer.studies.report.runs import ReportedRun

LANGUAGE_NAMES = dict(zip(LANGUAGES, ("Ruby", "Python", "Java", "JavaScript", "PHP", "Go"), strict=True))
SYSTEM_NAMES = {"untrained": "none (zero-shot)", "lexical": "none (lexical BM25)"}
LOSS_NAMES = {
    "info_nce": "InfoNCE",
    "soft_info_nce": "Soft-InfoNCE",
    "weighted_info_nce": "Weighted InfoNCE",
    "bce": "BCE",
    "kl_regularization": "KL regularization",
}
ESTIMATOR_NAMES = {"none": "", "bm25": "BM25", "trained_model": "Trained model", "simcse": "SimCSE"}
SIGNIFICANT = 0.05


class Entry(NamedTuple):
    """What stands in one place of a table: a text, whether it is the best, and a smaller text behind it."""

    text: str
    best: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Headers and rows of entries; `left` columns from the left are texts, the others numbers."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    left: int = 1


def markdown(table: Table) -> str:
    """A table in Markdown: the best in bold, notes in parentheses."""
    from tabulate import tabulate

    def text(entry: Entry) -> str:
        shown = f"**{escaped(entry.text)}**" if entry.best else escaped(entry.text)
        return f"{shown} ({escaped(entry.note)})" if entry.note else shown

    rows = [[text(entry) for entry in row] for row in table.rows]
    headers = [escaped(header) for header in table.headers]
    align = ["left" if place < table.left else "right" for place in range(len(headers))]
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=align)


def escaped(text: str) -> str:
    """A text for Markdown that no sign of Markdown or HTML changes, in one cell."""
    for sign in "\\|*_`<[":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


# ---- Names ----


def row_names(row: Row) -> tuple[str, str, str]:
    """Loss, estimator and settings of a row, for people."""
    loss = SYSTEM_NAMES.get(row.system) or LOSS_NAMES.get(row.loss, row.loss)
    cancelled = f", {row.cancel} cancelled".replace("_", "-") if row.cancel else ""
    settings = ", ".join(f"{name} {_value(value)}" for name, value in row.settings if value is not None)
    return loss + cancelled, ESTIMATOR_NAMES.get(row.estimator, row.estimator), settings


def row_label(row: Row) -> str:
    """A row in one line, without its encoder."""
    return ", ".join(name for name in row_names(row) if name)


def _value(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def column_labels(columns: Sequence[Column]) -> dict[Column, str]:
    """The language, with its data set where there are several, and with its pool where that differs too."""
    labels = {}
    for column in columns:
        name = "+".join(LANGUAGE_NAMES.get(one, one) for one in column.language.split("+"))
        same = [other for other in columns if other.language == column.language]
        sets = [other for other in same if other.dataset == column.dataset]
        detail = [column.dataset] if len(same) > 1 else []
        detail += [f"{column.pool:,} codes"] if len(sets) > 1 else []
        labels[column] = f"{name} ({', '.join(detail)})" if detail else name
    return labels


def columns_of(cells: Iterable[Cell]) -> list[Column]:
    """The columns of some cells, Ruby to Go."""
    order = {language: place for place, language in enumerate(LANGUAGES)}
    columns = {cell.column for cell in cells}
    return sorted(columns, key=lambda c: (order.get(c.language, len(order)), c.language, c.dataset, c.pool))


# ---- Tables ----


def results_table(cells: Sequence[Cell], differences: Sequence[Difference] = ()) -> Table:
    """MRR in the paper's layout: best of an encoder in bold, the paper's figure beside ours, a dagger on a difference.

    An "Overall" column follows where all six languages are there.
    """
    columns = columns_of(cells)
    labels = column_labels(columns)
    rows = list(dict.fromkeys(cell.row for cell in cells))
    places = {(cell.row, cell.column): cell for cell in cells}
    overall = [column.language for column in columns] == list(LANGUAGES)
    marked = {one.cell for one in differences if one.p < SIGNIFICANT}
    with_settings = any(row_names(row)[2] for row in rows)
    body = []
    for row in rows:
        loss, estimator, settings = row_names(row)
        names = (row.encoder, loss, estimator, *([settings] if with_settings else []))
        found = [places.get((row, column)) for column in columns]
        body.append([*map(Entry, names), *(_mrr_entry(cell, cells, marked) for cell in found)])
        if overall:
            body[-1].append(_overall_entry(row, found))
    headers = ["Encoder", "Loss", "Estimator", *(["Settings"] if with_settings else [])]
    tail = [*labels.values(), *(["Overall"] if overall else [])]
    return Table([*headers, *tail], body, left=len(headers))


def _mrr_entry(cell: Cell | None, cells: Sequence[Cell], marked: set[Cell]) -> Entry:
    if cell is None:
        return Entry("")
    rivals = (one.mrr for one in cells if (one.row.encoder, one.column) == (cell.row.encoder, cell.column))
    best = round(cell.mrr, 3) == round(max(rivals), 3)
    beside = {"paper": cell.paper} | {label: cell.mean(name) for name, label in GRADED.items()}
    note = ", ".join(f"{label} {value:.3f}" for label, value in beside.items() if value is not None)
    return Entry(f"{cell.mrr:.3f}{'†' if cell in marked else ''}", best, note)


def _overall_entry(row: Row, found: Sequence[Cell | None]) -> Entry:
    if None in found:
        return Entry("")
    run = found[0].runs[0]
    paper = paper_mrr(run.profile, "overall", row.loss, row.estimator, run.settings)
    return Entry(f"{np.mean([cell.mrr for cell in found]):.3f}", note="" if paper is None else f"paper {paper:.3f}")


def differences_table(differences: Sequence[Difference]) -> Table:
    """Every cell against InfoNCE: difference, interval, p, and the queries won and lost."""
    headers = ["Encoder", "Loss", "Estimator", "Settings", "Language", "Seeds", "Also differs in"]
    numbers = ["Δ MRR", "95 % interval", "p", "p (Holm)", "Wins", "Losses", "Ties"]
    labels = column_labels(columns_of(one.cell for one in differences))
    rows = []
    for one in differences:
        found, row = one.comparison, one.cell.row
        texts = (row.encoder, *row_names(row), labels[one.cell.column], seeds_text(one.seeds), ", ".join(one.also))
        interval = f"{found.interval.low:+.3f} to {found.interval.high:+.3f}"
        sure = Entry(p_text(one.p), one.p < SIGNIFICANT)
        counts = (Entry(f"{count:,}") for count in (found.wins, found.losses, found.ties))
        rows.append([*map(Entry, (*texts, f"{found.delta:+.3f}", interval, p_text(found.p))), sure, *counts])
    return _without_empty(Table(headers + numbers, rows, left=len(headers)))


def data_table(cells: Sequence[Cell]) -> Table:
    """What the columns are: data set, queries, pool, and the paper's."""
    rows = []
    columns = columns_of(cells)
    for column in columns:
        first = next(cell for cell in cells if cell.column == column)
        metrics = first.metrics(first.runs[0])
        _, _, queries, pool = PAPER_ROWS.get(column.language, (None,) * 4)
        counts = [metrics.get("queries"), column.pool, queries, pool]
        texts = [column_labels(columns)[column], column.dataset]
        rows.append([*map(Entry, texts), *(Entry("" if count is None else f"{int(count):,}") for count in counts)])
    headers = ["Language", "Data set", "Queries", "Codes in the pool", "Queries in the paper", "Codes in the paper"]
    return _without_empty(Table(headers, rows, left=2))


def runs_table(runs: Sequence[ReportedRun]) -> Table:
    """Every run, where it lies and what it took."""
    numbers = {
        "Seed": "seed",
        "N": "codes that each query meets",
        "Epochs": "epochs",
        "Steps": "steps",
        "Learning rate": "learning rate",
        "Seconds a step": "seconds a step",
    }
    weights = ("alpha", "beta", "temperature", "floor")
    rows = []
    for run in runs:
        loss, training = run.record["loss"], run.record["training"]
        names = (LOSS_NAMES.get(run.loss, run.loss), ESTIMATOR_NAMES.get(run.estimator, run.estimator))
        set_to = " / ".join(_value(loss[name]) for name in weights if name in loss)
        values = (training.get(name) for name in numbers.values())
        texts = (str(run.folder), run.encoder, "+".join(run.record["languages"]), *names, set_to)
        rows.append([*map(Entry, texts), *(Entry("" if value is None else _value(value)) for value in values)])
    headers = ["Folder", "Encoder", "Language", "Loss", "Estimator", "α / β / t / floor"]
    return _without_empty(Table([*headers, *numbers], rows, left=len(headers)))


def seeds_text(seeds: Iterable) -> str:
    """Seeds, by comma."""
    return ", ".join(str(seed) for seed in seeds if seed is not None)


def _without_empty(table: Table) -> Table:
    """The table without columns in which nothing stands."""
    kept = [place for place in range(len(table.headers)) if any(row[place].text for row in table.rows)]
    left = sum(place < table.left for place in kept)
    return Table([table.headers[p] for p in kept], [[row[p] for p in kept] for row in table.rows], left)


# ---- CSV ----

CSV_COLUMNS = (
    *("evaluation", "encoder", "language", "dataset", "pool", "system", "loss", "cancel", "estimator", "settings"),
    *("seeds", "mrr", "mrr_of_seeds", "paper_mrr", "delta", "low", "high", "p", "p_holm", "wins", "losses", "ties"),
)


def csv_text(cells: Sequence[Cell], differences: Sequence[Difference]) -> str:
    """One line for each cell, numbers in full."""
    compared = {one.cell: one for one in differences}
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        row, column = cell.row, cell.column
        line = {
            "evaluation": cell.split,
            **{name: getattr(row, name) for name in ("encoder", "system", "loss", "cancel", "estimator")},
            **{name: getattr(column, name) for name in ("language", "dataset", "pool")},
            "settings": row_names(row)[2],
            "seeds": " ".join(str(run.seed) for run in cell.runs),
            "mrr": cell.mrr,
            "mrr_of_seeds": " ".join(f"{mrr:.6f}" for mrr in cell.mrrs),
            "paper_mrr": cell.paper,
        }
        if one := compared.get(cell):
            found = one.comparison
            counts = {"wins": found.wins, "losses": found.losses, "ties": found.ties}
            line |= {"delta": found.delta, "low": found.interval.low, "high": found.interval.high}
            line |= {"p": found.p, "p_holm": one.p, **counts}
        writer.writerow(line)
    return file.getvalue()
