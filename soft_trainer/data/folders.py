"""Lists the files of a folder of data, and finds the split (train, valid, test or codebase) of each file."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from soft_trainer.errors import UserError
from soft_trainer.system.files import uncompressed_name
from soft_trainer.system.terminal import print_on_main

SPLITS = ("train", "valid", "test", "codebase")
SIDES_OF = {"train": ("query", "code"), "valid": ("query",), "test": ("query",), "codebase": ("code",)}
# The recognised names of splits.
SPLIT_NAMES = {
    "train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid",
    "test": "test", "codebase": "codebase", "corpus": "codebase",
}  # fmt: skip
SHARD = re.compile(r"-(\d+)-of-(\d+)$")  # in file names on the Hub, such as `train-00000-of-00002.parquet`
FORMATS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv",
    ".parquet": "parquet",
}  # fmt: skip
JUDGMENTS = "relevance.jsonl"  # judged queries
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
ACCEPTED = "JSON Lines, CSV, TSV or Parquet"


class Files(NamedTuple):
    """The files of a data source, listed once.

    Args:
        source: a file or a folder.
        paths: the paths of a folder's files, keyed by name without `.gz`, `.xz` and so on: plain files are preferred.
            The names in BEIR's subfolder begin with `qrels/`.
    """

    source: Path
    paths: Mapping[str, Path]

    def of_splits(self, split_of: Callable[[str], str | None]) -> dict[str, list[Path]]:
        """Returns the paths of the files, keyed by split. A split may have several files only if they are shards.

        Args:
            split_of: returns the split of a file from its name without `.gz`, or None for other files.

        Raises:
            UserError: a split has several files that are not shards, such as `train.csv` and `train.jsonl`.
        """
        paths_of: dict[str, list[Path]] = {}
        for name, path in self.paths.items():
            if split := split_of(name):
                paths_of.setdefault(split, []).append(path)
        for split, paths in paths_of.items():
            check_shards(paths, split)
        return paths_of

    def is_saved(self) -> bool:
        """Returns True if `save_to_disk` has written the folder."""
        return "dataset_dict.json" in self.paths or "dataset_info.json" in self.paths


def is_hub_name(source: str) -> bool:
    """Returns True for a name on the Hub, USER/NAME. `rows/train.csv` is a file."""
    return bool(HUB_NAME.fullmatch(source)) and format_of(Path(source).name) is None


def list_files(source: str | Path) -> Files:
    """Lists the files of a folder and of its subfolder `qrels`. The list of a single file is empty."""
    source = Path(source)
    paths = {}
    for pattern in ("*", "qrels/*"):
        for path in sorted(filter(Path.is_file, source.glob(pattern)), reverse=True):
            paths[pattern.replace("*", uncompressed_name(path.name))] = path
    return Files(source, dict(sorted(paths.items())))


def check_names(names: Iterable[str]) -> None:
    """Checks the names of the splits in a dict or a saved data set.

    Raises:
        UserError: two names stand for the same split, or a name is similar to the name of a missing split.
    """
    names = list(names)
    found: dict[str, str] = {}
    for name in names:
        split = SPLIT_NAMES.get(name.lower())
        if split in found:
            raise UserError(f"{found[split]!r} and {name!r} stand for the same split: keep one of them")
        if split is not None:
            found[split] = name
    for name in names:
        if near := _near_split(name, found):
            raise UserError(f"{name!r} is not the name of a split; did you mean {near!r}?")


def _near_split(name: str, found: Collection[str]) -> str | None:
    """Returns the name of a missing split that is similar to `name`, or None. `found` has the other splits."""
    if not found or name.lower() in SPLIT_NAMES:
        return None
    missing = [known for known, split in SPLIT_NAMES.items() if split not in found]
    return next(iter(difflib.get_close_matches(name.lower(), missing, n=1, cutoff=0.75)), None)


def check_shards(paths: list[Path], split: str) -> None:
    """Checks that a split is one file, or all shards of one file.

    Raises:
        UserError: the split has several files that are not shards, such as `train.csv` and `train.jsonl`, or a shard
            is missing.
    """
    first = {}  # the first file of each set of shards
    numbers = set()
    total = 0
    for path in paths:
        name = uncompressed_name(path.name)
        if shard := SHARD.search(name.split(".")[0]):
            numbers.add(int(shard[1]))
            total = int(shard[2])
            name = name.replace(shard[0], f"-of-{total}")
        first.setdefault(name, path.name)
    if len(first) > 1:
        names = " and ".join([*first.values()][:2])
        raise UserError(
            f"{paths[0].parent}: {names} both contain rows of {split}; keep only one file or set of shards"
        )
    start = 1 if total in numbers else 0
    for number in {*range(start, start + total)} - numbers:
        raise UserError(
            f"{paths[0].parent}: {paths[0].name} is one of {total} shards of {split}, but shard "
            f"{number:05d} is missing or in a format that is not read; add it, or pass only this shard's path"
        )


def format_of(name: str) -> str | None:
    """Returns the format that a file's name implies ("json", "csv", "tsv" or "parquet"), or None for other files."""
    if "/" in name:  # in a subfolder
        return None
    return FORMATS.get(Path(uncompressed_name(name)).suffix.lower())


def split_of(name: str) -> str | None:
    """Returns the split that a file's name refers to, such as "valid" for `dev.csv`, or None for other names."""
    return SPLIT_NAMES.get((_base(name) or "").lower())


def _base(name: str) -> str | None:
    """Strips the endings and the shard number from a file name: `train-00000-of-00002.parquet` becomes `train`.

    Returns:
        The rest of the name, or None if the file does not contain rows.
    """
    if format_of(name):
        return SHARD.sub("", name.split(".")[0])
    return None


def row_files(files: Files) -> dict[str, list[Path]]:
    """Returns the paths of the row files in a folder, or of a single file, keyed by split.

    If no file is named after a split, all files belong to train. Otherwise, files with other names are skipped.

    Raises:
        UserError: two files belong to the same split but are not shards, or their names differ only in the format.
    """
    source = files.source
    if not source.is_dir():
        split = split_of(source.name) or "train"
        return {split: [source]} if format_of(source.name) else {}
    named = files.of_splits(split_of)
    if named:
        for name, path in files.paths.items():
            base, _, ending = path.name.partition(".")
            near = format_of(name) and _near_split(SHARD.sub("", base), named)
            if near:
                raise UserError(f"{path}: not the name of a split; did you mean {near}.{ending}?")
        return named
    unnamed = list(itertools.chain.from_iterable(files.of_splits(_base).values()))
    return {"train": unnamed} if unnamed else {}


def name_skipped(files: Files, read: Mapping[str, list[Path]]) -> None:
    """Prints the files in a folder that seem to contain rows but are not read, such as `test.xlsx`."""
    known = set(itertools.chain.from_iterable(read.values()))
    skipped = []
    for name, path in files.paths.items():
        of_split = SHARD.sub("", name.split(".")[0]).lower() in SPLIT_NAMES
        of_rows = format_of(name) and Path(name).suffix != ".json"
        if path not in known and name != JUDGMENTS and (of_split or of_rows) and Path(name).suffix != ".txt":
            skipped.append(path.name)
    if skipped:
        print_on_main(
            f"{files.source}: not reading {', '.join(skipped)}; rows are in {ACCEPTED} files named after a split "
            "(train, valid, test, codebase), or in files of which none is"
        )
