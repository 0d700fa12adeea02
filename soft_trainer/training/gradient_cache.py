"""Implements gradient caching: exact gradients of a large batch, with the activations of only one pass in memory.

1. Run every pass without a graph.
2. Compute the loss and its gradient with respect to all embeddings.
3. Run every pass again, with the same dropout, and backpropagate the gradient of its embeddings.

See Gao et al., 2021, "Scaling deep contrastive learning batch size under memory limited setup".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from soft_trainer.system import distributed
from soft_trainer.training.batches import Batch


class RandomState:
    """A snapshot of the random number generators on the CPU and on a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cpu = torch.get_rng_state()
        self.own = None
        if device.type not in ("cpu", "meta"):
            self.own = torch.get_device_module(device).get_rng_state(*self._arguments)

    @property
    def _arguments(self) -> tuple:
        """The device, unless there can be only one: `torch.mps.get_rng_state` takes no argument."""
        return () if self.device.type == "mps" else (self.device,)

    def restore(self) -> None:
        """Continues with the random numbers that followed the snapshot."""
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            torch.get_device_module(self.device).set_rng_state(self.own, *self._arguments)

    @contextlib.contextmanager
    def again(self):
        """Replays the random numbers inside the `with` block, and restores the current state afterwards."""
        before = RandomState(self.device)
        self.restore()
        try:
            yield
        finally:
            before.restore()


def cached_backward(
    encode: Callable[[dict], Tensor],
    batch: Batch,
    loss_of: Callable[[Tensor, Tensor, slice], Tensor],
    backward: Callable[[Tensor], None],
    gathers: bool,
    block_size: int,
    no_sync: Callable,
) -> Tensor:
    """Runs a batch's forward and backward passes while keeping the graph of only one pass in memory.

    The gradients are added to the parameters' `grad`.

    Args:
        encode: returns the embeddings of the inputs of one pass.
        batch: the batch, divided into passes.
        loss_of: returns the loss of a block of queries. The arguments are the embeddings of this process's queries,
            the embeddings of all functions, and the block as a slice of the queries. The losses of all blocks add up
            to the batch's loss.
        backward: runs the backward pass of a loss, with fp16 loss scaling if needed.
        gathers: True to compare queries with the functions of all processes.
        block_size: the number of queries whose scores are in memory at the same time.
        no_sync: returns a context in which DDP does not reduce gradients. Only the last pass runs outside this
            context.

    Returns:
        The loss, a scalar without a graph.
    """
    parts = []
    states = []
    with torch.no_grad():
        for inputs in batch.passes:
            states.append(RandomState(inputs["input_ids"].device))
            parts.append(encode(inputs).requires_grad_())
    embeddings = torch.cat(parts)
    queries = embeddings.index_select(0, batch.queries)
    codes = embeddings.index_select(0, batch.codes)
    if gathers:
        codes = distributed.gather_with_gradient(codes, batch.code_sizes)
    total = loss_in_blocks(queries, codes, loss_of, backward, block_size)
    for number, (inputs, part, state) in enumerate(zip(batch.passes, parts, states, strict=True), 1):
        with contextlib.nullcontext() if number == len(batch.passes) else no_sync(), state.again():
            embeddings = encode(inputs)
            # The gradient already includes the loss scale, so `backward`, which would scale it again, is not used.
            embeddings.backward(part.grad.to(embeddings.dtype))
    return total


def loss_in_blocks(
    queries: Tensor,
    codes: Tensor,
    loss_of: Callable[[Tensor, Tensor, slice], Tensor],
    backward: Callable[[Tensor], None],
    block_size: int,
) -> Tensor:
    """Computes a batch's loss block by block, and backpropagates the loss through the graph of the embeddings.

    Args:
        queries: Tensor[B, d], the embeddings of this process's queries, with a graph.
        codes: Tensor[N, d], the embeddings of all functions, with a graph.
        loss_of, backward, block_size: as in `cached_backward`.

    Returns:
        The loss, a scalar without a graph.
    """
    q = queries.detach().requires_grad_()
    c = codes.detach().requires_grad_()
    total = queries.new_zeros(())
    for start in range(0, max(len(queries), 1), block_size):  # a process without queries must also run backward
        loss = loss_of(q, c, slice(start, start + block_size))
        backward(loss)
        total += loss.detach()
    torch.autograd.backward([queries, codes], [q.grad, c.grad])
    return total
