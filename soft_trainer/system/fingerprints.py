"""Computes fingerprints: hashes of the content of rows, encoders and files, whatever their name or location.

Caches, checkpoints, rank files and indexes store the fingerprint of what they were made from: rows, encoder,
tokenizer and settings. Before the contents are used, this fingerprint is compared with the current one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from soft_trainer.errors import UserError
from soft_trainer.system.files import (
    PROFILE_FILE,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    files_matching,
    read_json,
    uncompressed_name,
    write_json,
)
from soft_trainer.system.terminal import print_on_main

PACKAGES = ("soft_trainer", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "huggingface_hub")
AT_ONCE = 1 << 16  # rows to hash at a time
READ_BYTES = 1 << 22
ROW_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")  # the endings of files with rows
# Raise this number if a change of the code gives other mined or filtered rows, token ids, data flows, tokenizers,
# embeddings or neighbours for the same input. All caches are then made again.
CACHE_FORMAT = 3
HASH = re.compile("[0-9a-f]{32}")
UNREAD_PROFILE = {"name", "matryoshka_dims", "teacher", "teacher_identity"}  # fields that training does not read
# Fields of a profile, a configuration and an adapter that do not affect embeddings.
_UNREAD_IN_EMBEDDINGS = UNREAD_PROFILE | {"score_scale", "query_columns", "code_columns"}
_UNREAD_CONFIG = {"_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache"}
_ENCODER_FILES = (*WEIGHT_FILES, *TOKENIZER_FILES, PROFILE_FILE, "modules.json", "[0-9]_*/*")
_ENCODER_FILES += ("sentence_bert_config.json", "config_sentence_transformers.json", "pytorch_model*.bin")
_NAME_CODE = ("config.json", "tokenizer_config.json", "modules.json")  # as module.Class
_UNREAD_ADAPTER = {"base_model_name_or_path", "inference_mode", "revision", "task_type", "peft_version"}


def fingerprint(*parts) -> str:
    """Hashes plain values, bytes, arrays and sparse matrices, or lists and mappings of these, to 32 hex digits."""
    digest = xxhash.xxh3_128()
    _add(digest, parts)
    return digest.hexdigest()


def _add(digest, value) -> None:
    """Adds a value's type, length and content to a running hash, so that different values add different bytes."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        _add(digest, ["objects", value.shape, value.tolist()])
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape} ".encode())
        for start in range(0, len(value), AT_ONCE):
            digest.update(value[start : start + AT_ONCE].tobytes())
    elif hasattr(value, "indptr"):
        _add(digest, ["sparse", value.shape, value.indptr, value.indices, value.data])
    elif isinstance(value, Mapping):
        _add(digest, ["mapping", *sorted(value.items())])
    elif isinstance(value, bytes):
        digest.update(f"bytes {len(value)} ".encode())
        digest.update(value)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    elif value is None or isinstance(value, bool | int | float | str):
        _add(digest, [type(value).__name__.encode(), repr(value).encode(errors="surrogatepass")])
    else:
        raise TypeError(f"{type(value).__name__} has no fingerprint")


def plain_settings(settings):
    """Converts settings to values that JSON can represent. Tuples become lists, and other objects become strings."""

    def plain(value):
        # A set's order varies by process.
        return sorted(value, key=repr) if isinstance(value, set | frozenset) else str(value)

    return json.loads(json.dumps(settings, default=plain))


def environment() -> dict[str, str]:
    """Returns the versions of Python and of installed packages that may affect results."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


# ---- Rows ----


def rows_fingerprint(rows, columns: Sequence[str] | None = None) -> str:
    """Hashes the values in all columns of a `datasets.Dataset`, or only in `columns`."""
    import pyarrow as pa  # slow to import, and a search has no rows

    digest = xxhash.xxh3_128()
    chosen = sorted({*(rows.column_names if columns is None else columns)})
    _add(digest, [len(rows), *chosen])
    for table in rows.select_columns(chosen).with_format("arrow").iter(AT_ONCE):
        for name in chosen:
            values = table[name].combine_chunks()
            _add(digest, [str(values.type), values.is_null().to_numpy(zero_copy_only=False)])
            # Arrow serialises equal values to equal bytes, even if they are slices of different tables.
            digest.update(pa.record_batch([values.drop_null()], [name]).serialize())
    return digest.hexdigest()


# ---- Tokenizers and encoders ----


def tokenizer_fingerprint(tokenizer) -> str:
    """Hashes a tokenizer. The hash changes if any text would be tokenised or truncated differently."""
    settings = {name: getattr(tokenizer, name, None) for name in ("truncation_side", "split_special_tokens")}
    settings |= tokenizer.special_tokens_map
    if tokenizer.is_fast:
        # The tokenizer keeps the truncation and padding of its last call; the copy has neither.
        backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        return fingerprint(settings, backend.to_str())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    source = inspect.getsourcefile(type(tokenizer))
    return fingerprint(settings, Path(source).read_bytes(), files)


def encoder_fingerprint(model, tokenizer, profile) -> str:
    """Hashes an encoder: its weights, configuration, tokenizer and profile.

    The score scale and the column names are excluded, because embeddings do not depend on them.
    """
    adapters = getattr(model, "peft_config", {})
    fields = _without(dataclasses.asdict(profile), _UNREAD_IN_EMBEDDINGS)
    settings = {
        "profile": fields,
        "adapters": {name: adapter_configuration(config) for name, config in adapters.items()},
        "active": model.active_adapters() if adapters else [],
    }
    weights = model_fingerprint(model, model.state_dict())
    return fingerprint(weights, tokenizer_fingerprint(tokenizer), plain_settings(settings))


def model_fingerprint(model, weights: Mapping) -> str:
    """Hashes a model's configuration and the weights that the caller passes. This takes about 0.1 s per GB."""
    import torch  # loaded already, because there is a model

    digest = xxhash.xxh3_128()
    for name, tensor in sorted(weights.items()):
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        _add(digest, [name, str(tensor.dtype), tuple(tensor.shape), values.numpy()])
    settings = [
        f"{type(model).__module__}.{type(model).__qualname__}",
        [name for name, module in model.named_modules() if getattr(module, "is_causal", False)],
        _without(model.config.to_dict(), _UNREAD_CONFIG),
    ]
    _add(digest, plain_settings(settings))
    return digest.hexdigest()


def adapter_configuration(config) -> dict:
    """Returns the settings of a `PeftConfig` that affect the encoder, as JSON values."""
    return plain_settings(_without(config.to_dict(), _UNREAD_ADAPTER))


def _without(settings: dict, unread: set[str]) -> dict:
    return {key: value for key, value in settings.items() if key not in unread}


# ---- Files ----


def file_fingerprint(path: str | os.PathLike) -> str:
    """Hashes a file's bytes. This takes about 0.1 s per GB if the file is in the system's cache.

    Raises:
        OSError: the file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def folder_fingerprint(folder: str | os.PathLike) -> str:
    """Hashes the names and contents of all files below a folder. Hidden files and hidden folders are skipped."""
    root = Path(folder)
    files = {}
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            files[name.as_posix()] = file_fingerprint(path)
    return fingerprint(files)


def source_fingerprint(source: str | os.PathLike) -> str:
    """Hashes a data source: a file of rows, or all files with rows in a folder.

    In a folder, these are the files in the folder itself, in BEIR's `qrels` and in the subfolders of a saved
    `DatasetDict`. Other files, such as logs and the output of runs, are skipped.
    """
    root = Path(source)
    if root.is_file():
        return file_fingerprint(root)
    folders = [root, root / "qrels"]
    if (root / "dataset_dict.json").is_file():
        folders += [path for path in root.iterdir() if path.is_dir()]
    files = {}
    for folder in folders:
        for path in folder.glob("[!.]*"):
            if path.is_file() and Path(uncompressed_name(path.name)).suffix.lower() in ROW_FORMATS:
                files[path.relative_to(root).as_posix()] = file_fingerprint(path)
    return fingerprint(files)


def encoder_files_fingerprint(folder: str | os.PathLike) -> str | None:
    """Hashes the encoder files in a folder, without loading the encoder. Returns None if there is no encoder."""
    files = encoder_file_hashes(folder)
    return fingerprint(files) if files else None


def encoder_file_hashes(folder: str | os.PathLike) -> dict[str, str]:
    """Hashes each encoder file in a folder. Returns a dict from path, relative to the folder, to hash.

    Logs and results that a run wrote to the folder are skipped.
    """
    root = Path(folder)
    names = files_matching(root, _ENCODER_FILES)
    settings = "".join((root / name).read_text(errors="replace") for name in names if Path(name).name in _NAME_CODE)
    code = files_matching(root, ("*.py",))
    if any(name.removesuffix("py") in settings for name in code):  # otherwise the scripts are not the model's code
        names += code
    return {name: file_fingerprint(root / name) for name in names}


def model_code(folder: Path) -> set[str]:
    """Returns the modules in a model's folder that its configuration names, and those that they import, as paths."""
    from transformers.dynamic_module_utils import get_relative_import_files  # slow, and a search does not need it

    names = set()
    for path in files_matching(folder, ("config.json", "tokenizer_config.json")):
        for module in re.findall(r'"(\w+)\.\w+"', json.dumps(read_json(folder / path).get("auto_map"))):
            code = folder / f"{module}.py"
            if code.is_file():
                modules = code, *map(Path, get_relative_import_files(code))
                names.update(each.relative_to(folder).as_posix() for each in modules)
    return names


def kept_files(record: Path, made_from: str) -> list[Path] | None:
    """Returns the cached files that a record lists, or None if they must be rebuilt.

    They must be rebuilt if the fingerprint differs, or if a file is missing or damaged.

    Args:
        record: the JSON file that `keep_files` wrote.
        made_from: the fingerprint of everything that the files depend on.
    """
    with suppress(UserError, OSError, KeyError, AttributeError):
        stored = read_json(record)
        if (stored["made_from"], stored["format"]) != (made_from, CACHE_FORMAT):
            return None
        files = {record.parent / name: known for name, known in stored["files"].items()}
        if all(file_fingerprint(path) == known for path, known in files.items()):
            return list(files)
    if record.exists():
        print_on_main(f"warning: {record}: the cached files are damaged and will be rebuilt")
    return None


def keep_files(record: Path, made_from: str, files: Sequence[Path]) -> None:
    """Writes the record that `kept_files` reads: a fingerprint and the hashes of the files, which must exist already.

    Raises:
        OSError: a file cannot be read or the record cannot be written.
    """
    names = {os.path.relpath(path, record.parent): file_fingerprint(path) for path in files}
    write_json(record, {"made_from": made_from, "format": CACHE_FORMAT, "files": names})
