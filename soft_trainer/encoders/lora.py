"""The options of LoRA, and adapters in a folder or on the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from soft_trainer.encoders.repository import read_json, repository_file
from soft_trainer.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names


@dataclass
class LoraOptions:
    """The options of a new LoRA adapter; without `lora_r` there is none.

    Raises:
        UserError: a value outside its range, or an option without `lora_r`.
    """

    lora_r: int | None = field(
        default=None,
        metadata={
            "help": "Train a LoRA adapter of this rank, 16 for example, instead of all weights. It wants a larger "
            "learning rate, about 1e-4."
        },
    )
    lora_alpha: int | None = field(default=None, metadata={"help": "LoRA's factor alpha / r. Default: 2 x lora_r."})
    lora_dropout: float | None = field(default=None, metadata={"help": "Dropout before LoRA. Default: 0.05."})
    lora_target_modules: str | None = field(
        default=None,
        metadata={
            "help": "Modules that get LoRA: names by comma, or all-linear. Default: the usual ones of the "
            "architecture, as peft knows them, else all-linear."
        },
    )

    def __post_init__(self):
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            if self.lora_r is None and getattr(self, name) is not None:
                raise UserError(f"{name}: has no meaning without --lora_r, 16 for example")
        for name in ("lora_r", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: must be 1 or more")
        modules = self.lora_target_modules
        if modules is not None and not all(name.strip() for name in modules.split(",")):
            raise UserError(f"lora_target_modules={modules}: a name is empty")
        if self.lora_dropout is not None and not 0 <= self.lora_dropout < 1:
            raise UserError(f"lora_dropout={self.lora_dropout}: must be from 0 to below 1")


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter in a folder or on the Hub.

    Args:
        folder: the local folder of its files.
        base, revision: the model that it was trained on.
    """

    folder: Path
    base: str
    revision: str | None


def saved_adapter(name_or_path: str | Path, revision: str | None = None) -> SavedAdapter | None:
    """Returns the adapter at `name_or_path`, or None for a model with all its weights.

    Raises:
        UserError: there is no such folder, repository or revision, or the adapter does not name its base or names
            itself.
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
    """Returns name and revision of an adapter's base; those of any other model as they are."""
    adapter = saved_adapter(name_or_path, revision)
    return (name_or_path, revision) if adapter is None else (adapter.base, adapter.revision)


@contextmanager
def reading_base(name_or_path: str | Path) -> Iterator[None]:
    """Says of an error from reading a base that it is the base of an adapter.

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
