"""Joins the rows of several sources, whose columns may differ, into one table of each side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from datasets import Dataset, Features, Value

from soft_trainer.data.judgments import Split
from soft_trainer.data.tokens import side_texts
from soft_trainer.encoders.profiles import EncoderProfile

KEPT = ("language", "url")


def join_sources(parts: Mapping[str, Split], profile: EncoderProfile) -> Split:
    """Joins splits for training. Each side has one column, with the text that the encoder reads in each source.

    Raises:
        UserError: a source lacks the columns that the encoder reads.
    """
    joined = {}
    for name, part in parts.items():
        queries = common_columns(part.queries, "query", profile)
        corpus = common_columns(part.corpus, "code", profile)
        joined[name] = dataclasses.replace(part, queries=queries, corpus=corpus)
    return Split.joined(joined)


def common_columns(rows: Dataset, side: str, profile: EncoderProfile) -> Dataset:
    """Returns rows with the text that the encoder reads on one side, the language and the id."""
    columns = getattr(profile, f"{side}_columns")
    usual = {"query": "docstring", "code": "code"}[side]
    target = usual if usual in columns else columns[0]
    values = {target: list(side_texts(rows, side, profile))}
    for name in KEPT:
        values[name] = rows[name][:] if name in rows.column_names else [None] * len(rows)
    return Dataset.from_dict(values, features=Features({name: Value("string") for name in values}))
