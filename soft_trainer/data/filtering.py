"""Applies the rules of CodeSearchNet and GraphCodeBERT to a data set, and counts the rows that each rule drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from datasets import Dataset, Features, List, Value

from soft_trainer import dataflow
from soft_trainer.data.tokens import PARSED_AT_ONCE, TokenColumn, processes_for
from soft_trainer.errors import UserError
from soft_trainer.mining.duplicates import exact_duplicates, fingerprint, minhash, near_duplicates
from soft_trainer.mining.rules import COLUMNS, ROW_RULES, RULES, first_broken

VERDICTS = Features({"dropped_by": Value("string"), "fingerprint": Value("uint64"), "minhash": List(Value("uint32"))})


def filter_rows(
    dataset: Dataset, rules: Sequence[str], num_proc: int | None = None, name: str = "rows"
) -> tuple[Dataset, dict[str, int]]:
    """Applies `rules` to a data set, in the order of `RULES`. Document rules do not apply to a codebase.

    Args:
        dataset: rows in CodeSearchNet's columns.
        rules: names from `RULES`.
        num_proc: processes for `datasets.map`; None means one per CPU core, or fewer for few rows.
        name: the name of the rows in messages.

    Returns:
        The remaining rows in order, and for every rule the number of rows that it was the first to drop. For
        `comments`, it is the number of rows changed.

    Raises:
        UserError: a rule is unknown, or a row lacks a column that a rule needs.
    """
    if unknown := sorted(set(rules) - set(RULES)):
        raise UserError(f"filter {unknown[0]!r}: no such rule; use {', '.join(RULES)}")
    for needed, column in ((rule, column) for rule in rules for column in COLUMNS[rule]):
        if column not in dataset.column_names:
            raise UserError(f"{name}: no column {column!r}, which the filter {needed} needs")
        values = dataset.select_columns(column).with_format("arrow")[:][column]
        if values.null_count:
            row = values.is_null().index(True).as_py() + 1
            raise UserError(f"{name}: row {row} has no {column!r}, which the filter {needed} needs")
    counts = dict.fromkeys((rule for rule in RULES if rule in rules), 0)
    if not len(dataset):
        return dataset, counts  # `map` would add no column
    num_proc = num_proc or processes_for(len(dataset), PARSED_AT_ONCE)
    if "comments" in rules:
        dataset = dataset.map(_without_comments, batched=True, num_proc=num_proc, desc="comments")
        counts["comments"] = sum(dataset.data.column("had_comments").to_pylist())
        dataset = dataset.remove_columns("had_comments")
    verdicts = dataset.map(
        _judge,
        batched=True,
        batch_size=PARSED_AT_ONCE,
        fn_kwargs={"rules": list(rules)},
        remove_columns=dataset.column_names,
        num_proc=num_proc,
        features=VERDICTS,
        desc="filtering",
    )
    reasons = np.asarray(verdicts["dropped_by"][:], dtype=object)
    # Rows that another rule drops do not count as earlier copies.
    if "duplicates" in rules:
        left = np.flatnonzero(reasons == "")
        reasons[left[exact_duplicates(verdicts.data.column("fingerprint").to_numpy()[left])]] = "duplicates"
    if "near_duplicates" in rules:
        left = np.flatnonzero(reasons == "")
        reasons[left[near_duplicates(left, TokenColumn(verdicts, "minhash").__getitem__)]] = "near_duplicates"
    counts.update(Counter(reason for reason in reasons if reason))
    return dataset.select(np.flatnonzero(reasons == "")), counts


def _without_comments(batch: dict[str, list]) -> dict[str, list]:
    """Removes comments from `code` and `code_tokens` of a batch. `had_comments` marks the rows that had some."""
    result: dict[str, list] = {"code": [], "code_tokens": [], "had_comments": []}
    for code, tokens, language in zip(batch["code"], batch["code_tokens"], batch["language"], strict=True):
        bare = dataflow.remove_comments(code, language)
        had_comments = bare.split() != code.split()
        result["code"].append(bare if had_comments else code)
        result["code_tokens"].append(dataflow.code_tokens(bare, language) if had_comments else tokens)
        result["had_comments"].append(had_comments)
    return result


def _judge(batch: dict[str, list], rules: Sequence[str]) -> dict[str, Sequence]:
    """Returns the rule that drops each row, and the hashes by which duplicates are found, None if they are not."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    row_rules = [rule for rule in ROW_RULES if rule in rules]
    fingerprints = minhashes = [None] * len(rows)
    if "duplicates" in rules:  # as a list, Arrow would refuse numbers above 2^63
        fingerprints = np.fromiter(map(fingerprint, batch["code_tokens"]), np.uint64)
    if "near_duplicates" in rules:
        minhashes = [minhash(tokens) for tokens in batch["code_tokens"]]
    reasons = [first_broken(row, row_rules) for row in rows]
    return {"dropped_by": reasons, "fingerprint": fingerprints, "minhash": minhashes}
