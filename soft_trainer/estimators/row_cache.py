"""Row embeddings on disk: computed once, memory-mapped ever after."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash
from huggingface_hub.constants import HF_HOME
from torch import Tensor, nn
from transformers.utils import logging

from soft_trainer import distributed
from soft_trainer.data.tokens import GraphColumn, TokenColumn
from soft_trainer.errors import UserError

logger = logging.get_logger(__name__)

DEFAULT_FOLDER = Path(HF_HOME) / "soft_trainer" / "rows"
REMEDY = "name another folder with --estimator_cache_dir, or keep nothing with --no_estimator_cache"


def cached_rows(
    folder: str | Path | None, key: str, rows: int, width: int, dtype: np.dtype, build: Callable[[], Tensor]
) -> np.ndarray:
    """The array of shape [rows, width] stored under `key`, or what `build` makes of it, stored for the next time.

    A file is written aside and renamed, so that a run killed here leaves no broken one; one that is damaged is built
    again, with a warning. Every process calls `build` or none; the main process writes.

    Args:
        folder: where to keep it; None keeps it in memory only.
        build: gives Tensor[rows, width], the same on every process.

    Raises:
        UserError: the folder cannot be written or has no room, found before anything is built.
    """
    if folder is None:
        return build().cpu().numpy().astype(dtype)
    path = Path(folder) / f"{key}.npy"
    if distributed.from_main(_problem(path) is None):
        return load_rows(path)
    refusal = distributed.from_main(_refusal(path.parent, rows * width * np.dtype(dtype).itemsize))
    if refusal:
        raise UserError(f"estimator cache {path.parent}: {refusal}; {REMEDY}")
    values = build().cpu().numpy().astype(dtype)
    stored = distributed.from_main(distributed.rank_and_world_size()[0] != 0 or _store(path, values))
    return load_rows(path) if stored and path.exists() else values


def load_rows(path: str | Path) -> np.ndarray:
    """The memory-mapped rows of a file of the cache."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


def row_key(tokens: TokenColumn | GraphColumn, model: nn.Module, *settings) -> str:
    """A name that changes with any token id, any weight of the model and any of `settings`."""
    digest = xxhash.xxh3_128()
    for row in range(len(tokens)):
        item = tokens[row]
        for part in item.values() if isinstance(item, dict) else (item,):
            digest.update(np.ascontiguousarray(part).data)
    digest.update(tokens.lengths.astype(np.int64).tobytes())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    digest.update(repr(settings).encode())
    return digest.hexdigest()


def _problem(path: Path) -> str | None:
    """Why the file cannot be used, None if it can; a damaged one is named in a warning."""
    if distributed.rank_and_world_size()[0] != 0:
        return None
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


def _refusal(folder: Path, size: int) -> str | None:
    """Why `size` bytes cannot be kept in `folder`, None if they can."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    free = shutil.disk_usage(folder).free
    return f"needs {size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free" if free < size else None


def _store(path: Path, values: np.ndarray) -> bool:
    """Write aside and rename; False, with a warning, where the disk fails: the run goes on with what is in memory."""
    aside = path.with_name(f".{path.stem}-{os.getpid()}.npy")
    try:
        np.save(aside, values, allow_pickle=False)
        checksum = json.dumps({"crc32": zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8))})
        sidecar = aside.with_suffix(".json")
        sidecar.write_text(checksum + "\n")
        sidecar.replace(path.with_suffix(".json"))
        aside.replace(path)
        return True
    except OSError as error:
        logger.warning(f"{path} could not be written ({error.strerror}): the next run computes it again")
        aside.unlink(missing_ok=True)
        return False
