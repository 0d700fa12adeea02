"""The pictures of a report: for each encoder and language its training, its weights, and its gains over InfoNCE."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from soft_trainer.evaluation.figures import COLORS, MARKERS, data_uri, new_figure
from soft_trainer.studies.report.cells import Cell, column_labels

DASHES = ("-", "--", ":", "-.")
SIZE = (4.8, 3.7)  # inches; legible at the width of a telephone
# Curves by step: the title, the unit, and the name in the log.
CURVES = (
    ("Training loss", "loss", "loss"),
    ("MRR on valid during training", "MRR", "eval_mrr"),
    ("Smallest weight of a negative", "weight", "weight_min"),
    ("Share of negatives at the floor", "share", "weight_at_floor"),
)


@dataclass(frozen=True)
class Picture:
    """A picture with its title and description."""

    title: str
    alt: str  # the picture in words
    uri: str  # the picture itself, as a data address


def pictures(cells: Sequence[Cell]) -> dict[str, list[Picture]]:
    """Draws the pictures of every encoder and column that was trained."""
    groups: dict[str, list[Cell]] = defaultdict(list)
    labels = column_labels(cells)
    for cell in cells:
        if cell.system == "trained":
            groups[f"{cell.encoder}, {labels[cell.column]}"].append(cell)
    drawn = {}
    for name, group in groups.items():
        figures = [*(curves(group, *curve) for curve in CURVES), weight_distribution(group), gains_by_query(group)]
        if made := [picture for picture in (*figures, alpha_beta(group)) if picture]:
            drawn[name] = made
    return drawn


def curves(cells: Sequence[Cell], title: str, unit: str, name: str) -> Picture | None:
    """Draws a logged figure by step, with a line for each run. None if no log has the figure, or if it is always 0."""
    lines = []
    for cell, run in [(each, run) for each in cells for run in each.runs]:
        points = [(entry["step"], entry[name]) for entry in run.log if isinstance(entry.get(name), int | float)]
        lines += [(cell, *zip(*points, strict=True))] if points else []
    if not any(any(values) for *_, values in lines):
        return None
    figure, axes = _figure("step", unit)
    _draw_lines(axes, cells, lines, with_points=True)
    words = (f"{cell.label} from {values[0]:.3g} to {values[-1]:.3g}" for cell, _, values in lines)
    return _picture(title, "By step: " + "; ".join(words), figure)


def weight_distribution(cells: Sequence[Cell]) -> Picture | None:
    """Draws the distribution of the weights in the last logged step, under the first seed."""
    histograms = {cell: cell.runs[0].record["weights"] for cell in cells if cell.runs[0].record.get("weights")}
    if not histograms:
        return None
    figure, axes = _figure("weight of a negative", "density")
    words = []
    for cell, histogram in histograms.items():
        counts = np.array(histogram["counts"], dtype=float)
        edges = np.array(histogram["edges"])
        style = _style(cells.index(cell), cell.label)
        axes.stairs(counts / max(counts.sum(), 1) / np.diff(edges), edges, lw=1.6, **style)
        middles = np.repeat((edges[1:] + edges[:-1]) / 2, counts.astype(int))
        low, high = np.quantile(middles, (0.25, 0.75)) if len(middles) else (0.0, 0.0)
        words.append(f"{cell.label}: half of the weights between {low:.2f} and {high:.2f}")
    axes.set_yscale("log")
    axes.axvline(1, color="0.5", lw=1)
    return _picture("Weights of the last logged step (InfoNCE: all 1)", "; ".join(words), figure)


def gains_by_query(cells: Sequence[Cell]) -> Picture | None:
    """Draws every query's difference in reciprocal rank. Gains are above 0 and losses below, each sorted by size."""
    lines = []
    words = []
    for cell in (cell for cell in cells if cell.difference):
        comparison = cell.difference.comparison
        differences = cell.difference.differences
        words.append(f"{cell.label}: {comparison.wins} queries gained, {comparison.losses} lost")
        for side in (np.sort(differences[differences > 0])[::-1], np.sort(differences[differences < 0])):
            lines += [(cell, np.arange(1, len(side) + 1), side)] if len(side) else []
    if not words:
        return None
    figure, axes = _figure("queries gained or lost, the largest change first", "reciprocal rank minus InfoNCE's")
    _draw_lines(axes, cells, lines)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axhline(0, color="0.5", lw=1)
    return _picture("Reciprocal rank by query, against InfoNCE", "; ".join(words), figure)


def alpha_beta(cells: Sequence[Cell]) -> Picture | None:
    """Draws MRR by alpha, a line for each estimator and sum of alpha and beta (always 2 in the paper's Figure 3)."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cell in cells:
        settings = cell.runs[0].settings
        if cell.loss == "soft_info_nce" and "alpha" in settings:
            others = tuple((name, value) for name, value in cell.settings if name not in ("alpha", "beta"))
            label = f"{replace(cell, settings=others).label}, α + β = {settings['alpha'] + settings['beta']:.3g}"
            points[label].append((settings["alpha"], cell.mean()))
    lines = {label: sorted(line) for label, line in points.items() if len({alpha for alpha, _ in line}) > 1}
    if not lines:
        return None
    figure, axes = _figure("α", "MRR")
    for number, (label, line) in enumerate(lines.items()):
        axes.plot(*zip(*line, strict=True), marker=MARKERS[number % len(MARKERS)], **_style(number, label))
    if baseline := [cell.mean() for cell in cells if cell.is_baseline]:
        axes.axhline(baseline[0], color="0.5", lw=1, label="InfoNCE")
    words = (f"{label}: {', '.join(f'{mrr:.3f} at α {alpha:g}' for alpha, mrr in lines[label])}" for label in lines)
    return _picture("MRR under α and β", "; ".join(words), figure)


# ---- Drawing ----


def _style(number: int, label: str | None) -> dict:
    return {"color": COLORS[number % len(COLORS)], "ls": DASHES[number % len(DASHES)], "label": label}


def _draw_lines(axes, cells: Sequence[Cell], lines: Iterable[tuple], with_points: bool = False) -> None:
    """Draws lines (cell, x, y). Only the first of each cell gets a label; lines of few points get markers."""
    labelled = set()
    for cell, x, y in lines:
        style = _style(cells.index(cell), None if cell in labelled else cell.label)
        axes.plot(x, y, lw=1.6, marker="." if with_points and len(x) < 20 else None, **style)
        labelled.add(cell)


def _figure(x: str, y: str):
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    return figure, axes


def _picture(title: str, alt: str, figure) -> Picture:
    legend = figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)  # `$` in a name does not begin a formula
    return Picture(title, f"{title}. {alt}.", data_uri(figure))
