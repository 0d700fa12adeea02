"""The only file that knows of process groups. With one process everything here is the identity."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_world_size() -> tuple[int, int]:
    """This process's number and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if _many() else (0, 1)


def device() -> torch.device:
    """The device of this process."""
    from accelerate import PartialState

    return PartialState().device


def use_the_cores() -> None:
    """Share the cores of a machine without a GPU among its processes; `accelerate launch` leaves each one thread."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and device().type == "cpu" and torch.get_num_threads() == 1:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max((os.cpu_count() or 1) // processes, 1))


def barrier() -> None:
    """Wait until every process is here."""
    if _many():
        dist.barrier()


def close() -> None:
    """End the process group: without it a process sometimes aborts at exit."""
    if dist.is_available() and dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def shard(length: int, rank: int, processes: int) -> slice:
    """The contiguous part of `length` items that a process takes; sizes differ by at most one."""
    size, more = divmod(length, processes)
    start = rank * size + min(rank, more)
    return slice(start, start + size + (rank < more))


def gather_with_gradient(local: Tensor, sizes: Sequence[int]) -> Tensor:
    """Join Tensor[B_r, d] of every process, in the order of the processes: Tensor[sum(sizes), d].

    The backward pass sums the gradient of every process's copy, so a loss that each process averages over its own B_r
    queries, scaled by `processes x B_r / N`, gives under an averaging all-reduce the gradient of one process on the
    global batch.
    """
    return _Gather.apply(local, tuple(sizes)) if _many() else local


def gather(local: Tensor) -> Tensor:
    """Join Tensor[n_r, ...] of every process along the first dimension, without gradient; n_r may differ."""
    if not _many():
        return local
    sizes = [torch.zeros(1, dtype=torch.long, device=local.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(local)], device=local.device))
    return _joined(local.detach(), [int(size) for size in sizes])


def from_main(value):
    """The main process's (picklable, small) value on every process."""
    if not _many():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_process(flag: bool) -> bool:
    """Whether `flag` is true on any process."""
    if not _many():
        return flag
    found = torch.tensor([float(flag)], device=device())
    dist.all_reduce(found)
    return bool(found.item())


def gather_numbers(number: int) -> list[int]:
    """The number that each process has, in the order of the processes."""
    return gather(torch.tensor([number], device=device())).tolist() if _many() else [number]


def largest(numbers: Sequence[int]) -> list[int]:
    """The largest of each of `numbers` over all processes."""
    if not _many():
        return list(numbers)
    values = torch.tensor(numbers, device=device())
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.tolist()


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _joined(local: Tensor, sizes: Sequence[int]) -> Tensor:
    """All-gather of parts of unequal length: padded to the longest, since gloo and NCCL want equal shapes."""
    padded = local.new_zeros((max(sizes), *local.shape[1:]))
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.sizes = sizes
        return _joined(local.contiguous(), sizes)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        start = sum(ctx.sizes[: dist.get_rank()])
        return gradient[start : start + ctx.sizes[dist.get_rank()]], None
