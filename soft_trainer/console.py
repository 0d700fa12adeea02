"""What a run says to people, one line or one table at a time, from the main process only; and the JSON it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

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


def write_json(path: str | Path, value) -> None:
    """Write JSON aside, then rename."""
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(value, indent=2) + "\n")
    aside.replace(path)
