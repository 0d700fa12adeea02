"""Reads folders in the layouts of BEIR, CoSQA and CoSQA+."""

from __future__ import annotations

from pathlib import Path

from soft_trainer.data.layouts.beir import is_beir, load_beir
from soft_trainer.data.layouts.cosqa import load_cosqa, load_cosqa_plus
from soft_trainer.data.layouts.files import files_of
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError


def load_judged(folder: Path) -> dict[str, Split]:
    """Reads the splits of a folder in the layout of BEIR, CoSQA or CoSQA+. Returns {} for other layouts.

    The corpus of train has only judged functions. CoSQA+ has only test.

    Raises:
        UserError: a file is missing or cannot be read, or a judgment mentions an unknown query or function. The
            message includes the file and the row.
    """
    if is_beir(folder):
        return load_beir(folder)
    files = files_of(folder)
    splits = load_cosqa(folder, files)
    plus = load_cosqa_plus(folder, files)
    if splits.keys() & plus.keys():
        raise UserError(f"{folder}: both CoSQA and CoSQA+ have test queries; put them into separate folders")
    return splits | plus
