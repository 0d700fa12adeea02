"""Caches arrays and data sets in memory-mapped files, each with a fingerprint of its inputs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import numpy as np
from datasets import Dataset, concatenate_datasets
from huggingface_hub.constants import HF_HOME

from soft_trainer.system.files import written_aside
from soft_trainer.system.fingerprints import fingerprint, keep_files, kept_files, rows_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

BAR_ROWS = 20_000
DEFAULT_FOLDER = Path(HF_HOME) / "soft_trainer" / "rows"


def cached_dataset(made_from: str, build: Callable[[Path], Dataset]) -> Dataset:
    """Returns the data set cached under a fingerprint, or builds and caches the data set.

    Args:
        made_from: the fingerprint of everything that determines the rows.
        build: returns the rows. The function may write them to its argument, a path. Rows that stay in memory are not
            cached.
    """
    record = Path(datasets.config.HF_DATASETS_CACHE) / "soft_trainer" / f"{made_from}.json"
    files = kept_files(record, made_from)
    if files is not None:
        return concatenate_datasets([Dataset.from_file(str(path)) for path in files])
    record.parent.mkdir(parents=True, exist_ok=True)
    rows = build(record.with_suffix(".arrow"))
    files = [Path(file["filename"]) for file in rows.cache_files]
    if files:
        keep_files(record, made_from, files)
    return rows


def flat(rows: Dataset) -> Dataset:
    """Copies rows that have an index mapping (from `select` or `shuffle`), which would slow down every read."""
    if rows._indices is None:
        return rows
    made_from = fingerprint(rows_fingerprint(rows), "flat")
    kept = {"new_fingerprint": made_from, "load_from_cache_file": False, "desc": "Flattening the indices"}
    tables = rows.with_format("arrow")  # no value is decoded
    with no_bar_for_few(rows):
        return cached_dataset(made_from, lambda _: tables.map(lambda table: table, batched=True, **kept)).with_format(
            None
        )


@contextlib.contextmanager
def no_bar_for_few(rows: Dataset) -> Iterator[None]:
    """Hides the progress bars of `datasets` for fewer than 20,000 rows, which take at most a few seconds."""
    hidden = len(rows) < BAR_ROWS and not datasets.are_progress_bars_disabled()
    if hidden:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hidden:
            datasets.enable_progress_bars()


def load_arrays(folder: str | Path | None, key: str) -> dict[str, np.ndarray] | None:
    """Returns the memory-mapped arrays stored under `key`, keyed by name, or None if they are missing or damaged."""
    files = None if folder is None else kept_files(Path(folder) / f"{key}.json", key)
    return files and {path.name.split(".")[1]: np.load(path, mmap_mode="r") for path in files}


def store_arrays(folder: str | Path, key: str, arrays: Mapping[str, np.ndarray]) -> bool:
    """Stores arrays under `key` for `load_arrays`. If the arrays cannot be written, warns and returns False."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, values in arrays.items():
            with written_aside(_path(folder, key, name)) as aside, open(aside, "wb") as file:
                np.save(file, np.ascontiguousarray(values))
        keep_files(Path(folder) / f"{key}.json", key, [_path(folder, key, name) for name in arrays])
        return True
    except OSError as error:
        reason = error.strerror or error  # NumPy's error for a full disk has no error number
        logger.warning(f"cannot write to {folder} ({reason}): the next run will compute these arrays again")
        return False


def _path(folder: str | Path, key: str, name: str) -> Path:
    return Path(folder) / f"{key}.{name}.npy"


def cached_rows(folder: str | Path | None, key: str, dtype: np.dtype, build: Callable[[], Tensor]) -> np.ndarray:
    """Returns the array stored under `key`, or calls `build` and stores the result.

    A damaged file is rebuilt, with a warning. Either all processes call `build` or none of them does. One process on
    each machine checks and writes the file, because machines may not share a disk.

    Args:
        folder: the cache folder. If None or not writable, the array stays in memory only.
        build: computes Tensor[rows, width]. The result must be the same on every process.
    """
    if folder is None:
        return build().cpu().numpy().astype(dtype)
    path = _path(folder, key, "rows")
    from soft_trainer.system import distributed  # imports torch, which would delay errors about rows by seconds

    writes = distributed.is_local_main()
    if distributed.any_process(writes and load_arrays(folder, key) is None):
        values = build().cpu().numpy().astype(dtype)
        failed = distributed.any_process(writes and not store_arrays(folder, key, {"rows": values}))  # and waits
        if failed or not path.exists():
            return values
    return np.load(path, mmap_mode="r")
