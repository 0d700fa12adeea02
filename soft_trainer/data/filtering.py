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
from soft_trainer.mining.rules import ROW_RULES, RULES, Row, first_broken


def filter_rows(dataset: Dataset, rules: Sequence[str], num_proc: int | None = None) -> tuple[Dataset, dict[str, int]]:
    """Apply `rules` to `dataset`, in the order of `RULES`; a codebase without documents has no use for those on them.

    Args:
        dataset: rows in CodeSearchNet's columns.
        rules: names from `RULES`.
        num_proc: processes of `datasets.map`; None means one a CPU core, as far as there are rows for them.

    Returns:
        The rows that stay, in order, and for each rule the number of rows that it was the first to drop (`comments`:
        the number of rows that it changed).

    Raises:
        UserError: an unknown rule.
    """

    if unknown := sorted(set(rules) - set(RULES)):
        raise UserError(f"filter {unknown[0]!r}: no such rule; use {', '.join(RULES)}")
    counts = {name: 0 for name in RULES if name in rules}
    num_proc = num_proc or processes_for(len(dataset))
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


def _rows(batch: dict[str, list]) -> list[Row]:
    """A batch of columns as rows."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _without_comments(batch: dict[str, list]) -> dict[str, list]:
    """The batch with `code` and `code_tokens` free of comments, and whether there were any."""
    result: dict[str, list] = {"code": [], "code_tokens": [], "had_comments": []}
    for code, tokens, language in zip(batch["code"], batch["code_tokens"], batch["language"], strict=True):
        bare = dataflow.remove_comments(code, language)
        had_comments = bare.split() != code.split()
        result["code"].append(bare if had_comments else code)
        result["code_tokens"].append(dataflow.code_tokens(bare, language) if had_comments else tokens)
        result["had_comments"].append(had_comments)
    return result


def _verdict_features(rules: Sequence[str]) -> Features:
    """The columns that `_judge` makes."""
    from datasets import Features

    known_by = {"duplicates": {"fingerprint": Value("uint64")}, "near_duplicates": {"minhash": List(Value("uint32"))}}
    columns = {"dropped_by": Value("string")}
    for rule in known_by:
        columns |= known_by[rule] if rule in rules else {}
    return Features(columns)


def _judge(batch: dict[str, list], rules: Sequence[str]) -> dict[str, Sequence]:
    """The rule that drops each row, and by what duplicates of the others are known."""
    reasons = [first_broken(row, [rule for rule in ROW_RULES if rule in rules]) for row in _rows(batch)]
    known_by: dict[str, Sequence] = {"dropped_by": reasons}
    if "duplicates" in rules:
        known_by["fingerprint"] = np.fromiter(map(fingerprint, batch["code_tokens"]), np.uint64)
    if "near_duplicates" in rules:
        known_by["minhash"] = [minhash(tokens) for tokens in batch["code_tokens"]]
    return known_by


def _mark_duplicates(verdicts: Dataset, reasons: np.ndarray) -> None:
    """Write the rule that drops it into `reasons` for every row left that is a duplicate of one before."""

    if "fingerprint" in verdicts.column_names:
        left = np.flatnonzero(reasons == "")
        fingerprints = verdicts.data.column("fingerprint").to_numpy()[left]
        reasons[left[exact_duplicates(fingerprints)]] = "duplicates"
    if "minhash" in verdicts.column_names:
        left = np.flatnonzero(reasons == "")
        signatures = TokenColumn.from_dataset(verdicts, "minhash")
        reasons[left[near_duplicates(left, signatures.__getitem__)]] = "near_duplicates"
