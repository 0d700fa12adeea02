"""Splits of queries, corpus and judgments: selecting, joining, and looking up relevant codes."""

import itertools
import tracemalloc

import numpy as np
import pytest
from datasets import Dataset

from soft_trainer.data.load import training_split
from soft_trainer.data.split import NAMED, RelevantCodes, Split
from soft_trainer.errors import UserError

ROWS = [
    {"docstring": "sort a list", "code": "def sort(xs): pass", "url": "a"},
    {"docstring": "order a list", "code": "def sort(xs, key): pass", "url": "a"},
    {"docstring": "read a file", "code": "def read(path): pass", "url": None},
    {"docstring": "write a file", "code": "def write(path): pass", "url": ""},
]


def test_a_pair_is_a_query_and_a_code():
    split = Split.from_pairs(Dataset.from_list(ROWS))
    assert split.queries.column_names == ["docstring", "url"]
    assert split.corpus.column_names == ["code", "url"]
    assert split.judgments.pairs().tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert split.judgments.relevant.indices.dtype == np.int32
    assert split.to_pairs()[:] == Dataset.from_list(ROWS).select_columns(["docstring", "url", "code"])[:]


def test_the_rows_of_a_selection_are_numbered_from_zero():
    rows = Dataset.from_list(ROWS).select([3, 0])
    split = Split.from_pairs(rows)
    assert split.queries._indices is None
    assert split.queries["docstring"][:] == ["write a file", "sort a list"]


def test_negatives_are_wrong_and_unknown_ones_join_the_corpus():
    rows = [row | {"negatives": []} for row in ROWS]
    rows[2]["negatives"] = ["a", "def write(path): pass", "def read(path):\n pass", "b()"]
    rows[3]["negatives"] = ["b()", "def write(path): pass"]
    split = training_split([row | {"url": row["url"] or ""} for row in rows])
    assert split.corpus["code"][:][4:] == ["def read(path):\n pass", "b()"]
    wrong = split.judgments.negatives.tocoo()
    assert set(zip(wrong.row.tolist(), wrong.col.tolist(), strict=True)) == {(2, 0), (2, 3), (2, 4), (2, 5), (3, 5)}
    assert (wrong.data == NAMED).all() and not split.judgments.scores().nnz
    assert split.judgments.relevant.shape == (4, 6)
    assert split.judgments.first_queries().tolist() == [0, 1, 2, 3, -1, -1]


@pytest.mark.parametrize("names", [["https://example.org/#L1"], [["nested"]]])
def test_negatives_that_are_no_codes_are_named_with_their_row(names):
    rows = [row | {"negatives": names} for row in ROWS]
    with pytest.raises(UserError, match="row 1"):
        training_split(rows)


def test_equal_texts_have_equal_answers():
    generator = np.random.default_rng(0)
    query_texts = generator.integers(12, size=40).astype(np.uint64)
    code_texts = generator.integers(15, size=50).astype(np.uint64)
    judged = generator.random((40, 50)) < 0.02
    queries = Dataset.from_dict({"docstring": ["x"] * 40})
    corpus = Dataset.from_dict({"code": ["x"] * 50})
    pairs = np.argwhere(judged)
    split = Split.from_grades(queries, corpus, pairs, np.ones(len(pairs)))
    chosen_queries = generator.integers(40, size=9)
    chosen_codes = generator.integers(50, size=17)
    known = {(query_texts[query], code_texts[code]) for query, code in pairs}
    expected = [
        (query_texts[query], code_texts[code]) in known
        for query, code in itertools.product(chosen_queries, chosen_codes)
    ]
    answers = RelevantCodes(split.judgments.relevant, query_texts, code_texts).among(chosen_queries, chosen_codes)
    assert answers.flatten().tolist() == expected
    assert any(expected)


def test_many_rows_with_one_id_take_little_memory():
    rows = Dataset.from_dict(
        {
            "docstring": [f"q{n}" for n in range(100_000)],
            "code": [f"c{n}" for n in range(100_000)],
            "url": ["u"] * 100_000,
        }
    )
    tracemalloc.start()
    split = Split.from_pairs(rows)
    texts = np.arange(100_000)
    answers = RelevantCodes(split.judgments.stored, texts, texts)
    assert answers.among(np.arange(512), np.arange(600)).all()
    assert answers.contain(np.arange(3), np.array([[7], [8], [9]])).all()
    assert split.judgments.first_queries()[5] == 5
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6
