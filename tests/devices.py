"""Stand-ins for devices that the machine of a test need not have."""

import contextlib

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

TO_HOST = (Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__float__, Tensor.__bool__, Tensor.__int__)


class OnGpu(Tensor):
    """A tensor that claims to be on a GPU, but computes on the CPU."""

    kind = "cuda"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function == Tensor.device.__get__:
            return torch.device(cls.kind)
        if function in TO_HOST:
            with torch._C.DisableTorchFunctionSubclass():
                return function(args[0].as_subclass(Tensor), *args[1:], **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


class OnApple(OnGpu):
    """A tensor that claims to be on Apple's GPU, which has no float64."""

    kind = "mps"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        kinds = {getattr(value, "dtype", None) for value in tree_leaves(result)}
        if torch.float64 in kinds and function not in TO_HOST:
            raise TypeError(f"{function.__name__}: Apple's GPUs have no float64")
        return result


def on_gpu(tensor: Tensor) -> OnGpu:
    """Returns a tensor that says that it is on a GPU."""
    return tensor.as_subclass(OnGpu)


def on_apple(tensor: Tensor) -> OnApple:
    """Returns a tensor that says that it is on Apple's GPU."""
    return tensor.as_subclass(OnApple)


class AppleModule:
    """Stands in for `torch.mps`, whose functions take no device, with the CPU's random numbers."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def get_rng_state(self):
        return self.generator.get_state()

    def set_rng_state(self, state):
        self.generator.set_state(state)


def without_autocast(monkeypatch) -> None:
    """Lets code with `torch.autocast` run on the device "meta", which has no autocast."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
