"""Divides rows into train, valid and test, and keeps what is held out away from training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from datasets import Dataset
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from soft_trainer.data.layouts.files import SPLIT_NAMES, SPLITS
from soft_trainer.data.tokens import column_texts, columns_in, text_ids
from soft_trainer.errors import UserError
from soft_trainer.mining.packages import assign_splits
from soft_trainer.terminal import print_on_main, table

PARTITION = "partition"  # the column of CodeSearchNet that names a row's split
REPOSITORIES = ("repo", "repository", "repository_name", "repo_name")  # recognised columns with a row's repository
# The columns that identify a row's query, code and id. Rows are equal if they agree in one of them.
COMPARED = ("docstring", "docstring_tokens", "code", "code_tokens", "url")
BLANK = text_ids([""])[0]


def by_partition(rows: Dataset) -> dict[str, np.ndarray]:
    """Returns the rows of each split that the column `partition` names, or {} if it names fewer than two splits."""
    if PARTITION not in rows.column_names:
        return {}
    named = np.array([SPLIT_NAMES.get(str(value).lower()) for value in rows[PARTITION]], dtype=object)
    found = {split: np.flatnonzero(named == split) for split in SPLITS[:3]}
    found = {split: places for split, places in found.items() if len(places)}
    if len(found) < 2:
        return {}
    counts = [(split, len(places)) for split, places in found.items()]
    if others := len(rows) - sum(map(len, found.values())):
        counts.append(("excluded: another partition", others))
    print_on_main(table((f"split by {PARTITION}", "rows"), counts))
    return found


def divided(rows: Dataset) -> dict[str, np.ndarray]:
    """Divides rows into about 80 % train, 10 % valid and 10 % test, and prints the size of each.

    Repositories stay together. If there are fewer than three, rows with the same id, query or code stay together. Rows
    that then equal a row of valid or test are dropped from train.

    Returns:
        The row numbers of each split.

    Raises:
        UserError: there are too few rows.
    """
    hashes = row_hashes(rows)
    groups = []
    for column in columns_in(rows, REPOSITORIES)[:1]:
        groups = list(map(str, rows[column]))
        reason = f"by {column}"
    if len(set(groups)) < len(SPLITS):
        groups = list(map(str, _groups_of_equals(hashes, len(rows))))
        reason = "at random; equal ids, queries and codes stay together"
    sizes = Counter(groups)
    if len(sizes) < len(SPLITS):
        raise UserError(f"{len(rows)} rows ({len(sizes)} different ones) are too few to split: give valid and test")
    split_of_group = assign_splits(sizes)
    named = np.array([split_of_group[group] for group in groups])
    found = {split: np.flatnonzero(named == split) for split in SPLITS[:3]}
    held_out = {name: values[named != "train"] for name, values in hashes.items()}
    repeated = equal_rows(hashes, [held_out])[found["train"]]
    found["train"] = found["train"][~repeated]
    counts = [(split, len(places)) for split, places in found.items()]
    if repeated.any():
        counts.append(("dropped: equal to a row of valid or test", int(repeated.sum())))
    print_on_main(table((f"split {reason}", "rows"), counts))
    return found


def row_hashes(rows: Dataset) -> dict[str, np.ndarray]:
    """Returns hashes of the columns in `COMPARED`, uint64[rows] each. Differences in white space do not count."""
    hashes = {}
    for name in columns_in(rows, COMPARED):
        hashes[name] = text_ids(" ".join(text.split()) for text in column_texts(rows, name))
    return hashes


def equal_rows(hashes: Mapping[str, np.ndarray], others: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
    """Returns True for each row that agrees with one of the others in its id, query or code, bool[rows]."""
    equal = np.zeros(max(map(len, hashes.values()), default=0), dtype=bool)
    for other in others:
        for name in hashes.keys() & other.keys():
            equal |= np.isin(hashes[name], other[name]) & (hashes[name] != BLANK)
    return equal


def _groups_of_equals(hashes: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
    """Groups rows that share an id, a query or a code, directly or through other rows. Returns each row's group."""
    sides = []
    start = rows
    for values in hashes.values():
        known, numbers = np.unique(values, return_inverse=True)
        shared = values != BLANK
        sides.append(np.stack([np.flatnonzero(shared), numbers[shared] + start]))
        start += len(known)
    edges = np.concatenate(sides, axis=1)
    graph = coo_array((np.ones(edges.shape[1], dtype=bool), edges), shape=(start, start))
    groups = connected_components(graph, directed=False)[1][:rows]
    # A group is named after its first row.
    _, first, of_row = np.unique(groups, return_index=True, return_inverse=True)
    return first[of_row]
