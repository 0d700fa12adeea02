"""Reads a model's or an adapter's files from a local folder or a repository on the Hub."""

from __future__ import annotations

import logging
import os
import re
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path, PureWindowsPath

from huggingface_hub import (
    _CACHED_NO_EXIST,
    constants,
    errors,
    get_session,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from soft_trainer.errors import UserError
from soft_trainer.system.files import ADAPTER_CONFIG, read_json, unfinished
from soft_trainer.system.packaged import BASE, EXPANDED, located
from soft_trainer.system.terminal import nearest

CONFIG = "config.json"
HUB_SECONDS = 5.0  # the time limit for a first response of the Hub
ASKED_AGAIN = 60.0  # seconds after which a Hub that did not respond is tried again

logger = logging.getLogger(__name__)
_why_offline: ContextVar[str] = ContextVar("why_offline", default="")


def published_name(name_or_path: str | Path) -> str:
    """Returns `OWNER/NAME` for a snapshot in the Hub's cache (`.../models--OWNER--NAME/snapshots/HASH`).

    Returns `base` for the packaged encoder's folder. Any other folder or name is returned unchanged, except for a
    trailing slash.
    """
    if not name_or_path:
        return ""
    if Path(name_or_path).parent == EXPANDED:
        return BASE
    name = Path(name_or_path).as_posix()
    snapshot = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$", name)
    return snapshot[1].replace("--", "/") if snapshot else name


def public_name(name_or_path: str | Path, on_hub: bool = True) -> str:
    """Shortens a local path to its last part, so that records reveal no paths. Hub names are returned unchanged.

    Call this in the run's working folder. In any other folder, a relative path looks like a name on the Hub.

    Args:
        on_hub: False if the name cannot be a name on the Hub.
    """
    value = str(name_or_path)
    name = published_name(value)
    if on_hub and (name != value.rstrip("/") or not os.path.exists(value)):
        with suppress(errors.HFValidationError):
            validate_repo_id(name.partition("@")[0])
            return name
    if not re.search(r"[/\\~]", value):
        return value
    # A Windows path has both kinds of separators.
    return PureWindowsPath(os.path.abspath(os.path.expanduser(value))).name or "local"


def lasting_name(name_or_path: str | Path) -> str:
    """Returns an encoder's Hub name, or the absolute path of its folder, which is valid from any working folder."""
    name = published_name(name_or_path)
    if name and name != BASE and Path(name).is_dir():
        return str(Path(name).resolve())
    return name


def split_revision(name: str) -> tuple[str, str | None]:
    """Splits `NAME@REVISION` into name and revision. A folder has no revision, even if its path contains `@`."""
    if Path(name).is_dir():
        return name, None
    base, _, revision = name.partition("@")
    return base, revision or None


def repository_file(
    name_or_path: str | Path, file: str, revision: str | None = None, expected: bool = True
) -> Path | None:
    """Returns the local path of a file in a folder or repository, or None if the file does not exist.

    Args:
        expected: whether to warn if the Hub cannot be reached and the file is not in the cache.

    Raises:
        UserError: the folder, repository or revision does not exist, or the Hub cannot be reached and the model is not
            in the cache.
    """
    name_or_path = located(name_or_path)
    if Path(name_or_path).is_dir():
        path = Path(name_or_path, file)
        return path if path.is_file() else None
    name = str(name_or_path)
    with reading(name_or_path, revision):
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except errors.LocalEntryNotFoundError as error:
            cached = [try_to_load_from_cache(name, known, revision=revision) for known in (CONFIG, ADAPTER_CONFIG)]
            if not any(isinstance(path, str) for path in cached):
                raise UserError(not_cached(name)) from error
            if expected and try_to_load_from_cache(name, file, revision=revision) is not _CACHED_NO_EXIST:
                logger.warning("%s: assuming that %s has no %s.", _offline(), name, file)
        except errors.EntryNotFoundError:
            pass
    return None


# ---- The Hub or only its cache ----


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Makes a `with` block read only from the cache, as with HF_HUB_OFFLINE=1, if the Hub does not respond.

    Without this, the client would request every file six times, which takes 23 seconds.
    """
    why = ""
    if not constants.HF_HUB_OFFLINE:
        why = _no_answer(constants.ENDPOINT, time.monotonic() // ASKED_AGAIN)
    if not why:
        yield
        return
    reset = _why_offline.set(why)
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False
        _why_offline.reset(reset)


@lru_cache(maxsize=1)
def _no_answer(endpoint: str, period: float) -> str:
    """Requests the Hub's start page, once per `period`. Returns the error as text, or "" if the Hub responds."""
    try:
        get_session().head(endpoint, timeout=HUB_SECONDS)
    except Exception as error:  # the client's errors have another base class in each of its releases
        return f"{endpoint} cannot be reached ({error})"
    return ""


def _offline() -> str:
    """Returns why only the cache is used, such as "HF_HUB_OFFLINE is set"."""
    if constants.HF_HUB_OFFLINE:
        return _why_offline.get() or "HF_HUB_OFFLINE is set"
    return "the Hub cannot be reached"


def not_cached(name: str) -> str:
    """Returns the error message, with a remedy, for a Hub name that cannot be loaded offline."""
    near = nearest(name, [BASE]) or "."
    return (
        f"{name}: no such folder{near} It is not in the cache, and {_offline()}. Use a folder (model=FOLDER, "
        "teacher=FOLDER, data_dir=FOLDER), or download it on a machine that can reach the Hub and set HF_HUB_OFFLINE=1"
    )


# ---- Adapters ----


def saved_adapter(name_or_path: str | Path, revision: str | None = None) -> tuple[str, str | None] | None:
    """Returns an adapter's base and the base's revision, or None if the folder or repository has a whole model.

    Raises:
        UserError: the adapter's configuration has no base, or lists the adapter as its own base.
    """
    name_or_path = located(name_or_path)
    path = repository_file(name_or_path, ADAPTER_CONFIG, revision, expected=False)
    if path is None or Path(name_or_path, "config.json").is_file():
        return None
    values = read_json(path)
    base = values.get("base_model_name_or_path")
    base_revision = values.get("revision")
    if not base or not isinstance(base, str):
        raise UserError(f"{name_or_path}: {ADAPTER_CONFIG} has no base_model_name_or_path; set it to the base model")
    if Path(base).resolve() == Path(name_or_path).resolve() and (Path(base).is_dir() or base_revision == revision):
        raise UserError(
            f"{name_or_path}: {ADAPTER_CONFIG} lists the adapter as its own base; set base_model_name_or_path to the "
            "base model"
        )
    return base, base_revision


def base_of(name_or_path: str | Path, revision: str | None = None) -> tuple[str | Path, str | None]:
    """Returns the name and revision of an adapter's base, or of a model that is not an adapter."""
    return saved_adapter(name_or_path, revision) or (name_or_path, revision)


# ---- Errors ----


@contextmanager
def reading(name_or_path: str | Path, revision: str | None = None) -> Iterator[None]:
    """Turns an error from reading a folder or repository into a one-line UserError."""
    with nullcontext() if Path(located(name_or_path)).is_dir() else hub_or_cache():
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, TypeError, AttributeError, KeyError, ImportError, SafetensorError) as error:
            raise UserError(f"{name_or_path}: {_problem(error, Path(name_or_path), revision)}") from error


@contextmanager
def reading_base(name_or_path: str | Path) -> Iterator[None]:
    """Adds a remedy and the adapter's name, `name_or_path`, to a UserError about the adapter's base."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{name_or_path}: the base of this adapter cannot be loaded: {error}. If the base has moved, change "
            f"base_model_name_or_path in {ADAPTER_CONFIG}"
        ) from error


def _problem(error: Exception, folder: Path, revision: str | None) -> str:
    """Describes in one line why a model's files cannot be read, with a remedy."""
    causes = (error, error.__cause__)
    if any(isinstance(cause, errors.LocalEntryNotFoundError) for cause in causes):
        return f"{_offline()}, and files are missing from the cache; download it on a machine that can reach the Hub"
    if any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
        return f"no revision {revision!r} on the Hub"
    if any(isinstance(cause, (errors.RepositoryNotFoundError, errors.HFValidationError)) for cause in causes):
        return (
            "neither a folder here nor a repository on the Hub that you may read; check the name, and set HF_TOKEN "
            "for a private or gated repository"
        )
    unreadable = [path for path in folder.glob("*") if path.is_file() and not os.access(path, os.R_OK)]
    if unreadable:
        return f"{unreadable[0].name} cannot be read by this user; its owner can allow it with chmod"
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return unfinished(folder) or "no config.json in it, so it is not a model's folder; check the name"
    if isinstance(error, KeyError):
        return f"the installed transformers or peft does not support {error}, which the model's files contain"
    if isinstance(error, TypeError | AttributeError):
        return f"a value in the model's JSON files has the wrong type ({error})"
    if "`attn_implementation=" in str(error):
        return "the model does not support this attn_implementation; use eager, sdpa or flash_attention_2"
    if "trust_remote_code" in str(error):
        return "the model needs code from its repository; read that code, then set trust_remote_code=True"
    if "backend tokenizer" in str(error):
        return no_tokenizer(folder)
    if "safetensors" in str(error):
        return "no safetensors weights; load the model with transformers, then save it with save_pretrained"
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def no_tokenizer(folder: str | Path) -> str:
    """Returns the error message, with a remedy, for a model without a tokenizer."""
    return (
        "no tokenizer (tokenizer.json); save the base model's tokenizer to this folder: "
        f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(folder)!r})"
    )
