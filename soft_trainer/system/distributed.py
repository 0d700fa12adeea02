"""Exchanges data between the processes of a distributed run. With one process, the functions return their input."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from soft_trainer.errors import UserError


def rank_and_world_size() -> tuple[int, int]:
    """Returns this process's rank and the number of processes, or (0, 1) if there is no process group."""
    if _is_distributed():
        return (dist.get_rank(), dist.get_world_size())
    return (0, 1)


def is_main() -> bool:
    """Returns True on exactly one process of a run."""
    return rank_and_world_size()[0] == 0


def is_local_main() -> bool:
    """Returns True on exactly one process of each machine, the one with local rank 0."""
    return not _is_distributed() or int(os.environ.get("LOCAL_RANK", 0)) == 0


def device() -> torch.device:
    """Returns the device that this process computes on, such as `cuda:1`."""
    from accelerate import PartialState  # slow to import

    return PartialState().device


def cores() -> int:
    """Returns the number of cores for this process: those that the machine allows, divided among its processes."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))  # a container may allow only some of the cores
    else:
        allowed = os.cpu_count() or 1
    return max(allowed // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def use_the_cores() -> None:
    """Divides a machine's cores among its processes, which `accelerate launch` limits to one thread each."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and torch.get_num_threads() == 1:
        torch.set_num_threads(cores())


def barrier() -> None:
    """Waits until every process has reached this point."""
    if _is_distributed():
        dist.barrier()


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the `with` block in one process of each machine first. The others then read what it has cached."""
    first = is_local_main()
    if not first:
        barrier()
    try:
        yield
    finally:
        if first:
            barrier()


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
    sizes = _joined(torch.tensor([len(local)], device=local.device), [1] * dist.get_world_size())
    return _joined(local.detach(), sizes.tolist())


def from_main(value):
    """Returns the main process's `value` on every process. The value must be small and picklable."""
    if not _is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(decide: Callable):
    """Calls a function on the main process. All processes return its result, or raise the UserError that it raised.

    The result must be small and picklable.
    """
    result = problem = None
    if is_main():
        try:
            result = decide()
        except UserError as error:
            problem = str(error)
    result, problem = from_main((result, problem))
    if problem is not None:
        raise UserError(problem)
    return result


def any_process(flag: bool) -> bool:
    """Returns True if `flag` is True on any process."""
    return bool(largest(int(flag)))


def largest(number: int) -> int:
    """Returns the largest `number` of all processes."""
    if not _is_distributed():
        return number
    numbers = torch.tensor([number], device=device())
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return int(numbers)


def gather_numbers(number: int) -> list[int]:
    """Returns a list of all processes' `number`, ordered by rank, on every process."""
    if _is_distributed():
        return _joined(torch.tensor([number], device=device()), [1] * dist.get_world_size()).tolist()
    return [number]


class NumberExchange:
    """Gathers each process's numbers, with one collective unless a process has more numbers than in all earlier calls.

    A message starts with its length, because the processes may have different numbers of numbers.
    """

    def __init__(self):
        self._room = 0

    def gather(self, local: Tensor) -> list[Tensor]:
        """Returns all processes' numbers, ordered by rank, on the CPU. `local` is LongTensor[n_r] on any device."""
        if not _is_distributed():
            return [local.cpu()]
        processes = dist.get_world_size()
        while True:
            message = local.new_zeros(1 + self._room)
            message[0] = len(local)
            message[1 : 1 + len(local)] = local[: self._room]
            messages = _joined(message, [len(message)] * processes).view(processes, -1).cpu()
            lengths = messages[:, 0].tolist()
            if max(lengths) <= self._room:
                return [message[1 : 1 + length] for message, length in zip(messages, lengths, strict=True)]
            self._room = max(lengths)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _joined(local: Tensor, sizes: Sequence[int]) -> Tensor:
    """Concatenates all processes' shards. Pads them while gathering, because gloo and NCCL need equal shapes.

    The shards arrive in the result itself, because a corpus may have millions of embeddings.
    """
    most = max(sizes)
    if len(local) < most:
        padded = local.new_zeros((most, *local.shape[1:]))
        padded[: len(local)] = local
        local = padded
    joined = local.new_empty((most * len(sizes), *local.shape[1:]))
    # Before torch 2.13, the function has another name.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(joined, local.contiguous())
    end = sizes[0]
    for rank, size in enumerate(sizes[1:], 1):
        if end < rank * most:  # an earlier shard was shorter
            joined[end : end + size] = joined[rank * most : rank * most + size].clone()
        end += size
    return joined[:end]


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
