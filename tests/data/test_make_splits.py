"""Making splits from rows passed in Python."""

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from refusals import refused

from soft_trainer.data.load import evaluation_splits, load_rows, training_split


def test_names_of_columns_are_texts_and_different():
    frame = pd.DataFrame({0: [f"q{n}" for n in range(9)], 1: [f"c{n}" for n in range(9)]})
    assert load_rows(frame, "0", "1")["train"].to_pairs().column_names == ["docstring", "url", "code"]
    twice = pd.concat([frame, frame], axis=1)
    with refused("the data frame: two columns are called '0'"):
        load_rows(twice)


@pytest.mark.parametrize("column", ["docstring", "code"])
def test_a_column_without_values_is_named(column):
    rows = [{"docstring": "x", "code": "y"} | {column: None} for _ in range(3)]
    with refused(f"train_dataset, rows 1, 2, 3: column {column!r} is missing or empty"):
        training_split(rows)


def test_a_trainer_trains_on_one_split():
    with refused("train_dataset: expected one set of rows, not a dict of train, valid, test; pass one of its values"):
        training_split(load_rows(ROWS))


def test_equal_codes_have_one_id():
    split = training_split(Dataset.from_dict({"anchor": ["a", "b"], "positive": ["x", "x"]}))
    assert (split.judgments.relevant.toarray() == np.ones((2, 2))).all()


def test_queries_and_their_corpus_get_the_same_ids():
    queries = Dataset.from_dict({"question": ["a", "b"], "answer": ["x", "y"]})
    for corpora in (queries, {"own": queries}, None):
        sets = {"own": queries} if isinstance(corpora, dict) else queries
        found = evaluation_splits(sets, corpora)
        if isinstance(corpora, dict):
            found = found["own"]
        assert found.queries["url"][:] == found.corpus["url"][:]
        assert found.queries["url"][0].startswith("code:")
        assert (found.judgments.relevant.toarray() == np.eye(2)).all()


def pairs(*numbers: int) -> list[dict]:
    return [{"query": f"adds {n}", "code": f"x + {n}"} for n in numbers]


ROWS = pairs(*range(30))
SPLITS = {"train": ROWS[:20], "validation": ROWS[20:25], "test": ROWS[25:]}


def test_a_dict_has_splits():
    assert {name: len(split) for name, split in load_rows(SPLITS).items()} == {"train": 20, "valid": 5, "test": 5}
    with refused("'own' is not the name of a split; use train, "):
        load_rows({"own": ROWS})


def test_a_corpus_may_be_passed_beside_the_rows():
    queries = [{"docstring": "a", "url": "u1"}, {"docstring": "b", "url": "u0"}]
    corpus = [{"code": f"x + {n}", "url": f"u{n}"} for n in range(3)]
    test = load_rows({"test": queries}, codebase=corpus)["test"]
    assert test.judgments.relevant.nonzero()[1].tolist() == [1, 0] and len(test.corpus) == 3
    with refused("the rows, test: these queries have no corpus to rank"):
        load_rows({"test": queries})
    with refused("the rows, test, row 1: no function in the corpus has the url, such as 'u1'"):
        load_rows({"test": queries}, codebase=corpus[:1])
