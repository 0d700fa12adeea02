"""Exchanges data between the processes of a distributed run. With one process, the functions return their input."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_world_size() -> tuple[int, int]:
    """Returns this process's rank and the number of processes, or (0, 1) if there is no process group."""
    if _is_distributed():
        return (dist.get_rank(), dist.get_world_size())
    return (0, 1)


def is_local_main() -> bool:
    """Returns True on exactly one process of each machine, the one with local rank 0."""
    return not _is_distributed() or int(os.environ.get("LOCAL_RANK", 0)) == 0


def device() -> torch.device:
    """Returns the device that this process computes on, such as `cuda:1`."""
    from accelerate import PartialState  # slow to import

    return PartialState().device


def use_the_cores() -> None:
    """Divides a CPU-only machine's cores among its processes, which `accelerate launch` limits to one thread each."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and device().type == "cpu" and torch.get_num_threads() == 1:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max((os.cpu_count() or 1) // processes, 1))


def barrier() -> None:
    """Waits until every process has reached this point."""
    if _is_distributed():
        dist.barrier()


def close() -> None:
    """Destroys the process group. Without this call, a process sometimes aborts at exit."""
    if dist.is_available() and dist.is_initialized():
        barrier()
        # Gloo's thread still needs the GIL to free the barrier. The destructor of DDP's reducer may hold it while it
        # waits for that thread: a deadlock, seen with torch 2.13. Sleeping releases the GIL first.
        time.sleep(0.2)
        dist.destroy_process_group()


def shard(length: int, rank: int, processes: int) -> slice:
    """Returns the slice of `length` items that one process handles. Shard sizes differ by at most one."""
    size, rest = divmod(length, processes)
    start = rank * size + min(rank, rest)
    return slice(start, start + size + (rank < rest))


def gather_with_gradient(local: Tensor, sizes: Sequence[int]) -> Tensor:
    """Concatenates the processes' Tensor[B_r, d] into Tensor[sum(sizes), d] on every process, keeping gradients.

    The backward pass sums the gradients from all processes' copies. Each process averages the loss over its own B_r
    queries and scales it by `processes x B_r / N`. An averaging all-reduce then gives the gradient that a single
    process would compute on the global batch.
    """
    if _is_distributed():
        return _Gather.apply(local, tuple(sizes))
    return local


def gather(local: Tensor) -> Tensor:
    """Concatenates the processes' Tensor[n_r, ...] on every process, without gradients. The n_r may differ."""
    if not _is_distributed():
        return local
    sizes = [torch.zeros(1, dtype=torch.long, device=local.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(local)], device=local.device))
    return _joined(local.detach(), [int(size) for size in sizes])


def from_main(value):
    """Returns the main process's `value` on every process. The value must be small and picklable."""
    if not _is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_process(flag: bool) -> bool:
    """Returns True if `flag` is True on any process."""
    if not _is_distributed():
        return flag
    flags = torch.tensor([int(flag)], device=device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def gather_numbers(number: int) -> list[int]:
    """Returns a list of all processes' `number`, ordered by rank, on every process."""
    if _is_distributed():
        return gather(torch.tensor([number], device=device())).tolist()
    return [number]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _joined(local: Tensor, sizes: Sequence[int]) -> Tensor:
    """Concatenates all processes' shards. Pads them while gathering, because gloo and NCCL need equal shapes."""
    padded = local.new_zeros((max(sizes), *local.shape[1:]))
    padded[: len(local)] = local
    shards = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(shards, padded)
    return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])


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
