"""Converts notebooks to plain text in which every line of a cell keeps its line number."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator

_CELL = re.compile(rb"^# %% \[(\w+)\]$", re.MULTILINE)


def is_notebook(path: str) -> bool:
    """Returns True if a path has a notebook's extension."""
    return path.lower().endswith(".ipynb")


def notebook_text(source: bytes) -> tuple[bytes, str] | None:
    """Converts a notebook to plain text.

    Each cell starts with a line such as `# %% [code]`. Line numbers match the file that Jupyter wrote, so outputs and
    everything else outside the cells become empty lines.

    Returns:
        The text and the code's language according to the notebook, or None if the source is not a notebook.
    """
    try:
        return _written(json.loads(source))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _written(notebook: dict) -> tuple[bytes, str]:
    # Each line of a cell is replaced with a mark, to find the line's number in the file.
    mark = uuid.uuid4().hex
    written = {}
    for number, cell in enumerate(notebook["cells"]):
        written[f"{mark}-{number}"] = f"# %% [{cell['cell_type']}]"
        texts = [cell["source"]] if isinstance(cell["source"], str) else cell["source"]
        lines = []
        for text in texts:
            lines += text.removesuffix("\n").replace("\r", "").split("\n")
        marks = [f"{mark}-{number}-{line}" for line in range(len(lines))]
        written |= dict(zip(marks, lines, strict=True))
        cell |= {"cell_type": f"{mark}-{number}", "source": marks}
    shown = []
    for line in json.dumps(notebook, indent=1).split("\n"):
        found = re.search(rf"{mark}[-\d]+", line)
        shown.append(written[found[0]] if found else "")
    metadata = notebook.get("metadata", {})
    named = metadata.get("language_info", {}).get("name") or metadata.get("kernelspec", {}).get("language")
    return "\n".join(shown).encode(errors="replace"), (named or "python").lower()


def cells(text: bytes) -> Iterator[tuple[int, str, bytes]]:
    """Yields the cells in a notebook's text as (number of lines above, type, text)."""
    marks = list(_CELL.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for mark, end in zip(marks, ends, strict=False):
        start = mark.end() + 1
        yield text.count(b"\n", 0, start), mark[1].decode(), text[start:end]
