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
from soft_trainer.encoders.lora import CONFIG, WEIGHTS, import_peft, saved_adapter
from soft_trainer.encoders.repository import read_json
from soft_trainer.encoders.transformer import MISSING_WEIGHTS
from soft_trainer.errors import UserError, refuse
from soft_trainer.options.model import LoraOptions


def check_lora_options(options: LoraOptions, merge: bool, name: str | None, revision: str | None = None) -> None:
    """Refuses options of LoRA that cannot work, before a model is loaded.

    Args:
        options: of the command line.
        merge: `merge_lora`.
        name: the folder or Hub name of the encoder, None for one with random weights.

    Raises:
        UserError: the option, and what works.
    """
    saved, new = saved_adapter(name, revision) if name else None, options.lora_r is not None
    if new:
        import_peft()
    refuse(
        (new and name is None, "lora_r: an encoder from scratch has no weights worth freezing; leave it out"),
        (new and saved, f"lora_r: {name} is an adapter, which is trained on as it is; leave the options of LoRA out"),
        (merge and not (new or saved), "merge_lora: there is no adapter to merge; set --lora_r, 16 for example"),
    )


def check_adapter(model: PreTrainedModel, args) -> None:
    """Refuses a model with an adapter that could not be trained, saved or merged.

    Args:
        args: `TrainingArguments`; `merge_lora` is read if there is one.

    Raises:
        UserError: what is wrong, and what to do.
    """
    merge = getattr(args, "merge_lora", False)
    if not has_adapter(model):
        if merge:
            raise UserError("merge_lora: the encoder has no adapter to merge; add one with model.add_adapter")
        return
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    name = active_adapter(model)
    if not trained:
        raise UserError(
            "model: its adapter is frozen, as AutoModel loads it: load the base, then model.load_adapter(FOLDER, "
            "is_trainable=True), or make it trainable with requires_grad_"
        )
    check_apart_from_base(model, args.output_dir, "output_dir=")
    saved = adapter_state(model)
    own = (f".modules_to_save.{name}", f".{name}.weight", f".{name}")  # DoRA's magnitudes are saved without ".weight"
    unsaved = [
        parameter
        for parameter in trained
        if not any(part in parameter and parameter.replace(part, "") in saved for part in own)
        and parameter not in saved
    ]
    if unsaved:
        raise UserError(
            f"model: {unsaved[0]} is trained but is not part of the adapter, so it would not be saved: freeze it, or "
            "name its module in modules_to_save"
        )
    if merge and (args.fsdp or args.deepspeed):
        raise UserError("merge_lora: with FSDP or DeepSpeed the adapter is saved alone; merge it after the training")
    if merge:
        return
    missing = [weight for weight in getattr(model, MISSING_WEIGHTS, ()) if weight not in saved]
    if missing:
        raise UserError(
            f"model: its base has no {missing[0]}, so it starts at random, and an adapter does not save it: set "
            f"--merge_lora true{', or --pooling mean' if missing[0].startswith('pooler.') else ''}"
        )
    base = base_name(model)
    refuse(
        (
            not base,
            "model: its base has neither a folder nor a name on the Hub, so nothing could load the saved adapter: "
            "save and load the base first, or set merge_lora",
        ),
        (
            args.push_to_hub and base and Path(base).is_dir(),
            f"push_to_hub: the adapter needs its base, {base}, which nobody else has: set --merge_lora true, or push "
            "the base and train from its name",
        ),
    )


def adapter_warnings(model: PreTrainedModel, args) -> list[str]:
    """Returns lines about an adapter that works, but probably not as intended."""
    revision = model.peft_config[active_adapter(model)].revision if has_adapter(model) else None
    if not revision or getattr(args, "merge_lora", False):
        return []
    return [
        f"warning: the adapter belongs to revision {revision} of its base, but AutoModel and SentenceTransformer load "
        "the base's main branch: use load_encoder, or --merge_lora true"
    ]


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
    saved, sharded = (Path(checkpoint) / WEIGHTS).is_file(), any(Path(checkpoint).glob("pytorch_model_fsdp*"))
    adapted = has_adapter(model)
    refuse(
        (saved and not adapted, f"{checkpoint}: it holds an adapter; resume it with the same options of LoRA"),
        (
            adapted and not (saved or sharded),
            f"{checkpoint}: it holds no adapter; resume it without the options of LoRA",
        ),
    )
    config = Path(checkpoint) / CONFIG
    if adapted and config.is_file():
        _check_same_settings(model, read_json(config), checkpoint)


def _check_same_settings(model: PreTrainedModel, saved: dict, checkpoint: str) -> None:
    """Refuses settings that leave the shapes of the weights as they are; the weights themselves show the others."""
    config = model.peft_config[active_adapter(model)]
    if saved.get("r") != getattr(config, "r", None):
        return  # alpha follows r, and the message about the weights names both ranks
    for name in ("lora_alpha", "lora_dropout", "use_rslora"):
        value = getattr(config, name, None)
        if name in saved and saved[name] != value:
            raise UserError(
                f"{checkpoint}: its adapter has {name}={saved[name]}, not {value}; resume it with the same"
            )


def load_checkpoint_adapter(model: PreTrainedModel, checkpoint: str | Path) -> None:
    """Sets the adapter to that of a checkpoint.

    Raises:
        UserError: it does not fit.
    """
    set_adapter_state(model, load_file(Path(checkpoint) / WEIGHTS), checkpoint)
