"""Draws a report's figures: loss and MRR by step, the weights of negatives, and each query's gain or loss."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from soft_trainer.errors import extra_needed
from soft_trainer.evaluation.figures import COLORS, new_figure, save_png
from soft_trainer.terminal import print_on_main

SIZE = (6.4, 4.4)  # inches
DASHES = ("-", "--", ":", "-.")
# Curves by step: the file, the title, and the name in the log.
CURVES = (("loss", "Training loss", "loss"), ("mrr", "MRR on valid during training", "eval_mrr"))


def draw_pictures(methods: Mapping[str, Sequence], differences: Sequence, folder: Path) -> dict[str, Path]:
    """Draws the figures for which there is data. Returns `{title: path}`, or {} if matplotlib is not installed.

    Args:
        methods: the `ReportedRun`s of each method.
        differences: the `Difference` between each method and the baseline.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print_on_main(extra_needed("The report has no figures; drawing them", "plots"))
        return {}
    runs = list(chain.from_iterable(methods.values()))
    logged = set()
    for run in runs:
        logged.update(*run.log)
    drawn = {}
    for file, title, name in CURVES:
        if name in logged:
            drawn[title] = save_png(curves(methods, name), folder / f"{file}.png")
    if any(run.record.get("weights") for run in runs):
        title = "Weights of the negatives in a batch (InfoNCE: all 1)"
        drawn[title] = save_png(weights(methods), folder / "weights.png")
    if differences:
        title = "Reciprocal rank by query, compared with the baseline"
        drawn[title] = save_png(gains(differences), folder / "gains.png")
    return drawn


def curves(methods: Mapping[str, Sequence], name: str):
    """Plots a logged value, such as `eval_mrr`, by training step, with one line per run."""
    figure, axes = _figure("step", name)
    for number, (method, runs) in enumerate(methods.items()):
        label = method  # it appears once in the legend
        for run in runs:
            points = [(entry["step"], entry[name]) for entry in run.log if name in entry]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", **_style(number, label))
            label = None
    return _with_legend(figure)


def weights(methods: Mapping[str, Sequence]):
    """Plots the distribution of negatives' weights in the last logged step of each method's first run."""
    figure, axes = _figure("weight of a negative", "density")
    for number, (method, runs) in enumerate(methods.items()):
        histogram = runs[0].record.get("weights")
        if histogram:
            counts = np.array(histogram["counts"], dtype=float)
            edges = np.array(histogram["edges"])
            density = counts / max(counts.sum(), 1) / np.diff(edges)
            axes.stairs(density, edges, **_style(number, method))
    axes.set_yscale("log")
    axes.axvline(1, color="0.5", lw=1)
    return _with_legend(figure)


def gains(differences: Sequence):
    """Plots how much each query's reciprocal rank differs from the baseline's, largest differences first."""
    figure, axes = _figure("queries that improved or got worse, largest change first", "difference in reciprocal rank")
    for number, difference in enumerate(differences):
        values = difference.comparison.differences.mean(0)
        label = difference.method
        for side in (np.sort(values[values > 0])[::-1], np.sort(values[values < 0])):
            axes.plot(np.arange(1, len(side) + 1), side, **_style(number, label))
            label = None
    axes.set_xscale("log")
    axes.axhline(0, color="0.5", lw=1)
    return _with_legend(figure)


def _style(number: int, label: str | None) -> dict:
    return {"color": COLORS[number % len(COLORS)], "ls": DASHES[number % len(DASHES)], "label": label}


def _figure(x: str, y: str):
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    return figure, axes


def _with_legend(figure):
    legend = figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)  # `$` in a name is not a formula
    return figure
