"""Pictures: matplotlib, imported when one is drawn, and PNG files."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from soft_trainer.errors import UserError

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by the colour-blind too
MARKERS = ("o", "s", "^", "D", "v", "P")


def new_figure(width: float, height: float):
    """An empty `matplotlib.figure.Figure`, sizes in inches, that needs no display.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'soft-trainer[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure, path: str | Path) -> Path:
    """Write the figure aside, then rename.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(aside, format="png", dpi=150)
        aside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def data_uri(figure) -> str:
    """The figure as a PNG inside an address, for a page that is one file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
