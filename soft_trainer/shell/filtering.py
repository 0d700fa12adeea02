"""Filters rows with the rules of CodeSearchNet and GraphCodeBERT, and counts the rows that each rule drops."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value, concatenate_datasets

from soft_trainer import dataflow
from soft_trainer.data.array_cache import flat
from soft_trainer.data.split import Split
from soft_trainer.data.tokens import PARSED_AT_ONCE, TokenColumn, mapped, processes_for
from soft_trainer.errors import UserError
from soft_trainer.mining.duplicates import exact_duplicates, hash_tokens, minhash, near_duplicates
from soft_trainer.mining.rules import COLUMNS, ROW_RULES, RULES, first_broken

BARE = Features({"code": Value("string"), "code_tokens": List(Value("string")), "had_comments": Value("bool")})
VERDICTS = Features({"dropped_by": Value("string"), "fingerprint": Value("uint64"), "minhash": List(Value("uint32"))})


def filter_rows(
    dataset: Dataset, rules: Sequence[str], num_proc: int | None = None, name: str = "rows"
) -> tuple[Dataset, dict[str, int]]:
    """Drops the rows that break one of `rules`, and removes comments from functions if `comments` is among them.

    The rules apply in the order of `RULES`.

    Args:
        dataset: rows with CodeSearchNet's columns.
        rules: keys of `RULES`.
        num_proc: the number of processes. By default, one per CPU core, or fewer if there are few rows.
        name: the name of the rows in messages.

    Returns:
        The remaining rows in order, and a dict from each rule to the number of rows that it was the first to drop. For
        `comments`, the dict has the number of changed rows.

    Raises:
        UserError: a rule is unknown, or a row lacks a value that a rule needs.
    """
    if unknown := sorted(set(rules) - set(RULES)):
        raise UserError(f"filter {unknown[0]!r}: no such rule; use {', '.join(RULES)}")
    needed_by = {}
    for rule in rules:
        needed_by |= dict.fromkeys(COLUMNS[rule], rule)
    for column, rule in needed_by.items():
        if column not in dataset.column_names:
            raise UserError(f"{name}: no column {column!r}, which the filter {rule!r} needs")
        values = dataset.select_columns(column).with_format("arrow")[:][column]
        if values.null_count:
            row = values.is_null().index(True).as_py() + 1
            raise UserError(f"{name}: row {row} has no {column!r}, which the filter {rule!r} needs")
    counts = dict.fromkeys((rule for rule in RULES if rule in rules), 0)
    if not (len(dataset) and rules):
        return dataset, counts
    made_from = list(rules)
    options = {"batch_size": PARSED_AT_ONCE, "num_proc": num_proc or processes_for(len(dataset), PARSED_AT_ONCE)}
    if "comments" in rules:
        bare = mapped(dataset, [*COLUMNS["comments"]], _without_comments, BARE, made_from, desc="comments", **options)
        counts["comments"] = sum(bare["had_comments"])
        others = flat(dataset.remove_columns(["code", "code_tokens"]))
        dataset = concatenate_datasets([others, bare], axis=1).select_columns(dataset.column_names)
    read = sorted(needed_by)
    judge = partial(_judge, rules=list(rules))
    verdicts = mapped(dataset, read, judge, VERDICTS, made_from, desc="filtering", **options)
    reasons = np.asarray(verdicts["dropped_by"][:], dtype=object)
    # A row that another rule drops does not make a later row a duplicate.
    if "duplicates" in rules:
        left = np.flatnonzero(reasons == "")
        reasons[left[exact_duplicates(verdicts.data.column("fingerprint").to_numpy()[left])]] = "duplicates"
    if "near_duplicates" in rules:
        left = np.flatnonzero(reasons == "")
        reasons[left[near_duplicates(left, TokenColumn(verdicts, "minhash").__getitem__)]] = "near_duplicates"
    counts.update(Counter(reason for reason in reasons if reason))
    return dataset.select(np.flatnonzero(reasons == "")), counts


def filter_split(split: Split, rules: Sequence[str], name: str) -> tuple[Split, dict[str, int], dict[str, int]]:
    """Drops the pairs of a split that break one of `rules`. The corpus of valid and test keeps all of its rows.

    The rule `comments` also removes comments from the corpus.

    Returns:
        The remaining split, and two dicts of counts as in `filter_rows`, one for the pairs and one for the corpus.
    """
    pairs = split.to_pairs()
    numbered = pairs.add_column("pair", list(range(len(pairs))))
    rows, counts = filter_rows(numbered, rules, name=name)
    corpus, of_corpus = filter_rows(split.corpus, [rule for rule in rules if rule == "comments"], name="codebase")
    kept = np.array(rows["pair"][:], dtype=np.int64)
    split = dataclasses.replace(split, corpus=corpus)
    if name == "train":
        return split.keep(kept), counts, of_corpus
    queries = np.unique(split.judgments.pairs()[kept, 0])
    return split.select(queries=queries), counts, of_corpus


def _without_comments(table: pa.Table) -> pa.Table:
    """Removes comments from `code` and `code_tokens`. Adds a column `had_comments` that marks the changed rows."""
    rows = []
    for row in table.to_pylist():
        bare = dataflow.remove_comments(row["code"], row["language"])
        had_comments = bare.split() != row["code"].split()
        row["had_comments"] = had_comments
        if had_comments:
            row["code"] = bare
            row["code_tokens"] = dataflow.code_tokens(bare, row["language"])
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=BARE.arrow_schema)


def _judge(table: pa.Table, rules: Sequence[str]) -> pa.Table:
    """Returns the first rule that each row breaks and, if duplicates are dropped, a hash of each row's tokens."""
    rows = table.to_pylist()
    row_rules = [rule for rule in ROW_RULES if rule in rules]
    verdicts = []
    for row in rows:
        verdict = {"dropped_by": first_broken(row, row_rules)}
        if "duplicates" in rules:
            verdict["fingerprint"] = hash_tokens(row["code_tokens"])
        if "near_duplicates" in rules:
            verdict["minhash"] = minhash(row["code_tokens"])
        verdicts.append(verdict)
    return pa.Table.from_pylist(verdicts, schema=VERDICTS.arrow_schema)
