"""Merges the weights from before and after training, at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from soft_trainer.encoders.adapters import has_adapter, set_adapter_state
from soft_trainer.errors import UserError
from soft_trainer.hub.push import UNMERGED
from soft_trainer.merging import interpolate, scale_adapter
from soft_trainer.terminal import print_on_main


def weights_to_merge(model: PreTrainedModel) -> dict[str, Tensor]:
    """Copies the current weights, to merge with after training. If there is an adapter, only its weights are copied.

    Raises:
        UserError: the adapter cannot be scaled, or it has already been trained.
    """
    state = model.state_dict()
    if has_adapter(model):
        state = scale_adapter(model, 1.0)  # raises an error if the adapter cannot be scaled
        if any(tensor.any() for name, tensor in state.items() if "lora_B" in name):
            raise UserError("merge_ratio: the adapter is trained already, and only a new one can be scaled to nothing")
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


@torch.no_grad()
def merge(model: PreTrainedModel, before: Mapping[str, Tensor], ratio: float) -> dict:
    """Interpolates between the weights in `before` and the model's weights, in place. An adapter is scaled instead.

    Returns:
        The record of the merge.
    """
    if has_adapter(model):
        set_adapter_state(model, scale_adapter(model, ratio), "merge_ratio")
    else:
        model.load_state_dict(interpolate(before, [model.state_dict()], ratio))
    print_on_main(f"Merged: {ratio:g} x the weights after training + {1 - ratio:g} x those before it.")
    if ratio == 0:
        print_on_main(f"warning: this is the encoder before training; {UNMERGED} has the trained one")
    return {"ratio": ratio, "base": model.config._name_or_path or "the start", "models": [UNMERGED]}
