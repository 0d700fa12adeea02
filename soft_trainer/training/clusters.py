"""Builds training batches from small groups of similar pairs, so that a batch contains hard negatives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def similar_batches(
    pairs: np.ndarray,
    neighbours: np.ndarray,
    batch_size: int,
    generator: np.random.Generator,
    group_size: int = 8,
    drop_last: bool = True,
) -> list[list[int]]:
    """Builds the batches of one epoch, with similar pairs in the same batch. Each pair is in at most one batch.

    Pairs are visited in random order. A pair without a group starts a new group. Free pairs whose functions are
    nearest to its query join the group, then pairs whose functions are nearest to the new members' queries. Full
    groups are spread evenly over the batches. A pair from an incomplete group joins a batch that has room and contains
    a similar function, or else any batch with room.

    Args:
        pairs: int64[P, 2], the query and the code of each training pair.
        neighbours: int64[Q, k], the functions nearest to each query, nearest first, padded with -1.
        batch_size: the number of pairs in a batch.
        generator: the source of randomness.
        group_size: the number of pairs in a group.
        drop_last: if True, random pairs are dropped so that all batches are full. If False, the last batch may be
            short.

    Returns:
        A list of batches, each a list of row indices of `pairs`. The pairs of a group are adjacent.
    """
    rows = len(pairs)
    size = min(group_size, batch_size)
    order = generator.permutation(rows)
    if drop_last:
        order = order[: rows - rows % batch_size]
    room = np.diff(np.r_[np.arange(0, len(order), batch_size), len(order)])
    codes = 1 + int(max(pairs[:, 1].max(initial=-1), neighbours.max(initial=-1)))
    full, rest = _groups(order, size, _FreePairs(pairs, codes, order), neighbours)
    slots = _slots(room, size, generator)
    batches = _Batches(room, pairs, codes)
    for group, batch in zip(full, slots, strict=False):
        for row in group:
            batches.put(row, batch)
    for group in full[len(slots) :]:
        rest += group
    late = [row for row in rest if not batches.put_near(row, neighbours[pairs[row, 0]])]
    batches_with_room = generator.permutation(np.repeat(np.arange(len(room)), batches.room))
    for row, batch in zip(late, batches_with_room[::-1].tolist(), strict=False):
        batches.put(row, batch)
    return batches.rows


class _Batches:
    """The batches of one epoch while they are being filled."""

    def __init__(self, room: np.ndarray, pairs: np.ndarray, codes: int):
        self.room = room.copy()  # the number of pairs that still fit into each batch
        self.rows: list[list[int]] = [[] for _ in room]
        self.codes = pairs[:, 1]
        self.batch_of_code = np.full(codes + 1, -1)  # the last entry is for the padding index -1

    def put(self, row: int, batch: int) -> None:
        """Adds a pair, as an index of `pairs`, to a batch."""
        self.rows[batch].append(row)
        self.batch_of_code[self.codes[row]] = batch
        self.room[batch] -= 1

    def put_near(self, row: int, near: np.ndarray) -> bool:
        """Adds a pair to a batch that has room and contains one of the functions in `near`, preferably the nearest.

        Returns:
            False if there is no such batch.
        """
        batches = self.batch_of_code[near]
        batches = batches[(batches >= 0) & (self.room[batches] > 0)]
        if len(batches):
            self.put(row, int(batches[0]))
        return len(batches) > 0


class _FreePairs:
    """The pairs that are not in a group yet, with the first free pair of each function."""

    def __init__(self, pairs: np.ndarray, codes: int, order: np.ndarray):
        self.pairs = pairs
        self.free = np.zeros(len(pairs), dtype=bool)
        self.free[order] = True
        by_code = np.argsort(pairs[:, 1], kind="stable")
        by_code = by_code[self.free[by_code]]
        of_one_code = pairs[by_code[1:], 1] == pairs[by_code[:-1], 1]
        self.following = np.full(len(pairs), -1)  # the next pair of the same function
        self.following[by_code[:-1][of_one_code]] = by_code[1:][of_one_code]
        self.first = np.full(codes + 1, -1)  # each function's first free pair; the last entry is for the index -1
        self.first[pairs[by_code[::-1], 1]] = by_code[::-1]

    def take(self, row: int) -> None:
        """Marks a pair as no longer free, and updates the first free pair of its function."""
        self.free[row] = False
        code = self.pairs[row, 1]
        if self.first[code] != row:
            return
        following = self.following[row]
        while following >= 0 and not self.free[following]:
            following = self.following[following]
        self.first[code] = following

    def near(self, codes: np.ndarray) -> list[int]:
        """Returns the first free pair of each function in `codes`. Functions without a free pair are skipped."""
        rows = self.first[codes]
        return rows[rows >= 0].tolist()


def _groups(
    order: np.ndarray, size: int, left: _FreePairs, neighbours: np.ndarray
) -> tuple[list[list[int]], list[int]]:
    """Forms groups of `size` similar pairs. Returns the full groups, and the pairs of all incomplete groups."""
    full = []
    rest = []
    for seed in order.tolist():
        if not left.free[seed]:
            continue
        group: list[int] = []
        for row in _candidates(seed, group, left, neighbours):
            if left.free[row]:  # neighbours may contain a function twice
                group.append(row)
                left.take(row)
            if len(group) == size:
                break
        if len(group) == size:
            full.append(group)
        else:
            rest += group
    return full, rest


def _candidates(seed: int, group: list[int], left: _FreePairs, neighbours: np.ndarray) -> Iterator[int]:
    """Yields the first pair of a group, then free pairs similar to each member. `group` grows during the iteration."""
    yield seed
    for member in group:
        yield from left.near(neighbours[left.pairs[member, 0]])


def _slots(room: np.ndarray, size: int, generator: np.random.Generator) -> list[int]:
    """Distributes full groups randomly and evenly over the batches that have room. Returns each group's batch."""
    groups = room // size
    slots = []
    for taken in range(max(groups, default=0)):
        slots += generator.permutation(np.flatnonzero(groups > taken)).tolist()
    return slots
