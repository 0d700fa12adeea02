"""The tables of a report as data frames of texts, which Markdown and HTML are written from, and the CSV file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
from markupsafe import Markup, escape
from pandas import DataFrame

from soft_trainer.data.statistics import PAPER_ROWS
from soft_trainer.evaluation.results import GRADED
from soft_trainer.studies.compare import p_text
from soft_trainer.studies.report.cells import Cell, Column, Difference, method_labels, paper_mrr, value_text
from soft_trainer.studies.report.records import ReportedRun

LABELS = {"javascript": "JavaScript", "php": "PHP", "typescript": "TypeScript", "cpp": "C++", "c_sharp": "C#"}
METHOD = ("Loss", "Estimator", "Settings")  # headers of `Row.labels`
TEXTS = ("Folder", "Encoder", *METHOD, "Language", "Data set", "Seeds", "Also differs in", "α / β / t / floor")  # left
TRAINING = {  # header -> name in the record of the training
    "Seed": "seed",
    "N": "codes that each query meets",
    "Epochs": "epochs",
    "Steps": "steps",
    "Learning rate": "learning rate",
    "Seconds a step": "seconds a step",
}
SIGNIFICANT = 0.05


class Best(str):
    """An entry that stands out; a note in parentheses behind it does not."""


def as_table(rows: Iterable[Mapping[str, str]], keep: Sequence[str] = ()) -> DataFrame:
    """Makes a table from a mapping for each row, without the columns that are empty, unless they are in `keep`."""
    table = DataFrame(list(rows), dtype=object)
    return table.loc[:, [(table[name] != "").any() or name in keep for name in table]]


def markdown(table: DataFrame) -> str:
    """Writes a table in Markdown, the best in bold."""
    entries = table.map(lambda text: bold(escaped(text)) if isinstance(text, Best) else escaped(text))
    align = ["left" if name in TEXTS else "right" for name in table]
    headers = [escaped(name) for name in table]
    return entries.to_markdown(index=False, headers=headers, tablefmt="pipe", disable_numparse=True, colalign=align)


def bold(text: str) -> str:
    """Sets a text in bold, up to a note in parentheses."""
    return re.sub(r"^[^(]*[^( ]", r"**\g<0>**", text)


def html_entry(text: str) -> Markup:
    """Writes an entry in HTML, the best in bold, a note in parentheses smaller."""
    main, _, note = text.partition(" (") if isinstance(text, Best) or text.endswith(")") else (text, "", "")
    main = Markup("<strong>{}</strong>").format(main) if isinstance(text, Best) else escape(main)
    return main + (Markup(" <small>({}</small>").format(note) if note else "")


def escaped(text: str) -> str:
    """A text in one line of Markdown, with every character of markup escaped."""
    return " ".join(re.sub(r"[\\|*_`<\[]", r"\\\g<0>", text).split())


def column_labels(cells: Iterable[Cell]) -> dict[Column, str]:
    """The columns of some cells, Ruby to Go: the language, with data set and corpus size where they tell it apart."""
    columns = sorted({cell.column for cell in cells}, key=lambda column: column.order)
    labels = {}
    for column in columns:
        name = "+".join(LABELS.get(language, language.title()) for language in column.language.split("+"))
        same_language = [other for other in columns if other.language == column.language]
        same_dataset = [other for other in same_language if other.dataset == column.dataset]
        detail = [column.dataset] if len(same_language) > 1 else []
        detail += [f"{column.pool:,} codes"] if len(same_dataset) > 1 else []
        labels[column] = f"{name} ({', '.join(detail)})" if detail else name
    return labels


def mrr_table(cells: Sequence[Cell], differences: Sequence[Difference] = ()) -> DataFrame:
    """MRR in the paper's layout: the best of an encoder in bold, the paper's figure behind ours, † on a difference.

    A column "Overall" follows if all six languages of the paper are there.
    """
    labels = column_labels(cells)
    significant = {difference.cell for difference in differences if difference.p < SIGNIFICANT}
    entries = [
        (cell.row.encoder, *cell.row.labels, labels[cell.column], _mrr_entry(cell, cells, significant))
        for cell in cells
    ]
    lines = DataFrame(entries, columns=["Encoder", *METHOD, "column", "mrr"], dtype=object)
    table = lines.pivot_table("mrr", ["Encoder", *METHOD], "column", "first", sort=False)[list(labels.values())]
    if set(PAPER_ROWS) <= {column.language for column in labels} and len(labels) == len({c.language for c in labels}):
        table["Overall"] = [
            _overall_entry([cell for cell in cells if (cell.row.encoder, *cell.row.labels) == row])
            for row in table.index
        ]
    return as_table(table.fillna("").reset_index().to_dict("records"), keep=["Estimator"])


def _mrr_entry(cell: Cell, cells: Sequence[Cell], significant: set[Cell]) -> str:
    rivals = (other.mrr for other in cells if (other.row.encoder, other.column) == (cell.row.encoder, cell.column))
    notes = {"paper": cell.paper} | {label: cell.mean(name) for name, label in GRADED.items()}
    note = ", ".join(f"{label} {value:.3f}" for label, value in notes.items() if value is not None)
    text = f"{cell.mrr:.3f}{'†' if cell in significant else ''}" + (f" ({note})" if note else "")
    return Best(text) if round(cell.mrr, 3) == round(max(rivals), 3) else text


def _overall_entry(in_row: Sequence[Cell]) -> str:
    """The mean over the six languages of the paper, empty if one is missing."""
    six = [cell for cell in in_row if cell.column.language in PAPER_ROWS]
    if len(six) < len(PAPER_ROWS):
        return ""
    row, run = six[0].row, six[0].runs[0]
    paper = paper_mrr(run.profile, "overall", row.loss, row.estimator, run.settings)
    return f"{np.mean([cell.mrr for cell in six]):.3f}{'' if paper is None else f' (paper {paper:.3f})'}"


def differences_table(differences: Sequence[Difference]) -> DataFrame:
    """Every cell against InfoNCE: difference, interval, p, and the queries won and lost."""
    labels = column_labels(difference.cell for difference in differences)
    return as_table(
        {
            "Encoder": cell.row.encoder,
            **dict(zip(METHOD, cell.row.labels, strict=True)),
            "Language": labels[cell.column],
            "Seeds": ", ".join(str(seed) for seed in difference.seeds if seed is not None),
            "Also differs in": ", ".join(difference.also),
            "Δ MRR": f"{comparison.delta:+.3f}",
            "95 % interval": f"{comparison.interval.low:+.3f} to {comparison.interval.high:+.3f}",
            "p": p_text(comparison.p),
            "p (Holm)": (Best if difference.p < SIGNIFICANT else str)(p_text(difference.p)),
            **{name.title(): f"{getattr(comparison, name):,}" for name in ("wins", "losses", "ties")},
        }
        for difference in differences
        for cell, comparison in [(difference.cell, difference.comparison)]
    )


def data_table(cells: Sequence[Cell]) -> DataFrame:
    """The columns of the report with their data set, queries and codes, and those of the paper."""
    rows = []
    for column, label in column_labels(cells).items():
        queries = next(cell.values("queries")[0] for cell in cells if cell.column == column)
        _, _, *in_paper = PAPER_ROWS.get(column.language, (None,) * 4)
        counts = dict(zip(("Queries", "Codes in the corpus"), (queries, column.pool), strict=True))
        counts |= dict(zip(("Queries in the paper", "Codes in the paper"), in_paper, strict=True))
        counts = {name: "" if count is None else f"{int(count):,}" for name, count in counts.items()}
        rows.append({"Language": label, "Data set": column.dataset, **counts})
    return as_table(rows)


def runs_table(runs: Sequence[ReportedRun]) -> DataFrame:
    """Every run with its folder, its settings and its time."""
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


CSV_COLUMNS = (
    *("evaluation", "encoder", "language", "dataset", "pool", "system", "loss", "cancel", "estimator", "settings"),
    *("seeds", "mrr", "mrr_of_seeds", "paper_mrr", "delta", "low", "high", "p", "p_holm", "wins", "losses", "ties"),
)


def csv_text(groups: Iterable[Sequence[Cell]], differences: Sequence[Difference]) -> str:
    """One line for each cell of every evaluation set, with all digits."""
    by_cell = {difference.cell: difference for difference in differences}
    lines = []
    for cell in itertools.chain.from_iterable(groups):
        line = asdict(cell.row) | asdict(cell.column)
        line |= {"evaluation": cell.split, "settings": cell.row.labels[-1], "mrr": cell.mrr, "paper_mrr": cell.paper}
        line |= {"seeds": " ".join(str(run.seed) for run in cell.runs)}
        line |= {"mrr_of_seeds": " ".join(f"{mrr:.6f}" for mrr in cell.values("mrr"))}
        if difference := by_cell.get(cell):
            comparison = difference.comparison
            line |= asdict(comparison) | comparison.interval._asdict() | {"p_holm": difference.p}
        lines.append(line)
    return DataFrame(lines, columns=CSV_COLUMNS, dtype=object).to_csv(index=False)
