"""Keeps row embeddings on disk, computed once and then memory-mapped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from huggingface_hub.constants import HF_HOME
from torch import Tensor

from soft_trainer import distributed
from soft_trainer.data.array_cache import array_path, load_arrays, map_array, store_arrays
from soft_trainer.data.tokens import GraphColumn, TokenColumn
from soft_trainer.errors import UserError

DEFAULT_FOLDER = Path(HF_HOME) / "soft_trainer" / "rows"
REMEDY = "name another folder with --estimator_cache_dir, or keep nothing with --no_estimator_cache"


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
    path, writes = array_path(folder, key, "rows"), distributed.is_local_main()
    if not distributed.any_process(writes and load_arrays(folder, key) is None):
        return map_array(path)
    refusal = refusal_of(path.parent, rows * width * np.dtype(dtype).itemsize) if writes else None
    if distributed.any_process(refusal is not None):
        raise UserError(f"estimator cache {path.parent}: {refusal or 'refused on another process'}; {REMEDY}")
    values = build().cpu().numpy().astype(dtype)
    failed = distributed.any_process(writes and not store_arrays(folder, key, {"rows": values}))  # waits for the file
    return map_array(path) if not failed and path.exists() else values


def row_key(tokens: TokenColumn | GraphColumn, *settings) -> str:
    """Computes a name that changes with any token id and with any of `settings`."""
    digest = xxhash.xxh3_128(repr(settings).encode())
    tokens.add_to(digest)
    return digest.hexdigest()


def refusal_of(folder: Path, size: int = 0) -> str | None:
    """Says why `size` bytes cannot be kept in `folder`, None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    free = shutil.disk_usage(folder).free
    return f"needs {size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free" if free < size else None
