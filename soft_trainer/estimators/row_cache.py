"""Row embeddings on disk: computed once, then memory-mapped."""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from huggingface_hub.constants import HF_HOME
from torch import Tensor
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.data.tokens import GraphColumn, TokenColumn
from soft_trainer.errors import UserError
from soft_trainer.files import write_json, written_aside

logger = logging.get_logger(__name__)

DEFAULT_FOLDER = Path(HF_HOME) / "soft_trainer" / "rows"
REMEDY = "name another folder with --estimator_cache_dir, or keep nothing with --no_estimator_cache"


def cached_rows(
    folder: str | Path | None, key: str, rows: int, width: int, dtype: np.dtype, build: Callable[[], Tensor]
) -> np.ndarray:
    """Returns the array of shape [rows, width] that is stored under `key`, or calls `build` and stores its result.

    A damaged file is built again, with a warning. Either every process calls `build` or none does. One process of
    each machine reads and writes, because machines may not share a disk.

    Args:
        folder: the folder of the cache; None keeps the array in memory only.
        build: computes Tensor[rows, width], the same on every process.

    Raises:
        UserError: the folder cannot be written or has no room; this is checked before anything is built.
    """
    if folder is None:
        return build().cpu().numpy().astype(dtype)
    path = Path(folder) / f"{key}.npy"
    writes = distributed.is_local_main()
    if not distributed.any_process(writes and _problem(path) is not None):
        return load_rows(path)
    refusal = refusal_of(path.parent, rows * width * np.dtype(dtype).itemsize) if writes else None
    if distributed.any_process(refusal is not None):
        raise UserError(f"estimator cache {path.parent}: {refusal or 'refused on another process'}; {REMEDY}")
    values = build().cpu().numpy().astype(dtype)
    failed = distributed.any_process(writes and not _store(path, values))  # also waits for the file
    return load_rows(path) if not failed and path.exists() else values


def load_rows(path: str | Path) -> np.ndarray:
    """The memory-mapped rows of a file of the cache."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def row_key(tokens: TokenColumn | GraphColumn, *settings) -> str:
    """Computes a name that changes with any token id and with any of `settings`."""
    digest = xxhash.xxh3_128(repr(settings).encode())
    tokens.add_to(digest)
    return digest.hexdigest()


def _problem(path: Path) -> str | None:
    """Says why the file cannot be used, None if it can. A warning names a damaged file."""
    if not path.exists():
        return "missing"
    try:
        recorded = json.loads(path.with_suffix(".json").read_text())
        values = load_rows(path)
        if zlib.crc32(values.reshape(-1).view(np.uint8)) == recorded["crc32"]:
            return None
        problem = "its checksum is wrong"
    except (OSError, EOFError, ValueError, KeyError) as error:
        problem = str(error)
    logger.warning(f"{path} is damaged ({problem}) and is built again")
    return problem


def refusal_of(folder: Path, size: int = 0) -> str | None:
    """Says why `size` bytes cannot be kept in `folder`, None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    free = shutil.disk_usage(folder).free
    return f"needs {size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free" if free < size else None


def _store(path: Path, values: np.ndarray) -> bool:
    """Stores the array and its checksum. If the disk fails, warns and returns False: the run goes on in memory."""
    checksum = zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    try:
        with written_aside(path) as aside:
            with open(aside, "wb") as file:
                np.save(file, values, allow_pickle=False)
            write_json(path.with_suffix(".json"), {"crc32": checksum})
        return True
    except OSError as error:
        logger.warning(f"cannot write {path} ({error.strerror}): the next run computes it again")
        return False
