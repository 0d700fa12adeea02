"""Divides a source tree into packages, and assigns the packages to train, valid and test."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate

PARTITIONS = ("train", "valid", "test")
HELD_OUT_SHARE = 0.1
# Fractions that are good enough. Better ones would need smaller packages.
MIN_TRAIN_SHARE = 0.6
MIN_HELD_OUT_SHARE = 0.05
_ENDING = re.compile(r"\.[^/]*\Z")


def package_names(sizes: Counter[str]) -> Callable[[str], str]:
    """Returns a function that maps a path to the name of its package.

    A package is a folder or file at the top level, named without its extension, so `json/` and `json.py` are one
    package. If there are too few packages for three splits, or their sizes are too unequal, as in a tree with the
    single folder `src/`, the largest package is divided into its folders and files, as often as necessary.

    Args:
        sizes: the number of pairs in each file, keyed by path.
    """
    divided: set[str] = set()

    def name(path: str) -> str:
        for package in accumulate(_ENDING.sub("", path).split("/"), "{}/{}".format):
            if package not in divided:
                break
        return package

    while True:
        packages: Counter[str] = Counter()
        divisible = set()
        for path, size in sizes.items():
            package = name(path)
            packages[package] += size
            if package != _ENDING.sub("", path):
                divisible.add(package)
        if not divisible or _balanced(packages):
            return name
        largest = max(divisible, key=lambda package: (packages[package], package))
        if len(packages) > len(PARTITIONS) and packages[largest] < MIN_HELD_OUT_SHARE * packages.total():
            return name
        divided.add(largest)


def _balanced(sizes: Counter[str]) -> bool:
    """Returns True if packages of these sizes can be split into about 80, 10 and 10 percent."""
    if len(sizes) < len(PARTITIONS):
        return False
    pairs = Counter()
    for package, split in assign_splits(sizes).items():
        pairs[split] += sizes[package]
    held_out = min(pairs["valid"], pairs["test"])
    return pairs["train"] >= MIN_TRAIN_SHARE * sizes.total() and held_out >= MIN_HELD_OUT_SHARE * sizes.total()


def assign_splits(sizes: Counter[str], held_out_share: float = HELD_OUT_SHARE, seed: int = 0) -> dict[str, str]:
    """Returns each package's split. Train, valid and test get about 80, 10 and 10 percent of the pairs.

    Packages are ordered by a hash of their names. A package goes to test or valid if it fits, otherwise to train.

    Args:
        sizes: the number of pairs in each package.
        held_out_share: the share of the pairs in test, and the share in valid.
        seed: another seed gives another order.
    """
    split = {}
    room = dict.fromkeys(("test", "valid"), held_out_share * sizes.total())
    salt = str(seed) if seed else ""
    for package in sorted(sizes, key=lambda package: hashlib.sha256((salt + package).encode()).digest()):
        split[package] = "train"
        for name in room:
            if sizes[package] <= room[name]:
                split[package] = name
                room[name] -= sizes[package]
                break
    for name in room:
        if name not in split.values():
            free = [package for package in split if split[package] == "train"]
            if len(free) == 1 and len(split) > 2:  # train keeps it
                free = [package for package in split if split[package] != "train"]
            split[min(free, key=lambda package: (sizes[package], package))] = name
    return split
