"""Chooses the GPU of a process by an environment variable, which must be set before torch is imported."""

from __future__ import annotations

import os


def one_gpu() -> dict[str, str]:
    """Returns the variable that hides all GPUs but one, because the trainers would use all of them."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
