"""Assigns groups of rows, such as packages and repositories, to train, valid and test."""

from __future__ import annotations

import hashlib
from collections import Counter

PARTITIONS = ("train", "valid", "test")
HELD_OUT_SHARE = 0.1


def assign_splits(sizes: Counter[str], held_out_share: float = HELD_OUT_SHARE, seed: int = 0) -> dict[str, str]:
    """Returns each group's split. Train, valid and test get about 80, 10 and 10 percent of the pairs.

    Groups are ordered by a hash of their names. A group goes to test or valid if it fits, otherwise to train.

    Args:
        sizes: the number of pairs in each group.
        held_out_share: the share of the pairs in test, and the share in valid.
        seed: another seed gives another order.
    """
    split = {}
    room = dict.fromkeys(("test", "valid"), held_out_share * sizes.total())
    salt = str(seed) if seed else ""
    for group in sorted(sizes, key=lambda group: hashlib.sha256((salt + group).encode()).digest()):
        split[group] = "train"
        for name in room:
            if sizes[group] <= room[name]:
                split[group] = name
                room[name] -= sizes[group]
                break
    for name in room:
        if name not in split.values():
            free = [group for group in split if split[group] == "train"]
            if len(free) == 1 and len(split) > 2:  # train keeps its only group
                free = [group for group in split if split[group] != "train"]
            split[min(free, key=lambda group: (sizes[group], group))] = name
    return split
