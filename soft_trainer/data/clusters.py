"""Makes batches of small groups of similar rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

UNUSED = 32  # random numbers a group that are drawn and not used, so that a seed gives the batches of version 0.1


def similar_batches(
    neighbours: np.ndarray,
    batch_size: int,
    generator: np.random.Generator,
    group_size: int = 8,
    drop_last: bool = True,
) -> list[list[int]]:
    """Makes one epoch's batches: every row once, near neighbours together, determined by the generator's state.

    Rows are visited in random order; each row that is still free forms a group with its nearest free neighbours, then
    with theirs. Full groups are dealt out evenly. The rows of incomplete groups go to batches with one of their
    neighbours, if there is room, and to any batch with room otherwise.

    Args:
        neighbours: int64[n, k], the rows nearest to each row, nearest first, -1 where there are fewer.
        batch_size: rows of a batch.
        group_size: rows of a group.
        drop_last: leave out random rows so that all batches are full; otherwise the last batch is short.

    Returns:
        Batches of row numbers; the rows of a group are adjacent.
    """
    rows = len(neighbours)
    size = min(group_size, batch_size)
    order = generator.permutation(rows)
    if drop_last:
        order = order[: rows - rows % batch_size]
    room = np.diff(np.r_[np.arange(0, len(order), batch_size), len(order)])
    generator.permutation(len(room))  # see UNUSED
    full, rest = _groups(order, size, neighbours)
    slots = _slots(room, size, generator)
    for start in range(min(len(full), len(slots))):
        generator.integers(start, len(slots), UNUSED)
    batches = _Batches(room, rows)
    for group, batch in zip(full, slots, strict=False):
        for row in group:
            batches.put(row, batch)
    rest += [row for group in full[len(slots) :] for row in group]
    late = [row for row in rest if not batches.put_near(row, neighbours[row])]
    places = generator.permutation(np.repeat(np.arange(len(room)), batches.room))
    for row, batch in zip(late, places[::-1].tolist(), strict=False):
        batches.put(row, batch)
    return batches.rows


class _Batches:
    """The batches of an epoch, as they are being filled."""

    def __init__(self, room: np.ndarray, rows: int):
        self.room = room.copy()  # places left in each batch
        self.rows: list[list[int]] = [[] for _ in room]
        self.batch_of = np.full(rows + 1, -1)  # the last entry stands for the neighbour -1

    def put(self, row: int, batch: int) -> None:
        """Puts a row into a batch."""
        self.rows[batch].append(row)
        self.batch_of[row] = batch
        self.room[batch] -= 1

    def put_near(self, row: int, near: np.ndarray) -> bool:
        """Puts a row into the batch of its nearest neighbour whose batch has room; returns False if none has."""
        batches = self.batch_of[near]
        batches = batches[(batches >= 0) & (self.room[batches] > 0)]
        if len(batches):
            self.put(row, int(batches[0]))
        return len(batches) > 0


def _groups(order: np.ndarray, size: int, neighbours: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """Forms groups of near rows among those of `order`; returns full groups, and the rows of smaller ones."""
    free = np.zeros(len(neighbours) + 1, dtype=bool)  # the last entry stands for the neighbour -1
    free[order] = True
    full = []
    rest = []
    for seed in order.tolist():
        if not free[seed]:
            continue
        group: list[int] = []
        for row in _candidates(seed, group, free, neighbours):
            if free[row]:  # a list of neighbours may contain a row twice
                group.append(row)
                free[row] = False
            if len(group) == size:
                break
        if len(group) == size:
            full.append(group)
        else:
            rest += group
    return full, rest


def _candidates(seed: int, group: list[int], free: np.ndarray, neighbours: np.ndarray) -> Iterator[int]:
    """Yields the seed, then the free neighbours of each member of the growing group."""
    yield seed
    for member in group:
        near = neighbours[member]
        yield from near[free[near]].tolist()


def _slots(room: np.ndarray, size: int, generator: np.random.Generator) -> list[int]:
    """Returns the batch of each full group: every batch with room once, in random order, then every batch again."""
    places = room // size
    slots = []
    for taken in range(max(places, default=0)):
        slots += generator.permutation(np.flatnonzero(places > taken)).tolist()
    return slots
