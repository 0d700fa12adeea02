"""LoRA adapters of peft: small trainable matrices next to frozen weights, inside a plain `PreTrainedModel`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from soft_trainer.encoders.lora import CONFIG, WEIGHTS, import_peft
from soft_trainer.encoders.repository import published_name, reading, repository_file
from soft_trainer.errors import UserError

PREFIX = "base_model.model."  # peft's, before the name of every weight in a file
ALL_LINEAR = "all-linear"
SHOWN_NAMES = 12  # modules that a message lists


# ---- Saved adapters ----


def load_adapter(model: PreTrainedModel, name_or_path: str | Path, revision: str | None = None) -> None:
    """Adds the adapter at `name_or_path` to its base, ready for further training.

    Raises:
        UserError: peft is missing, or the adapter has no safetensors weights.
    """
    peft = import_peft()
    weights = repository_file(name_or_path, WEIGHTS, revision)
    if weights is None:
        raise UserError(f"{name_or_path}: it has {CONFIG} but no {WEIGHTS}")
    with reading(name_or_path, revision):
        config = peft.PeftConfig.from_pretrained(str(weights.parent))
        config.inference_mode = False
        model.add_adapter(config)
        set_adapter_state(model, load_file(weights), name_or_path)


def save_adapter(model: PreTrainedModel, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Writes the active adapter as peft does: `adapter_config.json` and `adapter_model.safetensors`.

    Args:
        state_dict: the weights of the whole model, if they are not the model's own.
    """
    config = copy.deepcopy(model.peft_config[active_adapter(model)])
    config.inference_mode = True
    config.base_model_name_or_path = base_name(model)
    config.save_pretrained(str(folder))
    weights = {PREFIX + name: tensor for name, tensor in adapter_state(model, state_dict).items()}
    save_file(weights, Path(folder) / WEIGHTS, metadata={"format": "pt"})


def base_name(model: PreTrainedModel) -> str:
    """Returns the name of an adapter's base: its name on the Hub, or an absolute path, valid from any folder."""
    name = published_name(model.config._name_or_path)
    return str(Path(name).resolve()) if name and Path(name).is_dir() else name


def check_apart_from_base(model: PreTrainedModel, folder: str | Path | None, option: str = "") -> None:
    """Refuses to save an adapter into its base's folder; `option` names the folder in the message.

    Raises:
        UserError: saving would delete or change the base.
    """
    base = base_name(model)
    if folder and base and Path(base).is_dir() and Path(base) == Path(folder).resolve():
        raise UserError(
            f"{option}{folder}: it is the folder of the adapter's base, which saving would delete: write to another "
            "folder"
        )


# ---- Adapters in a model ----


def has_adapter(model) -> bool:
    """True if the model has an adapter inside."""
    return getattr(model, "_hf_peft_config_loaded", False)


def plain_encoder(model):
    """Unwraps the `PreTrainedModel` with its adapter from a `PeftModel`; returns any other model unchanged.

    Raises:
        UserError: the adapter is not inside the model, as in prompt tuning.
    """
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        kind = model.active_peft_config.peft_type.value
        raise UserError(f"model: {kind} keeps its weights outside the encoder; use LoRA, with model.add_adapter")
    encoder = model.get_base_model()
    encoder._hf_peft_config_loaded, encoder.peft_config = True, model.peft_config
    return encoder


def add_lora(model: PreTrainedModel, options, revision: str | None = None) -> None:
    """Adds a new LoRA adapter to a model and freezes all other weights.

    Args:
        revision: the model's revision on the Hub, recorded in the adapter.

    Raises:
        UserError: peft is missing, the model already has an adapter, or it lacks a target module.
    """
    peft = import_peft()
    if has_adapter(model):
        raise UserError(
            "lora_r: the encoder has an adapter already, which is trained on as it is; leave the options of LoRA out"
        )
    config = peft.LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha or 2 * options.lora_r,
        lora_dropout=0.05 if options.lora_dropout is None else options.lora_dropout,
        target_modules=target_modules(model, options.lora_target_modules),
        task_type="FEATURE_EXTRACTION",
        revision=revision,
    )
    model.add_adapter(config)


def target_modules(model: PreTrainedModel, wanted: str | None = None) -> list[str] | str:
    """Returns the modules that get LoRA: those named in `wanted`, or the usual ones of the architecture.

    Raises:
        UserError: no linear layer has one of the names.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL  # peft is optional

    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    if wanted is None:
        usual = USUAL.get(model.config.model_type, ALL_LINEAR)
        return usual if isinstance(usual, str) or all(_matches(name, linear) for name in usual) else ALL_LINEAR
    names = [name.strip() for name in wanted.split(",")]
    if names == [ALL_LINEAR]:
        return ALL_LINEAR
    missing = [name for name in names if not _matches(name, linear)]
    if missing:
        there = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))[:SHOWN_NAMES]
        raise UserError(
            f"lora_target_modules: {type(model).__name__} has no linear layer {missing[0]!r}; it has "
            f"{', '.join(there)}; or use all-linear"
        )
    return names


def _matches(target: str, names: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def active_adapter(model: PreTrainedModel) -> str:
    """Returns the name of the one active adapter.

    Raises:
        UserError: several adapters are active.
    """
    names = model.active_adapters()
    if len(names) != 1:
        raise UserError(f"model: one adapter can be trained, not {', '.join(names)}; choose it with set_adapter")
    return names[0]


def adapter_state(model: PreTrainedModel, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the active adapter's weights, by their names without the adapter's name.

    Args:
        state_dict: the weights of the whole model, if they are not the model's own.
    """
    from peft import get_peft_model_state_dict  # peft is optional

    # "auto" would ask the Hub for the base's configuration at every save.
    state = get_peft_model_state_dict(model, state_dict, active_adapter(model), save_embedding_layers=False)
    return {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}


def set_adapter_state(model: PreTrainedModel, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Sets the active adapter's weights to those of a file.

    Raises:
        UserError: they do not fit the model; the message names `source`.
    """
    from peft import set_peft_model_state_dict  # peft is optional

    weights = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    own = {name: tensor.shape for name, tensor in adapter_state(model).items()}
    different = [name for name in sorted(own.keys() | shapes.keys()) if own.get(name) != shapes.get(name)]
    if different:
        name = different[0]
        raise UserError(
            f"{source}: its adapter does not fit the model: {name} is {_shape(shapes.get(name))} there and "
            f"{_shape(own.get(name))} here; use the same options of LoRA"
        )
    set_peft_model_state_dict(model, weights, active_adapter(model))


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def merge_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Merges the adapter into the weights, in place, and returns the model, now plain and trainable."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # peft is optional
    from peft.utils import ModulesToSaveWrapper

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            plain = module.get_base_layer()
        elif isinstance(module, ModulesToSaveWrapper):
            plain = module.modules_to_save[module.active_adapter]
        else:
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain)
    model._hf_peft_config_loaded = False
    del model.peft_config
    return model.requires_grad_(True)
