"""Gradient caching: any batch size in the memory of one chunk, with exact gradients.

1. Encode every chunk without a graph.
2. Compute the loss of all embeddings, and its gradient with respect to them.
3. Encode every chunk again, with the same dropout, and backpropagate that gradient through it.

See Gao et al., 2021, "Scaling deep contrastive learning batch size under memory limited setup".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from soft_trainer import distributed
from soft_trainer.data.batches import Batch


class RandomState:
    """The state of the random number generators of the CPU and one device, so that it can be replayed."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cpu = torch.get_rng_state()
        self.own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    @contextlib.contextmanager
    def again(self):
        """Draws the same random numbers again in the body, and restores the present state afterwards."""
        devices = [] if self.own is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.set_rng_state(self.cpu)
            if self.own is not None:
                torch.get_device_module(self.device).set_rng_state(self.own, self.device)
            yield


def cached_backward(
    encode: Callable[[dict], Tensor],
    batch: Batch,
    loss_of: Callable[[Tensor, Tensor, slice], Tensor],
    backward: Callable[[Tensor], None],
    gathers: bool,
    block_size: int,
    no_sync: Callable,
) -> Tensor:
    """Accumulates the gradients of a whole batch, with one chunk in memory at a time.

    Args:
        encode: returns the embeddings of one chunk of model inputs.
        batch: the batch, in chunks.
        loss_of: returns the part of the loss that a block of queries contributes, given their embeddings, the
            embeddings of all codes, and the block.
        backward: runs the backward pass of a loss, with the scaling that the precision needs.
        gathers: True if the codes of all processes are negatives.
        block_size: the number of queries whose scores are in memory at once.
        no_sync: makes a context in which gradients are not reduced over processes. The last chunk runs outside it.

    Returns:
        The loss, a scalar without a graph.
    """
    chunks = [*batch.query.chunks, *batch.code.chunks]
    parts = []
    states = []
    with torch.no_grad():
        for chunk in chunks:
            states.append(RandomState(chunk["input_ids"].device))
            parts.append(encode(chunk).requires_grad_())
    first = len(batch.query.chunks)
    queries = torch.cat(parts[:first])[batch.query.order]
    codes = torch.cat(parts[first:])[batch.code.order]
    if gathers:
        codes = distributed.gather_with_gradient(codes, batch.code_sizes)
    total = loss_in_blocks(queries, codes, loss_of, backward, block_size)
    for place, (chunk, part, state) in enumerate(zip(chunks, parts, states, strict=True), 1):
        with contextlib.nullcontext() if place == len(chunks) else no_sync(), state.again():
            embeddings = encode(chunk)
            # The gradient includes the scale of the loss already, so `backward` must not scale it again.
            embeddings.backward(part.grad.to(embeddings.dtype))
    return total


def loss_in_blocks(
    queries: Tensor,
    codes: Tensor,
    loss_of: Callable[[Tensor, Tensor, slice], Tensor],
    backward: Callable[[Tensor], None],
    block_size: int,
) -> Tensor:
    """Backpropagates through the scores block by block, then through the gather once.

    Args:
        queries: Tensor[B, d], with a graph.
        codes: Tensor[N, d], with a graph.
        loss_of, backward, block_size: see `cached_backward`.

    Returns:
        The loss, a scalar without a graph.
    """
    q = queries.detach().requires_grad_()
    c = codes.detach().requires_grad_()
    total = queries.new_zeros(())
    for start in range(0, max(len(q), 1), block_size):  # a process without queries takes part in the gather too
        loss = loss_of(q[start : start + block_size], c, slice(start, start + block_size))
        backward(loss)
        total += loss.detach()
    torch.autograd.backward([queries, codes], [q.grad, c.grad])
    return total
