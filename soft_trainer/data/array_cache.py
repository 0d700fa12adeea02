"""Stores arrays that are computed once and then memory-mapped, each with a checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from transformers.utils import logging

from soft_trainer.files import write_json, written_aside

logger = logging.get_logger(__name__)


def load_arrays(folder: str | Path | None, key: str, warn: bool = True) -> dict[str, np.ndarray] | None:
    """Maps the arrays that are stored under `key`; None if they are missing or damaged.

    Args:
        warn: whether to warn about damaged arrays.
    """
    if folder is None or not (record := Path(folder) / f"{key}.json").exists():
        return None
    try:
        arrays = {}
        for name, checksum in json.loads(record.read_text()).items():
            arrays[name] = map_array(array_path(folder, key, name))
            if _checksum(arrays[name]) != checksum:
                raise ValueError(f"the checksum of {name} is wrong")
        return arrays
    except (OSError, EOFError, ValueError) as error:
        if warn:
            logger.warning(f"{Path(folder) / key} is damaged ({error}) and is built again")
        return None


def store_arrays(folder: str | Path, key: str, arrays: Mapping[str, np.ndarray]) -> bool:
    """Stores arrays and then their checksums. Warns and returns False if the disk fails: the run goes on in memory."""
    checksums = {}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, values in arrays.items():
            with written_aside(array_path(folder, key, name)) as aside, open(aside, "wb") as file:
                np.save(file, np.ascontiguousarray(values), allow_pickle=False)
            checksums[name] = _checksum(values)
        write_json(Path(folder) / f"{key}.json", checksums)
        return True
    except OSError as error:
        logger.warning(f"cannot write to {folder} ({error.strerror}): the next run computes it again")
        return False


def array_path(folder: str | Path, key: str, name: str) -> Path:
    """Returns the file of one array."""
    return Path(folder) / f"{key}.{name}.npy"


def map_array(path: str | Path) -> np.ndarray:
    """Memory-maps the array in a file."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
