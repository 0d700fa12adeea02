"""Rows that are passed from Python."""

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer.data.columns import ColumnNames
from soft_trainer.data.load import load_tables
from soft_trainer.data.python_rows import as_evaluations, as_split


def test_names_of_columns_are_texts_and_different():
    frame = pd.DataFrame({0: [f"q{n}" for n in range(9)], 1: [f"c{n}" for n in range(9)]})
    assert load_tables(frame, ColumnNames("0", "1"))["train"].column_names[:2] == ["docstring", "code"]
    twice = pd.concat([frame, frame], axis=1)
    with refused("the data frame: two columns are called '0'"):
        load_tables(twice)


@pytest.mark.parametrize("column", ["docstring", "code"])
def test_a_column_without_values_is_named(column):
    rows = [{"docstring": "x", "code": "y"} | {column: None} for _ in range(3)]
    with refused(f"train_dataset: column {column!r} is missing or empty"):
        as_split(rows, "train_dataset")


def test_recognised_columns_get_the_names_of_codesearchnet():
    rows = Dataset.from_dict({"anchor": ["a", "b"], "positive": ["x", "x"], "url": ["page", "page"]})
    split = as_split(rows, "train_dataset")
    assert split.to_pairs().column_names == ["docstring", "code"]
    assert (split.judgments.right.toarray() == np.eye(2)).all()


def test_queries_and_their_corpus_get_the_same_ids():
    queries = Dataset.from_dict({"question": ["a", "b"], "answer": ["x", "y"]})
    for corpora in (queries, {"own": queries}):
        sets = {"own": queries} if isinstance(corpora, dict) else queries
        named, corpus = as_evaluations(sets, corpora)
        if isinstance(corpora, dict):
            named = named["own"]
            corpus = corpus["own"]
        assert named["url"][:] == corpus["url"][:] and named["url"][0].startswith("code:")
