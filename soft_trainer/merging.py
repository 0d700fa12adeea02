"""Merging: encoders between the weights before and after training, and the choice of the ratio.

Training on rows of one kind makes an encoder better on queries like them and may make it worse on others. The weighted
mean of the weights before and after keeps most of the gain and gives most of the loss back (`docs/merging.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from soft_trainer.encoders.adapters import adapter_state, has_adapter, merge_adapter, set_adapter_state
from soft_trainer.encoders.loading import load_model, load_tokenizer
from soft_trainer.encoders.lora import CONFIG, saved_adapter
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.encoders.repository import published_name, read_json
from soft_trainer.encoders.transformer import MISSING_WEIGHTS, load_config
from soft_trainer.errors import UserError, refuse
from soft_trainer.files import RECORD, write_json
from soft_trainer.hub.export import export_encoder
from soft_trainer.hub.model_card import environment, write_model_card

RATIOS = (1.0, 0.75, 0.5, 0.25, 0.0)


def interpolate(base: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]], ratio: float) -> dict[str, Tensor]:
    """Computes (1 - ratio) x base + ratio x mean(models) for every floating-point weight, in float32 or higher.

    A ratio of 0 gives the base and a ratio of 1 a single model, bit by bit.

    Args:
        base, models: weights by name, with the same names and shapes. All other tensors, such as position numbers, and
            the number format of every weight come from the first model.
        ratio: from 0 to 1; 1 is the mean of the models.
    """
    first, merged = models[0], {}
    for name, tensor in first.items():
        if not tensor.is_floating_point():
            merged[name] = tensor
            continue
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        mean = sum(model[name].to(dtype) for model in models) / len(models)
        merged[name] = torch.lerp(base[name].to(mean), mean, ratio).to(tensor.dtype)
    return merged


@dataclass(frozen=True)
class RatioResult:
    """The figures of the encoder merged at one ratio.

    Args:
        valid: the metric that should be large.
        guards: the metrics that must not fall, by name.
    """

    ratio: float
    valid: float
    guards: Mapping[str, float] = field(default_factory=dict)


def choose_ratio(results: Sequence[RatioResult], tolerance: float = 0.005) -> float:
    """Returns the ratio with the largest valid metric among those whose guards stay near the encoder before training.

    Args:
        results: of all ratios that may be chosen; that of 0, the encoder before training, is among them.
        tolerance: how far a guard may fall below that of ratio 0. Of equal valid metrics the smaller ratio wins.
    """
    before = next(result for result in results if result.ratio == 0).guards
    # Sums of floats: a fall of exactly the tolerance is within it.
    lowest = {name: value - tolerance - 1e-12 for name, value in before.items()}
    allowed = [result for result in results if all(result.guards[name] >= lowest[name] for name in lowest)]
    return max(allowed, key=lambda result: (result.valid, -result.ratio)).ratio


# ---- Encoders in folders ----


def merge_encoders(
    base: str | Path,
    models: Sequence[str | Path],
    ratio: float,
    output_dir: str | Path,
    trust_remote_code: bool = False,
) -> Path:
    """Writes the encoder (1 - ratio) x base + ratio x mean(models), all floating-point weights.

    Everything else, such as tokenizer, pooling, lengths and prompts, is that of the first model. A single LoRA adapter
    on `base` stays an adapter, scaled by the ratio, which is the same encoder; several are averaged as whole encoders.

    Args:
        base: the encoder before training: a folder, or a name on the Hub.
        models: trained encoders, or one of them.
        ratio: from 0, the base, to 1, the mean of the models.
        output_dir: a folder that is missing or empty.
        trust_remote_code: run the code that comes with a model. Read it first.

    Returns:
        `output_dir` as a path. It loads like any encoder of ours.

    Raises:
        UserError: a ratio outside its range, a folder that holds something, encoders whose weights or tokenizers do
            not fit together, or an adapter on another base.
    """
    models, folder = [models] if isinstance(models, str | Path) else list(models), Path(output_dir)
    check_ratio(ratio)
    refuse(
        (not models, "merge: name one trained encoder or more"),
        (
            folder.exists() and (not folder.is_dir() or any(folder.iterdir())),
            f"output_dir={folder}: it holds something already; name a new folder",
        ),
    )
    profile = resolve_profile(models[0])
    tokenizer = load_tokenizer(models[0], profile, trust_remote_code=trust_remote_code)
    adapter = saved_adapter(models[0]) if len(models) == 1 else None
    if adapter is not None:
        if not _is_same(base, adapter.base):
            raise UserError(f"{models[0]}: its adapter belongs to {adapter.base}: name that as the base, not {base}")
        merged = load_model(models[0], profile, trust_remote_code=trust_remote_code)
        set_adapter_state(merged, scale_adapter(merged, ratio), models[0])
    else:
        merged = _merged_model(base, models, ratio, profile, tokenizer, trust_remote_code)
    export_encoder(merged, tokenizer, profile, folder)
    record = _record(base, models, ratio)
    write_model_card(folder, record)
    write_json(folder / RECORD, record)
    return folder


def check_ratio(ratio: float, name: str = "ratio") -> None:
    """Refuses a ratio outside its range.

    Raises:
        UserError: names the range.
    """
    if not (math.isfinite(ratio) and 0 <= ratio <= 1):
        raise UserError(f"{name}={ratio:g}: must be from 0 (the encoder before training) to 1 (after it)")


def scale_adapter(model: PreTrainedModel, ratio: float) -> dict[str, Tensor]:
    """Returns the weights of the active adapter times a ratio: LoRA adds B A to a weight, so B is scaled.

    Raises:
        UserError: an adapter that is more than such products, which a ratio cannot scale.
    """
    config = next(iter(model.peft_config.values()))
    plain = config.peft_type.value == "LORA" and not config.use_dora and config.bias == "none"
    if not plain or config.modules_to_save:
        raise UserError(f"{CONFIG}: only plain LoRA can be scaled; merge the adapter into its base first (merge_lora)")
    state = adapter_state(model)
    return {
        name: tensor * ratio if "lora_B" in name or "embedding_B" in name else tensor for name, tensor in state.items()
    }


def _merged_model(
    base: str | Path, models: Sequence, ratio: float, profile: EncoderProfile, tokenizer, trust_remote_code: bool
) -> PreTrainedModel:
    """Returns the first model with the merged weights, in the number format of its files."""
    first, states = None, []
    for name in (*models, base):
        model = load_model(name, profile, trust_remote_code=trust_remote_code)
        model = merge_adapter(model) if has_adapter(model) else model
        if first is None:
            first = model
        else:
            other = load_tokenizer(name, profile, trust_remote_code=trust_remote_code)
            _check_fits(models[0], first, tokenizer, name, model, other)
        if missing := getattr(model, MISSING_WEIGHTS, ()):
            raise UserError(f"{name}: its files have no weights for {missing[0]}, which would be random")
        states.append(model.state_dict())
    *trained, before = states
    first.load_state_dict(interpolate(before, trained, ratio))
    if saved_adapter(models[0]) is None:
        first.to(load_config(models[0], None, trust_remote_code).dtype or torch.float32)
    return first


def _check_fits(first_name, first: PreTrainedModel, tokenizer, name, model: PreTrainedModel, other) -> None:
    """Refuses an encoder whose weights mean something else than those of the first.

    Raises:
        UserError: names the difference.
    """
    if type(model) is not type(first):
        raise UserError(
            f"{name} is a {type(model).__name__}, {first_name} a {type(first).__name__}: they do not merge"
        )
    shapes = [{key: tensor.shape for key, tensor in each.state_dict().items()} for each in (first, model)]
    for key in sorted(shapes[0].keys() | shapes[1].keys()):
        sizes = [" x ".join(map(str, each[key])) if key in each else "missing" for each in shapes]
        if sizes[0] != sizes[1]:
            raise UserError(f"{name}: {key} is {sizes[1]}, but {sizes[0]} in {first_name}: they do not merge")
    own = tokenizer.get_vocab()
    token = next((token for token, number in other.get_vocab().items() if own.get(token) != number), None)
    if token is not None:
        raise UserError(f"{name}: its token {token!r} is another one in {first_name}: their tokenizers do not fit")


def _is_same(name: str | Path, other: str | Path) -> bool:
    """True if two names stand for one model."""
    return published_name(name) == published_name(other) or Path(name).resolve() == Path(other).resolve()


def _record(base: str | Path, models: Sequence[str | Path], ratio: float) -> dict:
    """Returns the record of the first model, if it has one, without results, and with what was merged."""
    path = Path(models[0], RECORD)
    known = read_json(path) if path.is_file() else {}
    empty = {"base_model": str(base), "dataset": None, "languages": [], "encoder": {}, "loss": {}, "training": {}}
    merging = {"ratio": ratio, "base": str(base), "models": [str(name) for name in models]}
    fresh = {"model_id": None, "revision": None, "results": {}, "environment": environment(), "merging": merging}
    return empty | {"estimator": {}, "statistics": {}, "weights": None} | known | fresh
