"""Merging: encoders between the weights before and after training, and the choice of the ratio.

Training on rows of one kind makes an encoder better on queries like them and may make it worse on others. The weighted
mean of the weights before and after keeps most of the gain and gives most of the loss back (`docs/merging.md`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
