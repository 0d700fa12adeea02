"""Loads, saves and merges peft adapters, such as LoRA, in a plain `PreTrainedModel`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from soft_trainer.errors import UserError, extra_needed
from soft_trainer.hub.files import lasting_name, reading, repository_file
from soft_trainer.system.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "base_model.model."  # peft puts it before the name of every weight in a file
MAGNITUDE = "lora_magnitude_vector"
ALL_LINEAR = "all-linear"


def import_peft():
    """Imports peft, an optional dependency. Raises UserError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(extra_needed("LoRA", "lora")) from error
    return peft


# ---- Saved adapters ----


def load_adapter(model: PreTrainedModel, name_or_path: str | Path, revision: str | None = None) -> None:
    """Loads the adapter at `name_or_path` into its base model, ready for training.

    Raises:
        UserError: peft or the adapter's weights are missing.
    """
    peft = import_peft()
    weights = repository_file(name_or_path, ADAPTER_WEIGHTS, revision)
    if weights is None:
        raise UserError(f"{name_or_path}: has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}")
    with reading(name_or_path, revision):
        config = peft.PeftConfig.from_pretrained(str(weights.parent))
        config.inference_mode = False
        model.add_adapter(config)
        set_adapter_state(model, load_file(weights), name_or_path)


def save_adapter(model: PreTrainedModel, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Writes the model's active adapter to a folder in peft's format.

    Args:
        state_dict: the weights of the whole model. By default, the model's current weights.
    """
    config = copy.deepcopy(model.peft_config[active_adapter(model)])
    config.inference_mode = True
    config.base_model_name_or_path = base_name(model)
    config.save_pretrained(str(folder))
    state = adapter_state(model, state_dict)
    # peft reads both names of DoRA's magnitudes, and transformers only the longer one.
    weights = {PREFIX + name.replace(MAGNITUDE, f"{MAGNITUDE}.weight"): tensor for name, tensor in state.items()}
    save_file(weights, Path(folder) / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def base_name(model: PreTrainedModel) -> str:
    """Returns the name of an adapter's base on the Hub, or the absolute path of its folder."""
    return lasting_name(model.config._name_or_path)


def check_apart_from_base(model: PreTrainedModel, folder: str | Path | None, option: str = "") -> None:
    """Raises UserError if saving to `folder` would delete the adapter's base. The message starts with `option`."""
    if folder and Path(folder).is_dir() and base_name(model) == str(Path(folder).resolve()):
        raise UserError(
            f"{option}{folder}: this folder holds the adapter's base model, and saving would delete it; write to "
            "another folder"
        )


# ---- Adapters in a model ----


def has_adapter(model) -> bool:
    """Returns True if the model contains an adapter."""
    return getattr(model, "_hf_peft_config_loaded", False)


def plain_encoder(model):
    """Returns the encoder inside a `PeftModel`. Any other model is returned unchanged.

    Raises:
        UserError: the adapter is not inside the encoder, as in prompt tuning.
    """
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        kind = model.active_peft_config.peft_type.value
        raise UserError(f"model: {kind} keeps its weights outside the encoder; use LoRA, with model.add_adapter")
    encoder = model.get_base_model()
    encoder._hf_peft_config_loaded = True
    encoder.peft_config = model.peft_config
    return encoder


def add_lora(model: PreTrainedModel, options, revision: str | None = None) -> None:
    """Adds a new LoRA adapter and freezes all other weights. The adapter records the model's `revision` on the Hub.

    Raises:
        UserError: peft is missing, the model already has an adapter, or a target module does not exist.
    """
    peft = import_peft()
    if has_adapter(model):
        raise UserError(
            "lora_r: the encoder already has an adapter, and training continues from it; omit the LoRA options"
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
    """Returns the names of the modules that get LoRA: `wanted` or, by default, peft's choice for the architecture.

    Raises:
        UserError: a module in `wanted` does not exist in the model, or the model has no linear layers.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL  # peft is optional

    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]

    def unknown(names: list[str]) -> list[str]:
        return [name for name in names if not any(f".{layer}".endswith(f".{name}") for layer in linear)]

    if not linear:
        raise UserError(f"lora_r: {type(model).__name__} has no linear layers to adapt; drop lora_r")
    if wanted is None:
        usual = USUAL.get(model.config.model_type, ALL_LINEAR)
        if isinstance(usual, list) and unknown(usual):
            return ALL_LINEAR
        return usual
    names = [name.strip() for name in wanted.split(",")]
    if names == [ALL_LINEAR]:
        return ALL_LINEAR
    if missing := unknown(names):
        there = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))[:12]
        raise UserError(
            f"lora_target_modules: {type(model).__name__} has no linear layer {missing[0]!r}; use some of "
            f"{', '.join(there)}, or all-linear"
        )
    return names


def active_adapter(model: PreTrainedModel) -> str:
    """Returns the name of the active adapter. Raises UserError if there are several."""
    names = model.active_adapters()
    if len(names) != 1:
        raise UserError(f"model: only one adapter can be trained; choose it with set_adapter, from {', '.join(names)}")
    return names[0]


def adapter_state(model: PreTrainedModel, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the active adapter's weights. The keys do not contain the adapter's name.

    Args:
        state_dict: see `save_adapter`.
    """
    from peft import get_peft_model_state_dict  # peft is optional

    # With "auto", peft would ask the Hub for the base's configuration at every save.
    state = get_peft_model_state_dict(model, state_dict, active_adapter(model), save_embedding_layers=False)
    return {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}


def set_adapter_state(model: PreTrainedModel, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Copies weights into the model's active adapter.

    Raises:
        UserError: the weights do not fit the model. The message starts with `source`.
    """
    from peft import set_peft_model_state_dict  # peft is optional

    weights = {
        name.removeprefix(PREFIX).replace(f"{MAGNITUDE}.weight", MAGNITUDE): tensor for name, tensor in weights.items()
    }
    if different := first_difference(weights, adapter_state(model)):
        raise UserError(f"{source}: the adapter does not fit the model ({different}); use the same LoRA options")
    set_peft_model_state_dict(model, weights, active_adapter(model))


def first_difference(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Describes the first weight with an unexpected shape, for example as "w is 2 x 8, not 4 x 8".

    Returns None if all shapes match.
    """
    for name in sorted(weights.keys() | expected.keys()):
        shapes = []
        for tensors in (weights, expected):
            shapes.append(" x ".join(map(str, tensors[name].shape)) if name in tensors else "missing")
        if shapes[0] != shapes[1]:
            return f"{name} is {shapes[0]}, not {shapes[1]}"
    return None


def merge_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """Merges the adapter into the model's weights, in place, and returns the plain, trainable model."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # peft is optional

    merged = ()  # prefixes of modules that are merged, together with the modules inside
    for name, module in list(model.named_modules()):
        if name.startswith(merged):
            continue
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif isinstance(module, BaseTunerLayer):
            module.merge()
            plain = module.get_base_layer()
        else:
            continue
        merged += (f"{name}.",)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain)
    model._hf_peft_config_loaded = False
    del model.peft_config
    return model.requires_grad_(True)
