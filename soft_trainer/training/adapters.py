"""Training of an adapter: checks before it, its record, and its weights in checkpoints."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedModel

from soft_trainer.encoders.adapters import (
    active_adapter,
    adapter_state,
    base_name,
    check_apart_from_base,
    has_adapter,
    set_adapter_state,
)
from soft_trainer.encoders.loading import MISSING_WEIGHTS
from soft_trainer.encoders.repository import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from soft_trainer.errors import refuse


def check_adapter(model: PreTrainedModel, args) -> None:
    """Refuses a model with an adapter that could not be trained, saved or merged.

    Args:
        args: `TrainingArguments`; `merge_lora` is read if there is one.

    Raises:
        UserError: what is wrong, and what to do.
    """
    merge = getattr(args, "merge_lora", False)
    if not has_adapter(model):
        refuse((merge, "merge_lora: the encoder has no adapter to merge; add one with model.add_adapter"))
        return
    check_apart_from_base(model, args.output_dir, "output_dir=")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    name, saved, base = active_adapter(model), adapter_state(model), base_name(model)
    own = ("", f".modules_to_save.{name}", f".{name}.weight", f".{name}")  # DoRA's magnitudes have no ".weight"
    unsaved = (each for each in trained if not any(part in each and each.replace(part, "") in saved for part in own))
    missing = (weight for weight in getattr(model, MISSING_WEIGHTS, ()) if weight not in saved)
    unsaved, missing = next(unsaved, None), next(missing, None)
    pooler = ", or --pooling mean" if missing and missing.startswith("pooler.") else ""
    refuse(
        (
            not trained,
            "model: its adapter is frozen, as AutoModel loads it: load the base, then model.load_adapter(FOLDER, "
            "is_trainable=True), or make it trainable with requires_grad_",
        ),
        (
            unsaved,
            f"model: {unsaved} is trained but is not part of the adapter, so it would not be saved: freeze it, or "
            "name its module in modules_to_save",
        ),
        (
            merge and (args.fsdp or args.deepspeed),
            "merge_lora: with FSDP or DeepSpeed the adapter is saved alone; merge it after the training",
        ),
        (
            missing and not merge,
            f"model: its base has no {missing}, so it starts at random, and an adapter does not save it: set "
            f"--merge_lora true{pooler}",
        ),
        (
            not base and not merge,
            "model: its base has neither a folder nor a name on the Hub, so nothing could load the saved adapter: "
            "save and load the base first, or set merge_lora",
        ),
        (
            args.push_to_hub and not merge and base and Path(base).is_dir(),
            f"push_to_hub: the adapter needs its base, {base}, which nobody else has: set --merge_lora true, or push "
            "the base and train from its name",
        ),
    )


def adapter_settings(model: PreTrainedModel) -> dict[str, object]:
    """Returns the settings of the model's adapter for tables and records; {} without one."""
    if not has_adapter(model):
        return {}
    config = model.peft_config[active_adapter(model)]
    targets = config.target_modules
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    names = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    settings = [f"{title} {getattr(config, name):g}" for name, title in names.items() if hasattr(config, name)]
    if not isinstance(targets, str):  # all-linear becomes the full names of all layers: too many for a table
        targets = ", ".join(sorted({name.rpartition(".")[2] for name in targets or ()}))
    return {"adapter": ", ".join([config.peft_type.value, *settings, targets]), "trained parameters": trained}


def check_checkpoint(model: PreTrainedModel, checkpoint: str | None) -> None:
    """Refuses to resume a full training with an adapter, the other way round, or an adapter with other settings.

    Raises:
        UserError: says what differs.
    """
    if checkpoint is None:
        return
    saved, sharded = (Path(checkpoint) / ADAPTER_WEIGHTS).is_file(), any(Path(checkpoint).glob("pytorch_model_fsdp*"))
    adapted, config = has_adapter(model), Path(checkpoint) / ADAPTER_CONFIG
    own = vars(model.peft_config[active_adapter(model)]) if adapted else {}
    known = read_json(config) if adapted and config.is_file() else {}
    # Other settings leave the shapes of the weights as they are. With another rank, alpha differs too, and the message
    # about the weights names both ranks.
    checked = ("lora_alpha", "lora_dropout", "use_rslora") if known.get("r") == own.get("r") else ()
    refuse(
        (saved and not adapted, f"{checkpoint}: it holds an adapter; resume it with the same options of LoRA"),
        (
            adapted and not (saved or sharded),
            f"{checkpoint}: it holds no adapter; resume it without the options of LoRA",
        ),
        *(
            (
                name in known and known[name] != own.get(name),
                f"{checkpoint}: its adapter has {name}={known.get(name)}, not {own.get(name)}; resume it with the "
                "same",
            )
            for name in checked
        ),
    )


def load_checkpoint_adapter(model: PreTrainedModel, checkpoint: str | Path) -> None:
    """Sets the adapter to that of a checkpoint.

    Raises:
        UserError: it does not fit.
    """
    set_adapter_state(model, load_file(Path(checkpoint) / ADAPTER_WEIGHTS), checkpoint)
