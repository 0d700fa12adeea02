"""Reads rows with their own column names from files, saved data sets and data sets on the Hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from datasets import Dataset, Features, LargeList, List, Value, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from soft_trainer.data.array_cache import cached_dataset
from soft_trainer.data.layouts.published import load_published
from soft_trainer.errors import UserError
from soft_trainer.fingerprints import file_fingerprint, fingerprint

# The recognised names of splits.

SPLIT_NAMES = {
    "train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid",
    "test": "test", "codebase": "codebase", "corpus": "codebase",
}  # fmt: skip
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
READ_AS = {"csv": {"keep_default_na": False, "na_values": [""]}}  # `null` and `NA` are ordinary words
SHARD = re.compile(r"-\d+-of-\d+$")  # in the names of the Hub's files, `train-00000-of-00002.parquet`
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_saved(folder: Path) -> bool:
    """Returns True if a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def format_of(path: Path) -> str | None:
    """Returns the format of a file of rows, or None for other kinds of files."""
    if path.is_file():
        return FORMATS.get(Path(path.name.removesuffix(".gz")).suffix.lower())
    return None


def split_of(path: Path) -> str | None:
    """Returns the split for which a file is named, or None if there is none."""
    if format_of(path):
        return SPLIT_NAMES.get(SHARD.sub("", path.name.split(".")[0].lower()))
    return None


def read_splits(source: str) -> dict[str, Dataset]:
    """Reads the splits of a file, a folder, a saved data set or a data set on the Hub.

    Splits are renamed to the names that this package uses. Rows without a split become `train`.

    Raises:
        UserError: the rows cannot be read.
    """
    path = Path(source)
    if not path.exists() and not HUB_NAME.fullmatch(source):
        raise UserError(f"{source}: no such folder or file, and no name on the Hub (USER/NAME)")
    with _reading(source):
        if path.is_dir() and is_saved(path):
            loaded = load_from_disk(source)
        elif path.exists():
            loaded = _read_files(path)
        else:
            loaded = load_published(source)
    if not isinstance(loaded, dict):
        loaded = {"train": loaded}
    splits = {}
    unnamed = []
    for name, rows in loaded.items():
        rows = with_plain_text(rows)
        unnamed.append(rows)
        if name in SPLIT_NAMES:
            splits[SPLIT_NAMES[name]] = rows
    return splits or {"train": concatenate_datasets(unnamed)}


@contextmanager
def _reading(source: str | Path) -> Iterator[None]:
    """Turns an error in its body into a one-line UserError with the file, folder or name that cannot be read."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, DatasetGenerationError, StopIteration) as error:
        reason = (str(error.__cause__ or error).strip() or "it has no rows").splitlines()[0]
        # The words of `datasets` for a file with nothing but a header, and of pandas for an empty one.
        if "corresponds to no data" in reason or "No columns to parse" in reason:
            reason = "it has no rows"
        raise UserError(f"{source}: cannot be read: {reason}") from error


def with_plain_text(rows: Dataset) -> Dataset:
    """Casts `large_string` columns, which pandas and polars write, to `string`, so that tables can be joined."""
    large = Value("large_string")
    plain = Value("string")
    tokens = [List(large), LargeList(large), LargeList(plain)]
    features = Features(rows.features)
    for name, feature in rows.features.items():
        if feature == large:
            features[name] = plain
        elif feature in tokens:
            features[name] = List(plain)
    if features == rows.features:
        return rows
    return rows.cast(features)


def row_files(source: Path) -> list[tuple[Path, str]]:
    """Returns a single file of rows, or those in a folder, each with its split.

    If no file is named for a split, all of them belong to train. Otherwise, files without a split are left out.
    """
    paths = [source]
    if source.is_dir():
        # A plain file takes precedence over its gzipped copy.
        plain = {path.name.removesuffix(".gz"): path for path in sorted(source.iterdir(), reverse=True)}
        paths = [plain[name] for name in sorted(plain)]
    paths = list(filter(format_of, paths))
    splits = list(map(split_of, paths))
    if not any(splits):
        splits = ["train"] * len(paths)
    files = [(path, split) for path, split in zip(paths, splits, strict=True) if split]
    _check_no_copies(files, named=any(map(split_of, paths)))
    return files


def _check_no_copies(files: Sequence[tuple[Path, str]], named: bool) -> None:
    """Raises UserError if two files seem to have the same rows: both named for a split, or equal but for the format.

    Args:
        named: whether the names of the files say which split they belong to.
    """
    first: dict[str, tuple[Path, tuple]] = {}
    for path, split in files:
        whole, shard = SHARD.subn("", path.name.split(".")[0])
        kind = (whole, format_of(path), shard)
        other, other_kind = first.setdefault(split if named else whole, (path, kind))
        shards = shard and kind == other_kind
        if other is not path and not shards:
            raise UserError(f"{path.parent}: {other.name} and {path.name} both have rows of {split}: keep one of them")


def _read_files(source: Path) -> dict[str, Dataset]:
    """Reads each file with the reader for its format."""
    files = row_files(source)
    if not files:
        raise UserError(f"{source}: no rows; JSON lines, CSV or Parquet are read, such as train.jsonl or rows.csv")
    parts: dict[str, list[Dataset]] = {}
    for path, split in files:
        with _reading(path):
            rows = _read_file(path)
        parts.setdefault(split, []).append(with_plain_text(rows))
    return {split: concatenate_datasets(rows) for split, rows in parts.items()}


def _read_file(path: Path) -> Dataset:
    """Reads one file with the reader for its format. The rows are cached under a fingerprint of the file's content."""
    reader = format_of(path)
    options = READ_AS.get(reader, {})
    made_from = fingerprint(file_fingerprint(path), reader, repr(options))

    def build(stored: Path) -> Dataset:
        kept = {"cache_dir": str(stored.with_suffix("")), "download_mode": "force_redownload"}
        return load_dataset(reader, data_files=glob.escape(str(path)), split="train", **kept, **options)

    return cached_dataset(made_from, build)
