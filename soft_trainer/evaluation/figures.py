"""Creates and saves matplotlib figures. Matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

from pathlib import Path

from soft_trainer.files import reporting_disk_errors, written_aside

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # distinct for colour-blind people too


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
