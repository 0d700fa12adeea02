"""Loads the model behind an encoder: chooses the class by the configuration, and loads the weights."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from soft_trainer.encoders.positions import check_lengths
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError

MISSING_WEIGHTS = "_missing_weights"  # attribute of a loaded model: the weights that its files lack


def load_config(name_or_path: str | Path, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """Loads the configuration of a model."""
    # Without a choice, transformers would ask on the terminal.
    return AutoConfig.from_pretrained(
        name_or_path, revision=revision or "main", trust_remote_code=bool(trust_remote_code)
    )


def load_transformer(
    name_or_path: str | Path,
    profile: EncoderProfile,
    revision: str | None,
    trust_remote_code: bool,
    attn_implementation: str | None,
    dtype: str | None,
) -> PreTrainedModel:
    """Loads the weights from safetensors; for a T5, only those of the encoder.

    Args:
        dtype: one of `DTYPES`. None means float32, or higher where the weights are saved in higher precision.

    Raises:
        UserError: a profile whose lengths are above the model's positions.
    """
    config = load_config(name_or_path, revision, trust_remote_code)
    check_lengths(config.to_dict(), profile)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of every layer, which only generation needs
    highest = torch.promote_types(config.dtype or torch.float32, torch.float32)
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    has_class = type(config) in MODEL_MAPPING
    model_class = MODEL_MAPPING[type(config)] if has_class else _remote_class(config, name_or_path, revision)
    with _without_report_on_spare_weights():
        model, report = _auto_class(config).from_pretrained(
            name_or_path,
            config=config,
            revision=revision or "main",
            dtype=highest if dtype is None else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=bool(trust_remote_code),
            output_loading_info=True,
            **options,
            **pooling_layer(model_class, profile),
        )
    setattr(model, MISSING_WEIGHTS, tuple(sorted(report["missing_keys"])))
    return model


@contextlib.contextmanager
def _without_report_on_spare_weights() -> Iterator[None]:
    """Suppresses transformers' table of weights that an encoder does not need, such as a pooler or an output layer."""

    def shown(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "LOAD REPORT" not in message or any(word in message for word in ("MISSING", "MISMATCH", "CONVERSION"))

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(shown)
    try:
        yield
    finally:
        logger.removeFilter(shown)


def _auto_class(config: PretrainedConfig) -> type:
    """Returns `AutoModel`; for models whose decoder it would load too, the class that loads only the encoder."""
    kind = type(config)
    encoder_alone = kind in MODEL_FOR_TEXT_ENCODING_MAPPING and kind in MODEL_MAPPING
    if encoder_alone and MODEL_FOR_TEXT_ENCODING_MAPPING[kind] is not MODEL_MAPPING[kind]:
        return AutoModelForTextEncoding
    return AutoModel


def _remote_class(config: PretrainedConfig, name_or_path: str | Path, revision: str | None) -> type:
    """Returns the class of a model that ships its code, which is trusted since its configuration has been loaded."""
    reference = getattr(config, "auto_map", {}).get("AutoModel")
    if reference is None:
        raise UserError(f"{name_or_path}: its code has no class for AutoModel, so it is not an encoder")
    return get_class_from_dynamic_module(reference, str(name_or_path), revision=revision or "main")


def pooling_layer(model_class: type[PreTrainedModel], profile: EncoderProfile) -> dict[str, bool]:
    """Returns the arguments that load `model_class` with a pooler only if `profile` pools with it.

    An unused pooler has no gradient, which distributed training refuses. Some models have no pooler to leave out.
    """
    name = "add_pooling_layer"
    return {name: profile.pooling == "pooler"} if name in inspect.signature(model_class).parameters else {}


# ---- Models that do not fit their profile ----


def check_model(model: PreTrainedModel, profile: EncoderProfile) -> None:
    """Refuses a model that cannot be read with `profile`.

    Raises:
        UserError: the texts are too long, there is no pooler, the model also has a decoder, or its attention cannot
            take data flow.
    """
    config, kind = model.config, type(model)
    check_lengths(config.to_dict(), profile)
    if kind is MODEL_MAPPING.get(type(config), None) and _auto_class(config) is AutoModelForTextEncoding:
        encoder = MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)].__name__
        raise UserError(f"model: {kind.__name__} also has a decoder; pass {encoder} instead")
    if profile.pooling == "pooler" and getattr(model, "pooler", None) is None:
        raise UserError(f"pooling=pooler: {kind.__name__} has no pooler; use cls, mean or last_token")
    if profile.data_flow_length and "flash" in str(getattr(config, "_attn_implementation", "")):
        raise UserError(
            f"attn_implementation={config._attn_implementation}: takes no mask for data flow; use sdpa or eager"
        )


def profile_warnings(model: torch.nn.Module, profile: EncoderProfile) -> list[str]:
    """Returns warnings about settings that work with the model but probably not as intended."""
    warnings = []
    if profile.pooling == "cls" and is_causal(model):
        warnings.append(
            f"warning: pooling=cls: {type(model).__name__} is a decoder, whose first token sees no other, so all "
            "texts with the same first token have the same embedding; use --pooling last_token"
        )
    if not profile.include_prompt:
        if profile.pooling == "last_token":
            warnings.append("warning: include_prompt=False has no effect: pooling=last_token reads no prompt's token")
        elif not (profile.query_prefix or profile.code_prefix):
            warnings.append("warning: include_prompt=False has no effect without --query_prompt or --code_prompt")
    return warnings


def is_causal(model: torch.nn.Module) -> bool:
    """True for a decoder, whose tokens see only those before them."""
    return any(getattr(module, "is_causal", False) for module in model.modules())
