"""The pictures of a report: for each encoder and language how it learned, its weights, and where it differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from soft_trainer.evaluation.figures import COLORS, MARKERS, data_uri, new_figure
from soft_trainer.studies.report.cells import Cell, Difference, Row
from soft_trainer.studies.report.tables import column_labels, columns_of, row_label

LINES = ("-", "--", ":", "-.")
SIZE = (4.8, 3.7)  # inches; legible at the width of a telephone


@dataclass(frozen=True)
class Picture:
    """A picture with what it shows.

    Args:
        title: a line above it.
        alt: what is to be seen, in words.
        uri: the picture itself, as a data address.
    """

    title: str
    alt: str
    uri: str


@dataclass(frozen=True)
class _Line:
    """A line to draw: its points, and the row it is of."""

    row: Row
    x: Sequence[float]
    y: Sequence[float]


def pictures(cells: Sequence[Cell], differences: Sequence[Difference]) -> dict[str, list[Picture]]:
    """For every encoder and column that was trained, its pictures."""
    labels = column_labels(columns_of(cells))
    groups: dict[tuple, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.row.system == "trained":
            groups[cell.row.encoder, cell.column].append(cell)
    found = {}
    for (encoder, column), group in groups.items():
        own = [one for one in differences if one.cell in group]
        drawn = [draw(group, own) for draw in _PICTURES]
        if any(drawn):
            found[f"{encoder}, {labels[column]}"] = [picture for picture in drawn if picture]
    return found


# ---- One picture each: from the cells of an encoder and language and their differences ----


def training_loss(cells: Sequence[Cell], differences: Sequence[Difference]) -> Picture | None:
    """The loss by step; losses of other kinds have other scales."""
    return _curves("Training loss", "loss", cells, _logged(cells, "loss"))


def evaluation_mrr(cells: Sequence[Cell], differences: Sequence[Difference]) -> Picture | None:
    """MRR on valid, where it was measured during training."""
    return _curves("MRR on valid during training", "MRR", cells, _logged(cells, "eval_mrr"))


def smallest_weight(cells: Sequence[Cell], differences: Sequence[Difference]) -> Picture | None:
    """The smallest weight of a negative in each logged step."""
    return _curves("Smallest weight of a negative", "weight", cells, _logged(cells, "weight_min"))


def share_at_floor(cells: Sequence[Cell], differences: Sequence[Difference]) -> Picture | None:
    """How many negatives have the smallest weight that is allowed."""
    lines = list(_logged(cells, "weight_at_floor"))
    if not any(value > 0 for line in lines for value in line.y):
        return None
    return _curves("Share of negatives at the floor", "share", cells, lines)


def weight_distribution(cells: Sequence[Cell], differences: Sequence[Difference]) -> Picture | None:
    """How the weights of the last logged step were distributed."""
    found = {cell.row: one for cell in cells for run in cell.runs[:1] if (one := run.record.get("weights"))}
    if not found:
        return None
    figure, axes = _figure("weight of a negative", "density")
    styles = _styles(cells)
    words = []
    for row, one in found.items():
        counts, edges = np.array(one["counts"], dtype=float), np.array(one["edges"])
        axes.stairs(counts / max(counts.sum(), 1) / np.diff(edges), edges, lw=1.6, **styles[row])
        middle = np.repeat((edges[1:] + edges[:-1]) / 2, counts.astype(int))
        words.append(f"{row_label(row)}: half of the weights between {_quartiles(middle)}")
    axes.set_yscale("log")
    axes.axvline(1, color="0.5", lw=1)
    return _picture("Weights of the last logged step (InfoNCE: all 1)", "; ".join(words), figure, axes)


def by_query(cells: Sequence[Cell], differences: Sequence[Difference]) -> Picture | None:
    """Every difference in reciprocal rank by query: above 0 the gains, below the losses, each sorted."""
    if not differences:
        return None
    lines = []
    for one in differences:
        for sign in (1, -1):
            sizes = np.sort(one.differences[one.differences * sign > 0] * sign)[::-1] * sign
            lines += [_Line(one.cell.row, np.arange(1, len(sizes) + 1), sizes)] if len(sizes) else []
    figure, axes = _figure("queries gained or lost, the largest change first", "reciprocal rank less InfoNCE's")
    for line, style in _styled(lines, cells):
        axes.plot(line.x, line.y, lw=1.6, **style)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color="0.5", lw=1)
    words = (
        f"{row_label(one.cell.row)}: {one.comparison.wins} queries gained, {one.comparison.losses} lost"
        for one in differences
    )
    return _picture("Reciprocal rank by query, against InfoNCE", "; ".join(words), figure, axes)


def alpha_beta(cells: Sequence[Cell], differences: Sequence[Difference]) -> Picture | None:
    """MRR by alpha, a line for each estimator and sum of alpha and beta (the paper's Figure 3 keeps it at 2)."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cell in cells:
        settings = cell.runs[0].settings
        if cell.row.loss == "soft_info_nce" and "alpha" in settings:
            others = tuple((name, value) for name, value in cell.row.settings if name not in ("alpha", "beta"))
            row = Row(cell.row.encoder, "trained", cell.row.loss, cell.row.cancel, cell.row.estimator, others)
            total = settings["alpha"] + settings["beta"]
            points[f"{row_label(row)}, α + β = {total:.3g}"].append((settings["alpha"], cell.mrr))
    curves = {label: sorted(found) for label, found in points.items() if len({alpha for alpha, _ in found}) > 1}
    if not curves:
        return None
    figure, axes = _figure("α", "MRR")
    for number, (label, found) in enumerate(curves.items()):
        axes.plot(*zip(*found, strict=True), marker=MARKERS[number % len(MARKERS)], **_style(number, label))
    baseline = [cell.mrr for cell in cells if cell.is_baseline]
    if baseline:
        axes.axhline(baseline[0], color="0.5", lw=1, label="InfoNCE")
    words = (
        f"{label}: " + ", ".join(f"{mrr:.3f} at α {alpha:g}" for alpha, mrr in found)
        for label, found in curves.items()
    )
    return _picture("MRR under α and β", "; ".join(words), figure, axes)


_PICTURES: Sequence[Callable[[Sequence[Cell], Sequence[Difference]], Picture | None]] = (
    training_loss,
    evaluation_mrr,
    weight_distribution,
    smallest_weight,
    share_at_floor,
    by_query,
    alpha_beta,
)


# ---- Drawing ----


def _logged(cells: Iterable[Cell], name: str) -> Iterator[_Line]:
    """A line for each run whose log has `name`."""
    for cell in cells:
        for run in cell.runs:
            found = [(one["step"], one[name]) for one in run.log if isinstance(one.get(name), (int, float))]
            if found:
                yield _Line(cell.row, *zip(*found, strict=True))


def _curves(title: str, unit: str, cells: Sequence[Cell], lines: Iterable[_Line]) -> Picture | None:
    """Something by step, a line for each run and seed."""
    lines = list(lines)
    if not lines:
        return None
    figure, axes = _figure("step", unit)
    for line, style in _styled(lines, cells):
        axes.plot(line.x, line.y, lw=1.6, marker="." if len(line.x) < 20 else None, **style)
    words = (f"{row_label(line.row)} from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in lines)
    return _picture(title, "By step: " + "; ".join(words), figure, axes)


def _styles(cells: Iterable[Cell]) -> Mapping[Row, dict]:
    """The same style for a row in every picture of a group."""
    rows = dict.fromkeys(cell.row for cell in cells)
    return {row: _style(number, row_label(row)) for number, row in enumerate(rows)}


def _styled(lines: Iterable[_Line], cells: Iterable[Cell]) -> Iterator[tuple[_Line, dict]]:
    """Lines with their styles, only the first seed of a row with a label."""
    styles, labelled = _styles(cells), set()
    for line in lines:
        yield line, styles[line.row] | ({"label": None} if line.row in labelled else {})
        labelled.add(line.row)


def _style(number: int, label: str) -> dict:
    return {"color": COLORS[number % len(COLORS)], "ls": LINES[number % len(LINES)], "label": label}


def _figure(x: str, y: str):
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    return figure, axes


def _picture(title: str, alt: str, figure, axes) -> Picture:
    legend = figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with `$` is no formula
    return Picture(title, f"{title}. {alt}.", data_uri(figure))


def _quartiles(values: np.ndarray) -> str:
    low, high = np.quantile(values, (0.25, 0.75)) if len(values) else (0.0, 0.0)
    return f"{low:.2f} and {high:.2f}"
