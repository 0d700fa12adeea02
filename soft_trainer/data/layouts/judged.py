"""Recognises the layouts with judgments, and reads them: BEIR, CoSQA and CoSQA+."""

from __future__ import annotations

from pathlib import Path

from soft_trainer.data.layouts.beir import is_beir, load_beir
from soft_trainer.data.layouts.cosqa import has_cosqa, has_cosqa_plus, load_cosqa, load_cosqa_plus
from soft_trainer.data.layouts.files import files_of
from soft_trainer.data.split import Split
from soft_trainer.errors import UserError


def load_judged(folder: Path) -> dict[str, Split]:
    """Reads train, valid and test from a folder of BEIR, CoSQA or CoSQA+. Missing splits are excluded.

    The corpus for train has only judged codes. CoSQA+ has only test. For a folder in another layout, the result is
    empty.

    Raises:
        UserError: a file is missing or cannot be read, or a judgment is about an unknown query or code. The message
            gives the file and the row.
    """
    if is_beir(folder):
        return load_beir(folder)
    files = files_of(folder)
    splits = {}
    if has_cosqa(files):
        splits = load_cosqa(folder, files)
    if has_cosqa_plus(files):
        if "test" in splits:
            raise UserError(f"{folder}: both CoSQA and CoSQA+ have queries for test: keep each in its own folder")
        splits["test"] = load_cosqa_plus(folder, files)
    return splits
