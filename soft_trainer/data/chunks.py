"""Splits a batch into chunks of similar length, so that little computation is spent on padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STEP = 8  # tokens; lengths are rounded up to a multiple, because finer chunks gain nothing
# The fixed time of a layer, as the number of operations that would take as long; `benchmarks/chunk_cost.py`, on a CPU.
LAYER_OVERHEAD = {"cpu": 1.6e8, "cuda": 5e10}


@dataclass(frozen=True)
class ChunkCost:
    """The cost of encoding one chunk. The unit is the cost of a token that attends to nothing.

    A chunk of n rows padded to L tokens costs `overhead + n L (1 + attention L)`.

    Args:
        overhead: fixed cost of a chunk (kernel launches, small matrices), in tokens.
        attention: additional cost of a token for each token that it attends to.
    """

    overhead: float = 64.0
    attention: float = 5e-4

    @classmethod
    def of(cls, hidden_size: int, device_type: str) -> ChunkCost:
        """Returns the cost for a transformer of this width on this type of device.

        A layer of width h takes 24 h^2 operations per token, and 4 h more for each token that it attends to. Its fixed
        time is that of `LAYER_OVERHEAD` operations. These are constants rather than timings of the present run,
        because the chunks decide which dropout a row gets, and a resumed run must make the same chunks.
        """
        overhead = LAYER_OVERHEAD.get(device_type, LAYER_OVERHEAD["cuda"])
        return cls(overhead / (24 * hidden_size**2), 1 / (6 * hidden_size))


def chunk_by_length(lengths: np.ndarray, cost: ChunkCost | None, largest: int | None = None) -> list[np.ndarray]:
    """Returns the row numbers of each chunk, longest rows first: the cheapest partition of the sorted rows.

    Args:
        lengths: tokens of each row, int[B].
        cost: the cost to minimise; None for a single chunk in the given order.
        largest: maximum number of rows in a chunk.
    """
    chunks = _cheapest(lengths, cost)
    if largest is None:
        return chunks
    return [chunk[start : start + largest] for chunk in chunks for start in range(0, len(chunk), largest)]


def _cheapest(lengths: np.ndarray, cost: ChunkCost | None) -> list[np.ndarray]:
    """Finds the cheapest partition by dynamic programming over the distinct lengths."""
    if cost is None or len(lengths) < 2:
        return [np.arange(len(lengths))]
    rows = np.argsort(-lengths, kind="stable")
    steps = -(-lengths[rows] // STEP)
    starts = np.flatnonzero(np.diff(steps, prepend=steps[0] + 1))  # first row of each distinct length
    padded = steps[starts] * float(STEP)
    per_row = padded * (1 + cost.attention * padded)
    ends = np.append(starts[1:], len(rows))
    best = np.zeros(len(starts) + 1)
    last = np.zeros(len(starts) + 1, dtype=np.int64)  # start of the last chunk
    for i in range(1, len(starts) + 1):
        totals = best[:i] + cost.overhead + (ends[i - 1] - starts[:i]) * per_row[:i]
        last[i] = totals.argmin()
        best[i] = totals[last[i]]
    chunks, i = [], len(starts)
    while i:
        chunks.append(rows[starts[last[i]] : ends[i - 1]])
        i = last[i]
    return chunks[::-1]


def split_chunks(chunks: list[np.ndarray], number: int) -> list[np.ndarray]:
    """Splits the largest chunks until there are `number` of them, or until every chunk has one row."""
    chunks = list(chunks)
    while len(chunks) < number:
        largest = max(range(len(chunks)), key=lambda place: len(chunks[place]))
        if len(chunks[largest]) < 2:
            break
        chunks[largest : largest + 1] = np.array_split(chunks[largest], 2)
    return chunks
