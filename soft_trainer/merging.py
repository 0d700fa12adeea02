"""Merges encoders by interpolating between the weights before and after training.

Training on one kind of query improves an encoder on similar queries but can make it worse on others. Interpolation
keeps most of the gain and undoes most of the harm (`docs/training.md`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from soft_trainer.encoders.adapters import (
    adapter_state,
    first_difference,
    has_adapter,
    merge_adapter,
    set_adapter_state,
)
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_config, load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.files import (
    ADAPTER_CONFIG,
    DEPENDS_ON,
    RECORD,
    RECORD_FORMAT,
    UNMERGED,
    read_json,
    write_json,
)
from soft_trainer.fingerprints import environment
from soft_trainer.hub_files import public_name, published_name, saved_adapter
from soft_trainer.model_card import license_of, write_model_card
from soft_trainer.terminal import print_on_main


def interpolate(base: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]], ratio: float) -> dict[str, Tensor]:
    """Computes (1 - ratio) x base + ratio x mean(models) for all floating-point weights, in float32 or higher.

    A ratio of 0 returns exactly the base. A ratio of 1 with a single model returns exactly that model. Integer tensors
    and the dtype of each weight come from the first model.

    Args:
        base, models: weights keyed by name, with the same names and shapes.
        ratio: from 0 (the base) to 1 (the mean of the models).
    """
    first = models[0]
    merged = {}
    for name, tensor in first.items():
        if not tensor.is_floating_point():
            merged[name] = tensor
            continue
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        mean = sum(model[name].to(dtype) for model in models) / len(models)
        merged[name] = torch.lerp(base[name].to(mean), mean, ratio).to(tensor.dtype)
    return merged


# ---- Encoders in folders ----


def merge_encoders(
    base: str | Path,
    models: Sequence[str | Path],
    ratio: float,
    output_dir: str | Path,
    trust_remote_code: bool = False,
) -> Path:
    """Writes an encoder whose weights are (1 - ratio) x base + ratio x mean(models).

    Everything else, such as the tokenizer, pooling, lengths and prompts, comes from the first model. A single LoRA
    adapter on `base` stays an adapter, because scaling it by the ratio gives the same encoder. Several adapters are
    first merged into their base, and then the whole encoders are averaged.

    Args:
        base: the encoder before training, as a folder or a name on the Hub.
        models: one trained encoder, or several.
        ratio: from 0 (the base) to 1 (the mean of the models).
        output_dir: the folder to write to, which must be new or empty.
        trust_remote_code: whether to run code that comes with a model. Read that code first.

    Returns:
        The path of `output_dir`.

    Raises:
        UserError: the ratio is out of range, the folder is not empty, the encoders' weights or tokenizers are not
            compatible, or an adapter has a different base.
    """
    models = [models] if isinstance(models, str | Path) else list(models)
    folder = Path(output_dir)
    ratio = float(ratio)  # JSON cannot represent a scalar of NumPy or torch
    if not 0 <= ratio <= 1:
        raise UserError(f"ratio={ratio:g}: must be between 0 (before training) and 1 (the trained encoder)")
    if not models:
        raise UserError("merge: pass at least one trained encoder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir={folder}: already exists and is not empty; choose a new folder")
    record = _record(base, models, ratio)
    profile = resolve_profile(models[0])
    for name in (base, *models[1:]):
        weights = resolve_profile(name).token_weights
        if weights != profile.token_weights:
            raise UserError(
                f"{name}: token_weights={weights}, but {models[0]} has token_weights={profile.token_weights}; merge "
                "encoders that were trained with the same"
            )
    tokenizer = load_tokenizer(models[0], profile, trust_remote_code=trust_remote_code)
    adapter = saved_adapter(models[0])
    if adapter is None or len(models) > 1:
        merged = _merged_model(base, models, ratio, profile, trust_remote_code)
        if adapter is None:  # keeps the dtype of the first model's files
            merged.to(load_config(models[0], None, trust_remote_code).dtype or torch.float32)
    else:
        own, _ = adapter
        if published_name(base) != published_name(own) and Path(base).resolve() != Path(own).resolve():
            raise UserError(f"{models[0]}: the adapter belongs to {own}; pass {own} as the base, not {base}")
        merged = load_model(models[0], profile, trust_remote_code=trust_remote_code)
        set_adapter_state(merged, scale_adapter(merged, ratio), models[0])
    export_encoder(merged, tokenizer, profile, folder)
    write_model_card(folder, record)
    write_json(folder / RECORD, record)
    return folder


def scale_adapter(model: PreTrainedModel, ratio: float) -> dict[str, Tensor]:
    """Returns the adapter's weights, scaled by a ratio. LoRA adds the product B A, so only B is multiplied.

    Raises:
        UserError: the adapter is not plain LoRA.
    """
    state = adapter_state(model)
    if not all(re.search(r"\b(lora|lora_embedding)_[AB]\b", name) for name in state):
        raise UserError(f"{ADAPTER_CONFIG}: only plain LoRA can be scaled; merge the adapter first (merge_lora)")
    return {
        name: tensor * ratio if re.search("(lora|embedding)_B", name) else tensor for name, tensor in state.items()
    }


def _merged_model(
    base: str | Path, models: Sequence, ratio: float, profile: EncoderProfile, trust_remote_code: bool
) -> PreTrainedModel:
    """Loads the base and the models, and returns the first model with the merged weights.

    Raises:
        UserError: the models are incompatible.
    """
    names = [*models, base]
    loaded = []
    for name in names:
        model = load_model(name, profile, trust_remote_code=trust_remote_code)
        if has_adapter(model):
            model = merge_adapter(model)
        loaded.append((model, load_tokenizer(name, profile, trust_remote_code=trust_remote_code).get_vocab()))
        difference = _difference(loaded[-1], loaded[0])
        if difference:
            raise UserError(f"{name} cannot be merged with {names[0]}: {difference}")
    *trained, before = (model.state_dict() for model, _ in loaded)
    merged = loaded[0][0]
    merged.load_state_dict(interpolate(before, trained, ratio))
    return merged


def _difference(one: tuple[PreTrainedModel, dict], other: tuple[PreTrainedModel, dict]) -> str | None:
    """Returns why two models' weights or vocabularies are incompatible, or None if they can be merged."""
    model, vocabulary = one
    first, expected = other
    if type(model) is not type(first):
        return f"it is a {type(model).__name__}, not a {type(first).__name__}"
    if different := first_difference(model.state_dict(), first.state_dict()):
        return different
    token = next((token for token, number in vocabulary.items() if expected.get(token) != number), None)
    return None if token is None else f"its tokenizer numbers {token!r} differently"


def _record(base: str | Path, models: Sequence[str | Path], ratio: float) -> dict:
    """Returns the record of a merge: the first model's record, if any, with the merged models added and no results."""
    known = {}
    path = Path(models[0], RECORD)
    if path.is_file() and read_json(path).get("format") == RECORD_FORMAT:  # older records may have local paths
        known = read_json(path)
    sections = ("encoder", "loss", "training", "estimator", "statistics")
    empty = {"base_model": public_name(base), "license": license_of(base), "dataset": None, "languages": []}
    empty["weights"] = None
    fresh = {"format": RECORD_FORMAT, "model_id": None, "results": {}, "environment": environment()}
    fresh["merging"] = {"ratio": ratio, "base": public_name(base), "models": [public_name(name) for name in models]}
    known.pop(DEPENDS_ON, None)  # the merged encoder depends on more than that one run
    return empty | {section: {} for section in sections} | known | fresh


# ---- At the end of a training run ----


def weights_to_merge(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies the model's weights, or only its adapter's weights, before training, so that they can be merged later.

    Raises:
        UserError: the adapter cannot be scaled, or it has already been trained.
    """
    state = model.state_dict()
    if has_adapter(model):
        state = scale_adapter(model, 1.0)  # raises an error if the adapter cannot be scaled
        if any(tensor.any() for name, tensor in state.items() if "lora_B" in name):
            raise UserError(
                "merge_ratio: the adapter was trained before this run, and only a new adapter can be merged by ratio"
            )
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


@torch.no_grad()
def merge(model: PreTrainedModel, before: Mapping[str, Tensor], ratio: float) -> dict:
    """Interpolates between the weights in `before` and the model's weights, in place. Scales an adapter instead.

    Returns:
        The ratio, the base and the unmerged encoder's folder, for the run's record.
    """
    if has_adapter(model):
        set_adapter_state(model, scale_adapter(model, ratio), "merge_ratio")
    else:
        model.load_state_dict(interpolate(before, [model.state_dict()], ratio))
    print_on_main(f"Merged: {ratio:g} x the weights after training + {1 - ratio:g} x the weights before training.")
    if ratio == 0:
        print_on_main(f"warning: this is the encoder before training; the trained encoder is in {UNMERGED}")
    return {"ratio": ratio, "base": model.config._name_or_path or "the start", "models": [UNMERGED]}
