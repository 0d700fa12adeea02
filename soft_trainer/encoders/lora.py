"""The options of LoRA, and adapters in a folder or on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.encoders.repository import read_json, repository_file
from soft_trainer.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a folder or on the Hub.

    Args:
        folder: the local folder of its files.
        base, revision: the model that the adapter was trained on.
    """

    folder: Path
    base: str
    revision: str | None


def saved_adapter(name_or_path: str | Path, revision: str | None = None) -> SavedAdapter | None:
    """Returns the adapter at `name_or_path`, or None for a complete model.

    Raises:
        UserError: there is no such folder, repository or revision, or the adapter names no base or itself.
    """
    path = repository_file(name_or_path, CONFIG, revision, expected=False)
    if path is None or Path(name_or_path, "config.json").is_file():
        return None
    values = read_json(path)
    base, base_revision = values.get("base_model_name_or_path"), values.get("revision")
    if not base or not isinstance(base, str):
        raise UserError(f"{name_or_path}: {CONFIG} has no base_model_name_or_path; name the base there")
    if Path(base).resolve() == Path(name_or_path).resolve() and (Path(base).is_dir() or base_revision == revision):
        raise UserError(f"{name_or_path}: {CONFIG} names the adapter itself as its base; name the base there")
    return SavedAdapter(path.parent, base, base_revision)


def base_of(name_or_path: str | Path, revision: str | None = None) -> tuple[str | Path, str | None]:
    """Returns the name and revision of an adapter's base; for any other model, returns its own."""
    adapter = saved_adapter(name_or_path, revision)
    return (name_or_path, revision) if adapter is None else (adapter.base, adapter.revision)


@contextmanager
def reading_base(name_or_path: str | Path) -> Iterator[None]:
    """Adds to an error from reading a base that this is the base of an adapter.

    Args:
        name_or_path: the adapter.

    Raises:
        UserError: reading failed.
    """
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{name_or_path}: it is an adapter, and its base cannot be loaded: {error}; change "
            f"base_model_name_or_path in {CONFIG} to its new folder"
        ) from error


def import_peft():
    """Imports peft, which is an optional dependency.

    Raises:
        UserError: it is missing.
    """
    try:
        import peft
    except ImportError as error:
        raise UserError("LoRA needs the extra: pip install 'soft-trainer[lora]'") from error
    return peft
