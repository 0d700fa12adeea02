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
    _check_columns(dataset, rules, name)
    counts = {name: 0 for name in RULES if name in rules}
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
        features=_verdict_features(rules),
        desc="filtering",
    )
    reasons = np.asarray(verdicts["dropped_by"][:], dtype=object)
    _mark_duplicates(verdicts, reasons)
    counts.update(Counter(reason for reason in reasons if reason))
    return dataset.select(np.flatnonzero(reasons == "")), counts


def _check_columns(dataset: Dataset, rules: Sequence[str], name: str) -> None:
    """Raises UserError if a row lacks a column that a rule needs."""
    for rule in rules:
        for column in COLUMNS[rule]:
            if column not in dataset.column_names:
                raise UserError(f"{name}: no column {column!r}, which the filter {rule} needs")
            values = dataset.select_columns(column).with_format("arrow")[:][column]
            if values.null_count:
                row = values.is_null().index(True).as_py() + 1
                raise UserError(f"{name}: row {row} has no {column!r}, which the filter {rule} needs")


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


def _verdict_features(rules: Sequence[str]) -> Features:
    """Returns the columns that `_judge` makes."""
    columns = {"dropped_by": Value("string")}
    columns |= {"fingerprint": Value("uint64")} if "duplicates" in rules else {}
    columns |= {"minhash": List(Value("uint32"))} if "near_duplicates" in rules else {}
    return Features(columns)


def _judge(batch: dict[str, list], rules: Sequence[str]) -> dict[str, Sequence]:
    """Returns the rule that drops each row, and the hashes by which duplicates are found."""
    rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    reasons = [first_broken(row, [rule for rule in ROW_RULES if rule in rules]) for row in rows]
    verdicts: dict[str, Sequence] = {"dropped_by": reasons}
    if "duplicates" in rules:
        verdicts["fingerprint"] = np.fromiter(map(fingerprint, batch["code_tokens"]), np.uint64)
    if "near_duplicates" in rules:
        verdicts["minhash"] = [minhash(tokens) for tokens in batch["code_tokens"]]
    return verdicts


def _mark_duplicates(verdicts: Dataset, reasons: np.ndarray) -> None:
    """Adds to `reasons` the rows that duplicate an earlier one. Rows that another rule drops do not count."""
    if "fingerprint" in verdicts.column_names:
        left = np.flatnonzero(reasons == "")
        fingerprints = verdicts.data.column("fingerprint").to_numpy()[left]
        reasons[left[exact_duplicates(fingerprints)]] = "duplicates"
    if "minhash" in verdicts.column_names:
        left = np.flatnonzero(reasons == "")
        signatures = TokenColumn.from_dataset(verdicts, "minhash")
        reasons[left[near_duplicates(left, signatures.__getitem__)]] = "near_duplicates"
