"""Draws figures with matplotlib, which is only imported once a figure is drawn."""

from __future__ import annotations

from pathlib import Path

from soft_trainer.errors import UserError
from soft_trainer.files import written_aside

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # the colour-blind can tell them apart


def new_figure(width: float, height: float):
    """Makes an empty `Figure`, whose size is in inches. It needs no display."""
    from matplotlib.figure import Figure  # of the extra `plots`

    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure, path: str | Path) -> Path:
    """Writes a figure atomically, at 150 dots per inch. Raises UserError if the file cannot be written."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as aside:
            figure.savefig(aside, format="png", dpi=150)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    return path
