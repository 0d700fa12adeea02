"""What a run says to people: one line or one table at a time, from the main process only."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from soft_trainer import distributed


def say(text: str) -> None:
    """Write `text` to standard error, on the main process only, past a progress bar."""
    if distributed.world()[0] == 0:
        sys.stderr.write(f"\r{text}\n")
        sys.stderr.flush()


def table(headers: Sequence[str], rows: Sequence[Sequence], floats: str = ".3f") -> str:
    """A Markdown table; numbers to the right, floats with three digits, None empty."""
    from tabulate import tabulate

    return tabulate(rows, headers, tablefmt="pipe", floatfmt=floats, missingval="", intfmt=",")
