"""Makes batches of small groups of similar rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

TRIES = 32  # random batches to try for a group, and random exchanges for a row, before giving up


def similar_batches(
    neighbours: np.ndarray,
    batch_size: int,
    generator: np.random.Generator,
    group_size: int = 8,
    random_share: float = 0.0,
    apart: int = 0,
    text_ids: Sequence[np.ndarray] = (),
    drop_last: bool = True,
) -> list[list[int]]:
    """Makes one epoch's batches: every row once, near neighbours together, determined by the generator's state.

    Rows are visited in random order; each row that is still free forms a group with its nearest free neighbours, then
    with theirs. Full groups are dealt out evenly. The rows of incomplete groups go to batches with one of their
    neighbours, if there is room.

    Args:
        neighbours: int64[n, k], the rows nearest to each row, nearest first, -1 where there are fewer.
        batch_size: rows of a batch.
        group_size: rows of a group.
        random_share: the share of each batch that is drawn at random instead, from 0 to 1.
        apart: a row never shares a batch with this many of its nearest neighbours.
        text_ids: arrays of n numbers, equal for equal texts; rows with an equal text never share a batch.
        drop_last: leave out random rows so that all batches are full; otherwise the last batch is short.

    Returns:
        Batches of row numbers; the rows of a group are adjacent. A row that no batch can take without violating
        `apart` or `text_ids` is left out of the epoch, and its batch is short.
    """
    rows = len(neighbours)
    size = min(group_size, batch_size)
    order = generator.permutation(rows)
    if drop_last:
        order = order[: rows - rows % batch_size]
    sizes = np.diff(np.r_[np.arange(0, len(order), batch_size), len(order)])
    each, more = divmod(round(random_share * len(order)), max(len(sizes), 1))
    reserved = np.full(len(sizes), each)
    reserved[generator.permutation(len(sizes))[:more]] += 1
    reserved = np.minimum(reserved, sizes)
    alone, grouped = np.split(order, [reserved.sum()])
    plan = _Plan(neighbours, sizes - reserved, generator, apart, text_ids)
    full, small = _groups(grouped, size, plan)
    small += plan.deal(full, size)
    # Rows with equal texts come first, because later rows find fewer batches with room.
    late = [row for row in plan.texts_first([row for group in small for row in group]) if not plan.place_near(row)]
    plan.room += reserved
    plan.place_anywhere(plan.texts_first([*late, *alone.tolist()]))
    return plan.batches


def _groups(order: np.ndarray, size: int, plan: _Plan) -> tuple[list, list]:
    """Forms groups of near rows among those of `order`; returns full groups and smaller ones."""
    free = np.zeros(len(plan.neighbours) + 1, dtype=bool)  # The last entry stands for the neighbour -1.
    free[order] = True
    banned_by = np.full(len(free), -1)  # The last group that contains a row to keep apart.
    full = []
    small = []
    for number, seed in enumerate(order.tolist()):
        if not free[seed]:
            continue
        group: list[int] = []
        texts: set = set()
        for row in _candidates(seed, group, free, plan):
            # A list of neighbours may contain a row twice.
            if free[row] and banned_by[row] != number and texts.isdisjoint(plan.texts_of.get(row, ())):
                group.append(row)
                free[row] = False
                texts |= plan.texts_of.get(row, set())
                banned_by[plan.enemies_of(row)] = number
            if len(group) == size:
                break
        (full if len(group) == size else small).append(group)
    return full, small


def _candidates(seed: int, group: list[int], free: np.ndarray, plan: _Plan) -> Iterator[int]:
    """Yields the seed, then the free neighbours of each member of the growing group."""
    yield seed
    for member in group:
        near = plan.neighbours[member, plan.apart :]
        yield from near[free[near]].tolist()


class _Plan:
    """The batches of an epoch, as they are being filled."""

    def __init__(self, neighbours, room: np.ndarray, generator, apart: int, text_ids: Sequence[np.ndarray]):
        self.neighbours = neighbours
        self.room = room
        self.generator = generator
        self.apart = apart
        self.batches: list[list[int]] = [[] for _ in room]
        self.batch_of = np.full(len(neighbours) + 1, -1)
        self.texts_of = shared_texts(text_ids)
        self.texts_in: list[set] = [set() for _ in room]
        self.apart_from, self.apart_starts = _both_ways(neighbours[:, :apart])

    def enemies_of(self, row: int) -> np.ndarray:
        """Returns the rows that are too near to share the row's batch."""
        return self.apart_from[self.apart_starts[row] : self.apart_starts[row + 1]]

    def fits(self, row: int, batch: int) -> bool:
        """Returns True if no text and no row of the batch excludes the row."""
        if not self.texts_in[batch].isdisjoint(self.texts_of.get(row, ())):
            return False
        return not self.apart or not (self.batch_of[self.enemies_of(row)] == batch).any()

    def put(self, row: int, batch: int) -> None:
        self.batches[batch].append(row)
        self.batch_of[row] = batch
        self.texts_in[batch] |= self.texts_of.get(row, set())
        self.room[batch] -= 1

    def take_last(self, batch: int) -> int:
        """Removes the last row of a batch and returns it."""
        row = self.batches[batch].pop()
        self.batch_of[row] = -1
        self.texts_in[batch] -= self.texts_of.get(row, set())
        self.room[batch] += 1
        return row

    def texts_first(self, rows: list[int]) -> list[int]:
        """Sorts rows: those with a text that occurs elsewhere, then the others."""
        return sorted(rows, key=lambda row: row not in self.texts_of)

    def deal(self, groups: list[list[int]], size: int) -> list[list[int]]:
        """Puts groups into batches, the same number into each; returns those that fit nowhere."""
        places = self.room // size
        rounds = (self.generator.permutation(np.flatnonzero(places > r)) for r in range(max(places, default=0)))
        slots = np.concatenate([np.empty(0, np.int64), *rounds]).tolist()
        left = []
        for number, group in enumerate(groups):
            start = number - len(left)
            tried = [start, *self.generator.integers(start, len(slots), TRIES)] if start < len(slots) else []
            slot = next((s for s in tried if all(self.fits(row, slots[s]) for row in group)), None)
            if slot is None:
                left.append(group)
                continue
            slots[start], slots[slot] = slots[slot], slots[start]
            for row in group:
                self.put(row, slots[start])
        return left

    def place_near(self, row: int) -> bool:
        """Puts the row into the batch of its nearest neighbour that can take it; returns False if none can."""
        batches = self.batch_of[self.neighbours[row, self.apart :]]
        for batch in batches[(batches >= 0) & (self.room[batches] > 0)].tolist():
            if self.fits(row, batch):
                self.put(row, batch)
                return True
        return False

    def place_anywhere(self, rows: list[int]) -> None:
        """Puts each row into a random batch with room; leaves out a row that finds none."""
        places = self.generator.permutation(np.repeat(np.arange(len(self.room)), self.room)).tolist()
        for row in rows:
            place = next((p for p in self._tried(len(places)) if self.fits(row, places[p])), None)
            if place is None:
                if self._exchange(row, places[-1]):
                    places.pop()
                continue
            places[place], places[-1] = places[-1], places[place]
            self.put(row, places.pop())

    def _tried(self, places: int) -> Iterator[int]:
        """Yields the last place, some random ones, then all."""
        yield places - 1
        yield from self.generator.integers(places, size=min(TRIES, places))
        yield from range(places)

    def _exchange(self, row: int, batch: int) -> bool:
        """Makes room for a row that no batch can take, by moving a row of another batch to `batch`."""
        for other in self.generator.integers(len(self.batches), size=TRIES).tolist():
            if other == batch or not self.batches[other]:
                continue
            moved = self.take_last(other)
            if self.fits(row, other) and self.fits(moved, batch):
                self.put(row, other)
                self.put(moved, batch)
                return True
            self.put(moved, other)
        return False


def shared_texts(text_ids: Sequence[np.ndarray]) -> dict[int, set]:
    """Returns the texts of each row that shares one with another row."""
    texts: dict[int, set] = {}
    for side, ids in enumerate(text_ids):
        _, which, counts = np.unique(ids, return_inverse=True, return_counts=True)
        for row in np.flatnonzero(counts[which] > 1).tolist():
            texts.setdefault(row, set()).add((side, int(which[row])))
    return texts


def _both_ways(near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that each row names or that name it, concatenated, and the offset of each row's part."""
    rows = np.repeat(np.arange(len(near)), near.shape[1])
    rows = rows[near.ravel() >= 0]
    others = near.ravel()[near.ravel() >= 0]
    named = np.concatenate([rows, others])
    starts = np.concatenate([[0], np.cumsum(np.bincount(named, minlength=len(near)))])
    return np.concatenate([others, rows])[np.argsort(named, kind="stable")], starts
