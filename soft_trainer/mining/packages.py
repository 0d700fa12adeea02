"""Divides a source tree into packages, which stay within one split."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate

from soft_trainer.shares import PARTITIONS, assign_splits

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
    divided = set()

    def name(path: str) -> str:
        for package in accumulate(_ENDING.sub("", path).split("/"), "{}/{}".format):
            if package not in divided:
                break
        return package

    while True:
        packages = Counter()
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
