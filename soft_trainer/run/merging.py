"""Merges the weights before and after training by interpolation.

Training on one kind of query improves an encoder on similar queries but can make it worse on others. Interpolation
keeps most of the gain and undoes most of the harm (`docs/training.md`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from soft_trainer.encoders.adapters import adapter_state, has_adapter, set_adapter_state
from soft_trainer.errors import UserError
from soft_trainer.system.files import ADAPTER_CONFIG, UNMERGED
from soft_trainer.system.terminal import print_on_main


def interpolate(before: Mapping[str, Tensor], after: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Computes (1 - ratio) x before + ratio x after for all floating-point weights, in float32 or higher.

    A ratio of 0 returns exactly the weights before, and a ratio of 1 those after training. Integer tensors and the
    dtype of each weight come from the latter.

    Args:
        before, after: weights keyed by name, with the same names and shapes.
        ratio: from 0 to 1.
    """
    merged = {}
    for name, tensor in after.items():
        merged[name] = tensor
        if tensor.is_floating_point():
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            merged[name] = torch.lerp(before[name].to(wide), wide, ratio).to(tensor.dtype)
    return merged


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
        model.load_state_dict(interpolate(before, model.state_dict(), ratio))
    print_on_main(f"Merged: {ratio:g} x the weights after training + {1 - ratio:g} x the weights before training.")
    if ratio == 0:
        print_on_main(f"warning: this is the encoder before training; the trained encoder is in {UNMERGED}")
    return {"ratio": ratio, "base": model.config._name_or_path or "the start", "models": [UNMERGED]}
