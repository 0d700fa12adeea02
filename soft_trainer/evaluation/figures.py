"""Creates and saves matplotlib figures. Matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from soft_trainer.system.files import reporting_disk_errors, written_aside

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # distinct for colour-blind people too
PLOTTED = {"loss": "training loss", "eval_mrr": "MRR on valid"}  # keys of the trainer's log, with titles of plots


def new_figure(width: float, height: float):
    """Makes an empty `Figure` of this size in inches. No display is needed."""
    from matplotlib.figure import Figure  # from the extra `plots`

    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure, path: str | Path) -> Path:
    """Writes a figure to a PNG file at 150 dots per inch, atomically. Raises UserError if that fails."""
    path = Path(path)
    with reporting_disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            figure.savefig(aside, format="png", dpi=150)
    return path


def draw_training(logs: Mapping[str, Sequence[Sequence[Mapping]]], path: str | Path) -> Path | None:
    """Draws the loss and the MRR at each step, with a line for each run in the colour of its method.

    Args:
        logs: for each method, the trainer's log of each run.

    Returns:
        The path of the file, or None if matplotlib (the extra `plots`) is missing, or if no log has two values.
    """
    lines = []
    for name in PLOTTED:
        for number, (method, histories) in enumerate(logs.items()):
            for history in histories:
                points = [(entry["step"], entry[name]) for entry in history if name in entry]
                if len(points) > 1:
                    lines.append((name, number, method, points))
    names = list(dict.fromkeys(name for name, *_ in lines))
    if not names or importlib.util.find_spec("matplotlib") is None:
        return None
    figure = new_figure(4 * len(names), 3)
    axes = dict(zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True))
    drawn = {}
    for name, number, method, points in lines:
        color = COLORS[number % len(COLORS)]
        (drawn[method],) = axes[name].plot(*zip(*points, strict=True), marker=".", color=color)
    for name, each in axes.items():
        each.set(xlabel="step", title=PLOTTED[name])
        each.xaxis.get_major_locator().set_params(integer=True)
    if len(logs) > 1:
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2)
    return save_png(figure, path)
