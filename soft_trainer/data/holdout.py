"""Divides pairs into train, valid and test, and drops training pairs that also occur in valid or test."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from soft_trainer.data.column_names import GROUP
from soft_trainer.data.columns import known_columns, row_texts, text_ids
from soft_trainer.data.folders import SPLIT_NAMES, SPLITS
from soft_trainer.data.split import Judgments, Split
from soft_trainer.errors import UserError
from soft_trainer.shares import HELD_OUT_SHARE, assign_splits
from soft_trainer.system.terminal import print_on_main, table

DIVIDED = SPLITS[:3]  # train, valid and test
PARTITION = "partition"  # CodeSearchNet's column with the split of a row
REPOSITORIES = ("repo", "repository", "repository_name", "repo_name")  # recognised columns with a row's repository
# The columns that identify a row's query, code and id. Rows are equal if they agree in one of them.
COMPARED = ("docstring", "docstring_tokens", "code", "code_tokens", "url")
BLANK = text_ids([""])[0]


@dataclass(frozen=True)
class Division:
    """A division of rows into train, valid and test.

    Args:
        test_fraction: the share of the rows in test, and the share in valid.
        seed: another seed gives another division.
    """

    test_fraction: float = HELD_OUT_SHARE
    seed: int = 0


def divided(split: Split, division: Division | None, group_column: str | None) -> dict[str, Split]:
    """Divides pairs into train, valid and test, and prints the size of each.

    If the column `partition` contains at least two splits, it decides, unless a column of groups is set. Otherwise,
    about 80 % become train, 10 % valid and 10 % test, and all rows of a group or repository go to the same split. With
    fewer than three repositories, rows with the same id, query or function go to the same split instead. Finally,
    training rows whose id, query or function is in valid or test are dropped.

    Args:
        division: how to divide rows without a usable column `partition`. If None, all of them become train.
        group_column: the name of the column whose values stay within one split. By default, a column with the
            repository.

    Raises:
        UserError: there are too few rows.
    """
    rows = split.to_pairs()
    named = np.full(len(rows), None, dtype=object)
    if PARTITION in rows.column_names and group_column is None:
        named = np.array([SPLIT_NAMES.get(str(value).lower()) for value in rows[PARTITION]], dtype=object)
    reason = f"by {PARTITION}"
    by_partition = len({*DIVIDED} & {*named}) >= 2
    if not by_partition and division is None:
        return {"train": split}
    hashes = row_hashes(rows)
    if not by_partition:
        column = next(iter(known_columns(rows, (GROUP, *REPOSITORIES))), None)
        names = list(map(str, rows[column])) if column else []
        reason = f"by {group_column or column}"
        if (groups := len(set(names))) < len(DIVIDED):
            if group_column is not None:
                raise UserError(f"group_column={group_column}: {groups} groups are too few for train, valid and test")
            names = list(map(str, _groups_of_equals(hashes, len(rows))))
            reason = "at random; equal ids, queries and functions stay together"
        sizes = Counter(names)
        if len(sizes) < len(DIVIDED):
            raise UserError(
                f"{len(rows)} rows ({len(sizes)} distinct) are too few to split: provide your own valid and test "
                "splits"
            )
        split_of_group = assign_splits(sizes, division.test_fraction, division.seed)
        named = np.array([split_of_group[name] for name in names], dtype=object)
    trains = named == "train"
    for_evaluation = {name: values[(named == "valid") | (named == "test")] for name, values in hashes.items()}
    dropped = trains & equal_rows(hashes, [for_evaluation])
    if trains.any() and dropped.sum() == trains.sum():
        raise UserError(f"divided {reason}, every training row equals a row of valid or test: provide your own splits")
    named[dropped] = None
    found = {name: np.flatnonzero(named == name) for name in DIVIDED}
    counts = [(name, len(numbers)) for name, numbers in found.items()]
    counts.append(("dropped: equal to a row of valid or test", int(dropped.sum())))
    counts.append(("skipped: another partition", len(rows) - sum(count for _, count in counts)))
    print_on_main(table((f"split {reason}", "rows"), [row for row in counts if row[1]]))
    splits = {}
    if len(found["train"]):
        splits["train"] = split.keep(found.pop("train"))
    return splits | held_out(split, {name: numbers for name, numbers in found.items() if len(numbers)})


def held_out(split: Split, parts: Mapping[str, np.ndarray]) -> dict[str, Split]:
    """Makes evaluation splits from some of a split's pairs. The new splits share a corpus: these pairs' functions.

    Each id occurs only once in the corpus.

    Args:
        parts: the indices of the pairs, keyed by the new split's name.
    """
    every = split.judgments.pairs()
    codes = every[np.concatenate([np.zeros(0, dtype=np.int64), *parts.values()])][:, 1]
    relevance = split.judgments.stored
    _, first = np.unique(relevance.group[codes], return_index=True)
    codes = codes[np.sort(first)]
    judgments = Judgments(relevance, graded=split.judgments.graded)
    with_corpus = dataclasses.replace(split, judgments=judgments).select(codes=codes)
    return {name: with_corpus.select(queries=np.unique(every[numbers, 0])) for name, numbers in parts.items()}


def row_hashes(rows: Dataset) -> dict[str, np.ndarray]:
    """Hashes each row's query, code and id, ignoring white space and Unicode's forms.

    Returns:
        uint64[rows], keyed by column.
    """
    hashes = {}
    for name in known_columns(rows, COMPARED):
        # In NFC, equal characters are equal whether or not their accents are separate.
        hashes[name] = text_ids(" ".join(unicodedata.normalize("NFC", text).split()) for text in row_texts(rows, name))
    return hashes


def equal_rows(hashes: Mapping[str, np.ndarray], others: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
    """Returns a mask, bool[rows], of the rows whose id, query or function also occurs in `others`.

    Args:
        hashes: the result of `row_hashes` for the rows.
        others: the results of `row_hashes` for other sets of rows.
    """
    equal = np.zeros(max(map(len, hashes.values()), default=0), dtype=bool)
    for other in others:
        for name in hashes.keys() & other.keys():
            equal |= np.isin(hashes[name], other[name]) & (hashes[name] != BLANK)
    return equal


def without_held_out(train: Split, evaluated: Iterable[Split], corpora: bool = False) -> Split:
    """Drops the training pairs whose id, query or function also occurs in a pair of an evaluation split.

    Args:
        corpora: whether to also drop pairs whose code or id occurs anywhere in the evaluation corpora.
    """
    others = []
    for split in evaluated:
        others.append(row_hashes(split.to_pairs()))
        if corpora:
            others.append(row_hashes(split.corpus))
    equal = equal_rows(row_hashes(train.to_pairs()), others)
    return train.keep(np.flatnonzero(~equal)) if equal.any() else train


def warn_of_overlap(evaluated: Mapping[str, Split], train: Split) -> None:
    """Warns if pairs of an evaluation split share an id, query or function with a training pair. Prints how many."""
    trained = row_hashes(train.to_pairs()) if evaluated else {}
    for name, split in evaluated.items():
        equal = equal_rows(row_hashes(split.to_pairs()), [trained])
        if equal.any():
            counts = f"{equal.sum():,} of {len(equal):,} pairs"
            print_on_main(f"warning: {name}: {counts} share a query, function or id with a training row")


def _groups_of_equals(hashes: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
    """Groups rows that share an id, a query or a function, directly or through other rows.

    Returns:
        The index of the first row in each row's group, int[rows].
    """
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
    # The first row of a group identifies it.
    _, first, of_row = np.unique(groups, return_index=True, return_inverse=True)
    return first[of_row]
