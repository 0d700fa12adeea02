"""Our rows become data sets of sentence-transformers and come back the same, with negatives and scores."""

import numpy as np
import pytest
from datasets import Dataset, Features, Value
from refusals import refused

from soft_trainer import BM25Estimator
from soft_trainer.data.negative_files import TrainingRows, tuple_negatives
from soft_trainer.data.negatives import Negatives
from soft_trainer.sentence_transformers import SoftInfoNCELoss, from_sentence_transformers, to_sentence_transformers

ROWS = [
    {"docstring": "sort a list", "code": "def sort(xs): pass", "url": "u/0"},
    {"docstring": "read a file", "code": "def read(path): pass", "url": "u/1"},
    {"docstring": "send mail", "code": "def send(mail): pass", "url": "u/2"},
    {"docstring": "send mail", "code": "def send(mail): pass", "url": "u/3"},
]
SORT, READ, SEND = (row["code"] for row in ROWS[:3])
FAR, OTHER = "def far(): pass", "def other(): pass"
LISTS = [["u/1", FAR], [OTHER, "u/0", FAR], ["u/0"], [SORT, READ]]
TEXTS = [[READ, FAR], [OTHER, SORT, FAR], [SORT], [SORT, READ]]
SCORES = [[0.5, 0.25], [0.75, 0.5, -1.0], [0.125], [0.5, 0.25]]
OWN = [1.0, 0.875, 0.75, 0.75]


def made(scores=True) -> list[dict]:
    rows = [row | {"negatives": names} for row, names in zip(ROWS, LISTS, strict=True)]
    if scores:
        for row, values, own in zip(rows, SCORES, OWN, strict=True):
            row |= {"negative_scores": values, "positive_score": own}
    return rows


def test_pairs_have_row_numbers_which_may_repeat_and_come_back():
    dataset = to_sentence_transformers(ROWS)
    assert dataset.column_names == ["anchor", "positive", "label"] and dataset["label"][:] == [0, 1, 2, 3]
    again = from_sentence_transformers(dataset, language="ruby")
    assert again.column_names == ["docstring", "code", "url", "language"] and again["url"][0] == "row-1"
    for name in ("docstring", "code"):
        assert again[name][:] == [row[name] for row in ROWS]
    assert len(from_sentence_transformers(dataset.remove_columns("label"))) == 4
    for order in ([0, 0, 1, 2], [0, 1, 2, 0, 1, 2], [1, 2]):
        rows = from_sentence_transformers(dataset.select(order))
        assert rows["code"][:] == [ROWS[row]["code"] for row in order] and "negatives" not in rows.column_names


def test_tuples_have_equally_many_negatives(capsys):
    dataset = to_sentence_transformers(made(), number=2)
    assert "1 of 4 rows have too few negatives" in capsys.readouterr().err
    assert dataset.column_names == ["anchor", "positive", "negative_1", "negative_2", "label"]
    assert list(dataset[1].values()) == ["read a file", READ, OTHER, SORT, 1]
    assert to_sentence_transformers(made()).column_names == ["anchor", "positive", "negative_1", "label"]
    again = from_sentence_transformers(dataset)
    assert again["negatives"][:] == [TEXTS[0], TEXTS[1][:2], TEXTS[3]]
    assert "negative_scores" not in again.column_names
    assert to_sentence_transformers(again).to_list() == dataset.to_list()


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("layout", ["triplet", "labeled-list"])
def test_lists_of_any_length_come_back(layout, scores):
    rows = made()[:3] if layout == "triplet" else made()  # triplets do not tell equal rows apart
    dataset = to_sentence_transformers(rows, layout=layout, scores=scores)
    again = from_sentence_transformers(dataset)
    for name, expected in (("docstring", [row["docstring"] for row in rows]), ("negatives", TEXTS[: len(rows)])):
        assert again[name][:] == expected
    assert ("negative_scores" in again.column_names) == ("positive_score" in again.column_names) == scores
    if scores:
        assert again["negative_scores"][:] == SCORES[: len(rows)] and again["positive_score"][:] == OWN[: len(rows)]
    assert to_sentence_transformers(again, layout=layout, scores=scores).to_list() == dataset.to_list()


def test_triplets_are_rows_of_one_negative_each_and_the_loss_takes_tuples(sentence_transformer):
    dataset = to_sentence_transformers(made(), layout="triplet")
    assert dataset.column_names == ["anchor", "positive", "negative", "label"] and len(dataset) == 8
    assert dataset["negative"][:3] == [READ, FAR, OTHER] and dataset["label"][:] == list(range(8))
    one = to_sentence_transformers(made(), layout="triplet", number=1, scores=True)
    assert one.column_names == ["anchor", "positive", "negative", "scores"] and one["scores"][0] == [1.0, 0.5]
    estimator = BM25Estimator(document_column="code_tokens")
    loss = SoftInfoNCELoss(sentence_transformer, estimator, to_sentence_transformers(made(), number=2))
    assert loss.rows.negatives.tolist() == [[1, 4], [3, 0], [0, 1]]
    assert loss.rows.rows["code"][3:] == [OTHER, FAR]


def test_labelled_pairs_are_read():
    table = [("sort a list", SORT, 1), ("sort a list", READ, 0), ("read a file", READ, 1), ("sort a list", FAR, 0)]
    names = ["query", "answer", "label"]
    dataset = Dataset.from_list([dict(zip(names, row, strict=True)) for row in table])
    large = Features({name: Value("int64" if name == "label" else "large_string") for name in names})
    for each in (dataset, dataset.cast(large)):  # as Polars and pandas write texts
        rows = from_sentence_transformers(each)
        assert rows["code"][:] == [SORT, READ] and rows["negatives"][:] == [[READ, FAR], []]
    for labels in ([1, 0], [True, False]):  # numbers of two rows they could be, too
        pairs = {"query": ["sort a list"] * 2, "answer": [SORT, READ], "label": labels}
        rows = from_sentence_transformers(Dataset.from_dict(pairs))
        assert rows["code"][:] == [SORT] and rows["negatives"][:] == [[READ]]


def test_negatives_that_were_mined_are_taken_with_their_codes():
    mined = Negatives(
        np.array([0, 2, 3, 4, 5]),
        np.array([1, 4, 4, 0, 1]),
        np.array([0.5, 0.25, 0.5, 0.75, 0.125], np.float32),
        np.ones(4, np.float32),
        [{"code": FAR}],
    )
    dataset = to_sentence_transformers(ROWS, negatives=mined, layout="labeled-list", scores=True)
    assert dataset["documents"][:2] == [[SORT, READ, FAR], [READ, FAR]] and dataset["labels"][0] == [1, 0, 0]
    texts = TrainingRows(*([row[name] for row in ROWS] for name in ("docstring", "code", "url")))
    triplets = to_sentence_transformers(ROWS, negatives=mined, layout="triplet", scores=True)
    again = tuple_negatives(triplets, texts)
    # The last two rows are equal, so that they share their negatives.
    np.testing.assert_array_equal(again.scores[:3], mined.scores[:3])
    np.testing.assert_array_equal(again.own[:2], mined.own[:2])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": "pairs"}, "layout='pairs': use one of n-tuple, triplet, labeled-list"),
        ({"rows": []}, "rows: there are no rows"),
        ({"number": 0}, "number=0: must be 1 or more"),
        ({"number": 9}, "no row has 9 negatives"),
        ({"rows": ROWS, "layout": "triplet"}, "the rows have no column 'negatives'; give negatives="),
        ({"rows": ROWS, "scores": True}, "the rows have no column 'negatives'"),
        ({"rows": made(scores=False), "scores": True, "number": 1}, "scores: not all of the negatives' scores"),
        ({"rows": [made()[0] | {"negatives": [], "negative_scores": []}]}, "row 1 has no negatives: name number="),
        ({"rows": [made()[0] | {"negative_scores": [1.0]}]}, "rows, row 1: 2 negatives and 1 scores"),
        ({"rows": [{"text": "a"}]}, "no column for the query: the rows have text"),
        ({"rows": made()[:3], "negatives": Negatives(np.zeros(2, int), *[np.zeros(0)] * 2, np.zeros(1))}, "of 1 rows"),
    ],
)
def test_what_cannot_be_made_is_one_line(changes, words):
    with refused(words):
        to_sentence_transformers(**{"rows": made()} | changes)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"anchor": ["a", "b", "c"], "label": [1, 2, 3]}, "columns anchor, label: expected a query, a document"),
        ({"a": ["a"] * 3, "b": ["b"] * 3, "label": [0, 0, 0]}, "no row has a right code"),
        ({"a": ["a"], "b": ["b"], "c": ["c"]}, "columns a, b, c: expected a query"),
        ({"a": ["a"] * 3, "b": ["b"] * 3, "label": [0.9, 0.1, 0.5]}, "dataset: column 'label': whole numbers are"),
        ({"a": ["a"] * 2, "b": ["b"] * 2, "label": [0, 2], "score": [0.1, 0.2]}, "row 2: label 2: 1 (right) or 0"),
        ({"a": ["a"] * 2, "b": ["b"] * 2, "score": [0.1, 0.2]}, "scores of labelled pairs do not say which"),
        ({"a": ["a", "a"], "b": ["b", None]}, "dataset, row 2: the document has no text"),
        ({"a": ["a", None], "b": ["b", "c"], "negative": ["d", "e"]}, "dataset, row 2: the query has no text"),
        ({"a": ["a"], "b": ["b"], "negative_1": [None]}, "dataset, row 1: the document has no text"),
    ],
)
def test_what_is_no_layout_is_one_line(columns, words):
    with refused(words):
        from_sentence_transformers(Dataset.from_dict(columns))
