"""Checks the names of programming languages, and finds the languages in a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from soft_trainer.dataflow.rules import DATA_FLOW_RULES
from soft_trainer.errors import UserError
from soft_trainer.source.languages import CODESEARCHNET_LANGUAGES, LANGUAGE_OF_ENDING, SOURCE_LANGUAGES
from soft_trainer.system.terminal import nearest

if TYPE_CHECKING:  # slow to import, and not needed to check names
    from datasets import Dataset


def check_languages(languages: Sequence[str], reader: str | None = "CodeSearchNet") -> None:
    """Checks that programming languages are supported, and that no name is empty or repeated.

    Args:
        reader: the part of a run that reads the language, such as "mining" or "data flow". If None, any name is
            allowed.

    Raises:
        UserError: `reader` does not support a language, or a name is empty or repeated.
    """
    known = {"mining": SOURCE_LANGUAGES, "CodeSearchNet": CODESEARCHNET_LANGUAGES}.get(reader, DATA_FLOW_RULES)
    for name in languages:
        if not name or languages.count(name) > 1:
            raise UserError(f"language={name!r}: list each language once, separated by commas")
        if reader and name not in known:
            raise UserError(f"language={name!r}: {reader} supports only {', '.join(known)}{nearest(name, known)}")


def languages_in(data: Mapping[str, Dataset]) -> list[str]:
    """Returns the programming languages in several data sets, most common first.

    A row's language comes from the column `language` or, if that column is missing, from the extension of `path`.
    """
    counts: Counter[str] = Counter()
    for rows in data.values():
        if "language" in rows.column_names:
            counts.update(filter(None, rows["language"]))
        elif "path" in rows.column_names:
            for path in rows["path"]:
                counts.update(filter(None, [LANGUAGE_OF_ENDING.get(PurePosixPath(path or "").suffix)]))
    return sorted(counts, key=counts.get, reverse=True)


def tables_in(tables: Mapping[str, Dataset], language: str, source: str) -> dict[str, Dataset]:
    """Selects the rows in a language from each split's table that has a column `language`.

    Args:
        source: where the rows come from, for messages.

    Raises:
        UserError: a split has no rows in the language.
    """
    selected = dict(tables)
    for split, rows in tables.items():
        if "language" not in rows.column_names:
            continue
        spoken = np.array(rows["language"][:], dtype=object)
        chosen = np.flatnonzero(spoken == language)
        if len(chosen) < len(rows):
            selected[split] = rows.select(chosen)
        if not len(chosen):
            others = ", ".join(sorted({*spoken} - {None}))
            raise UserError(f"{source}: {split} has no rows in {language}, only in {others}; set language")
    return selected
