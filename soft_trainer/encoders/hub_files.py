"""Reads the files of a model or an adapter from a local folder or a repository on the Hub."""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import _CACHED_NO_EXIST, constants, errors, hf_hub_download, try_to_load_from_cache
from safetensors import SafetensorError

from soft_trainer.errors import UserError, name_option
from soft_trainer.files import ADAPTER_CONFIG, read_json

logger = logging.getLogger(__name__)


def published_name(name_or_path: str | Path) -> str:
    """Returns `OWNER/NAME` for a snapshot in the Hub's cache (`.../models--OWNER--NAME/snapshots/HASH`).

    Any other folder or name is returned unchanged, except for a trailing slash.
    """
    if not name_or_path:
        return ""
    name = Path(name_or_path).as_posix()
    snapshot = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$", name)
    if snapshot:
        return snapshot[1].replace("--", "/")
    return name


def lasting_name(name_or_path: str | Path) -> str:
    """Returns the Hub name of an encoder, or its folder as an absolute path, which is valid from any folder."""
    name = published_name(name_or_path)
    if name and Path(name).is_dir():
        return str(Path(name).resolve())
    return name


def split_revision(name: str) -> tuple[str, str | None]:
    """Splits `NAME@REVISION` into name and revision. A folder has no revision, although its path may contain `@`."""
    if Path(name).is_dir():
        return name, None
    base, _, revision = name.partition("@")
    return base, revision or None


def repository_file(
    name_or_path: str | Path, file: str, revision: str | None = None, expected: bool = True
) -> Path | None:
    """Returns the local path of a file in a folder or repository, or None if there is no such file.

    Args:
        expected: warn if the Hub cannot be reached and the file is not in the cache.

    Raises:
        UserError: the folder, repository or revision does not exist.
    """
    if Path(name_or_path).is_dir():
        path = Path(name_or_path, file)
        if path.is_file():
            return path
        return None
    with reading(name_or_path, revision):
        try:
            return Path(hf_hub_download(str(name_or_path), file, revision=revision))
        except errors.LocalEntryNotFoundError:
            cached = try_to_load_from_cache(str(name_or_path), file, revision=revision)
            if expected and cached is not _CACHED_NO_EXIST:
                reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "The Hub cannot be reached"
                logger.warning("%s: assuming that %s has no %s.", reason, name_or_path, file)
        except errors.EntryNotFoundError:
            pass
    return None


# ---- Adapters ----


def saved_adapter(name_or_path: str | Path, revision: str | None = None) -> tuple[str, str | None] | None:
    """Returns an adapter's base and the base's revision, or None if the folder or repository has a whole model.

    Raises:
        UserError: the adapter does not name its base.
    """
    path = repository_file(name_or_path, ADAPTER_CONFIG, revision, expected=False)
    if path is None or Path(name_or_path, "config.json").is_file():
        return None
    values = read_json(path)
    base = values.get("base_model_name_or_path")
    base_revision = values.get("revision")
    if not base or not isinstance(base, str):
        raise UserError(f"{name_or_path}: {ADAPTER_CONFIG} has no base_model_name_or_path; name the base there")
    if Path(base).resolve() == Path(name_or_path).resolve() and (Path(base).is_dir() or base_revision == revision):
        raise UserError(f"{name_or_path}: {ADAPTER_CONFIG} names the adapter itself as its base; name the base there")
    return base, base_revision


def base_of(name_or_path: str | Path, revision: str | None = None) -> tuple[str | Path, str | None]:
    """Returns the name and revision of an adapter's base, or those of the model itself if it is not an adapter."""
    return saved_adapter(name_or_path, revision) or (name_or_path, revision)


# ---- Errors ----


@contextmanager
def reading(name_or_path: str | Path, revision: str | None = None) -> Iterator[None]:
    """Turns an error while reading a folder or repository into a one-line UserError."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError, SafetensorError) as error:
        raise UserError(f"{name_or_path}: {_problem(error, Path(name_or_path), revision)}") from error


@contextmanager
def reading_base(name_or_path: str | Path) -> Iterator[None]:
    """Adds to a UserError that the model is the base of the adapter `name_or_path`."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{name_or_path}: the base of this adapter cannot be loaded: {error}; change "
            f"base_model_name_or_path in {ADAPTER_CONFIG} to its new folder"
        ) from error


def _problem(error: Exception, folder: Path, revision: str | None) -> str:
    """Returns a line that says what is wrong and what to do."""
    causes = (error, error.__cause__)
    if any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
        return f"no revision {revision!r} on the Hub"
    if any(isinstance(cause, (errors.RepositoryNotFoundError, errors.HFValidationError)) for cause in causes):
        return (
            "neither a folder here nor a repository on the Hub that may be read; check the name, "
            "and for a private or gated one set HF_TOKEN"
        )
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return "no config.json in it, so it is not the folder of a model; check the name"
    if isinstance(error, KeyError):
        return f"{error} in its files is unknown to this release"
    if isinstance(error, TypeError | AttributeError):
        return f"a value in its JSON files has the wrong type ({error})"
    if "`attn_implementation=" in str(error):
        return "its model has no such attn_implementation; use eager, sdpa or flash_attention_2"
    if "trust_remote_code" in str(error):
        return (
            "its code comes with the model and runs only if you say so: read it, then set "
            f"{name_option('trust_remote_code', True)}"
        )
    if "backend tokenizer" in str(error):
        return no_tokenizer(folder)
    if "safetensors" in str(error):
        return "no safetensors weights; load it once with transformers and save_pretrained it"
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def no_tokenizer(folder: str | Path) -> str:
    """Returns a line that says that a model has no tokenizer, and how to add one."""
    return (
        "no tokenizer in it (tokenizer.json); save its base model's tokenizer there: "
        f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(folder)!r})"
    )
