"""Draws the course of a training, for its output folder and its card."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from soft_trainer.evaluation.figures import COLORS, new_figure, save_png
from soft_trainer.files import TRAINING_PICTURE

VALUES = {"loss": "training loss", "eval_mrr": "MRR on valid"}


def draw_training(folder: Path, history: Sequence[Mapping]) -> Path | None:
    """Draws the loss and the MRR by step, if they were logged, as `training.png`.

    Args:
        history: the trainer's log.

    Returns:
        The file, or None without matplotlib (the extra `plots`) or without two logged values of a kind.
    """
    points = {name: [(entry["step"], entry[name]) for entry in history if name in entry] for name in VALUES}
    drawn = [name for name in VALUES if len(points[name]) > 1]
    if not drawn or importlib.util.find_spec("matplotlib") is None:
        return None
    figure = new_figure(4 * len(drawn), 3)
    for place, name in enumerate(drawn, 1):
        axes = figure.add_subplot(1, len(drawn), place)
        axes.plot(*zip(*points[name], strict=True), color=COLORS[place - 1], marker=".")
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(VALUES[name])
    return save_png(figure, folder / TRAINING_PICTURE)
