"""Keeps arrays that are computed once and then memory-mapped, each with a checksum, and the embeddings of rows."""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from huggingface_hub.constants import HF_HOME
from torch import Tensor
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.errors import UserError
from soft_trainer.files import write_json, written_aside

logger = logging.get_logger(__name__)

DEFAULT_FOLDER = Path(HF_HOME) / "soft_trainer" / "rows"
REMEDY = "name another folder with --estimator_cache_dir, or keep nothing with --no_estimator_cache"


def load_arrays(folder: str | Path | None, key: str) -> dict[str, np.ndarray] | None:
    """Maps the arrays that are stored under `key`; None if they are missing or, with a warning, damaged."""
    if folder is None or not (record := Path(folder) / f"{key}.json").exists():
        return None
    try:
        arrays = {}
        for name, checksum in json.loads(record.read_text()).items():
            arrays[name] = np.load(_path(folder, key, name), mmap_mode="r")
            if _checksum(arrays[name]) != checksum:
                raise ValueError(f"the checksum of {name} is wrong")
        return arrays
    except (OSError, EOFError, ValueError) as error:
        logger.warning(f"{Path(folder) / key} is damaged ({error}) and is built again")
        return None


def store_arrays(folder: str | Path, key: str, arrays: Mapping[str, np.ndarray]) -> bool:
    """Stores arrays and then their checksums. Warns and returns False if the disk fails: the run goes on in memory."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, values in arrays.items():
            with written_aside(_path(folder, key, name)) as aside, open(aside, "wb") as file:
                np.save(file, np.ascontiguousarray(values))
        write_json(Path(folder) / f"{key}.json", {name: _checksum(values) for name, values in arrays.items()})
        return True
    except OSError as error:
        reason = error.strerror or error  # NumPy's own message for a full disk has no number
        logger.warning(f"cannot write to {folder} ({reason}): the next run computes it again")
        return False


def _path(folder: str | Path, key: str, name: str) -> Path:
    return Path(folder) / f"{key}.{name}.npy"


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def cached_rows(
    folder: str | Path | None, key: str, rows: int, width: int, dtype: np.dtype, build: Callable[[], Tensor]
) -> np.ndarray:
    """Returns the array of shape [rows, width] that is stored under `key`, or calls `build` and stores its result.

    A damaged file is rebuilt, with a warning. Either every process calls `build` or none does. One process of each
    machine reads and writes, because machines may not share a disk.

    Args:
        folder: the folder of the cache; None keeps the array in memory only.
        build: computes Tensor[rows, width], the same on every process.

    Raises:
        UserError: the folder cannot be written or has no room; this is checked before anything is built.
    """
    if folder is None:
        return build().cpu().numpy().astype(dtype)
    path = _path(folder, key, "rows")
    writes = distributed.is_local_main()
    if not distributed.any_process(writes and load_arrays(folder, key) is None):
        return np.load(path, mmap_mode="r")
    refusal = refusal_of(path.parent, rows * width * np.dtype(dtype).itemsize) if writes else None
    if distributed.any_process(refusal is not None):
        raise UserError(f"estimator cache {path.parent}: {refusal or 'refused on another process'}; {REMEDY}")
    values = build().cpu().numpy().astype(dtype)
    failed = distributed.any_process(writes and not store_arrays(folder, key, {"rows": values}))  # waits for the file
    return np.load(path, mmap_mode="r") if not failed and path.exists() else values


def refusal_of(folder: Path, size: int = 0) -> str | None:
    """Says why `size` bytes cannot be kept in `folder`, None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    free = shutil.disk_usage(folder).free
    return f"needs {size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free" if free < size else None
