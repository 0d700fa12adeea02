"""Negatives read from files: a round trip, a column of the rows, sentence-transformers' layouts, and bad input."""

import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from refusals import refused

from soft_trainer.data.negative_files import (
    TrainingRows,
    column_negatives,
    load_negatives,
    tuple_negatives,
    write_negatives,
)
from soft_trainer.data.negatives import Negatives
from soft_trainer.errors import UserError

# Rows 0 and 3 share a query, rows 1 and 4 a code; row 2 has no url, row 4 that of row 0.
TEXTS = (
    ["sort a list", "read a file", "send mail", "sort a list", "load a file"],
    [f"def {name} pass" for name in ("sort(xs):", "read(path):", "send(mail):", "order(xs):", "read(path): ")],
    ["u/0", "u/1", None, "u/3", "u/0"],
)
ROWS = TrainingRows(*TEXTS)
FURTHER = [{"url": "u/far", "code": "def far(): pass", "code_tokens": ["def", "far"]}]


def lists(negatives: Negatives) -> list[list]:
    """The candidates of each row: row numbers, and the texts of code-only rows."""
    names = [*range(len(negatives)), *(row["code"] for row in negatives.code_only)]
    ranges = zip(negatives.starts[:-1], negatives.starts[1:], strict=True)
    return [[names[code] for code in negatives.codes[start:end]] for start, end in ranges]


def mined() -> Negatives:
    scores = np.array([0.1, 1 / 3, -2.5, 7.25, np.nan], np.float32)[[1, 0, 3, 1, 2, 0]]
    codes = np.array([1, 2, 5, 0, 4, 3])
    return Negatives(
        np.array([0, 2, 4, 5, 5, 6]), codes, scores, np.array([9, 0.7, np.nan, 1, 2], np.float32), FURTHER
    )


@pytest.mark.parametrize("name", ["negatives.jsonl", "negatives.jsonl.gz"])
def test_a_file_gives_back_the_negatives_to_the_bit(tmp_path, name):
    write_negatives(tmp_path / name, mined(), ROWS, "bm25")
    read = load_negatives(tmp_path / name, ROWS)
    for field in ("starts", "codes", "scores", "own"):
        np.testing.assert_array_equal(getattr(read, field), getattr(mined(), field), err_msg=field)
    assert list(read.code_only) == FURTHER
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_first_line_says_what_the_file_is_and_codes_go_by_url(tmp_path):
    path = tmp_path / "negatives.jsonl"
    write_negatives(path, mined(), ROWS, "bm25")
    head, code_only, first, second, *_ = map(json.loads, path.read_text().splitlines())
    expected = {"estimator": "bm25", "fingerprint": ROWS.fingerprint, "rows": 5, "code_only": 1}
    assert head == {"soft_trainer_negatives": 1} | expected
    assert code_only == FURTHER[0]
    assert first == {"url": "u/0", "positive_score": 9.0, "negatives": ["u/1", "#3"], "scores": [0.33333334, 0.1]}
    # The url of row 4 names row 0, so row 4 is identified by its number.
    assert second["negatives"] == ["#6", "u/0"]


def test_a_file_made_for_other_rows_is_refused(tmp_path):
    path = tmp_path / "negatives.jsonl"
    write_negatives(path, mined(), ROWS, "bm25")
    for other in (TrainingRows(*(column[::-1] for column in TEXTS)), TrainingRows(*(column[:4] for column in TEXTS))):
        with refused("negatives.jsonl: made for other rows (5 rows", f"training set has {len(other)} "):
            load_negatives(path, other)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match="4 rows, the first line says 5: the file is not whole"):
        load_negatives(path, ROWS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no rows"),
        ("[1]\n", "row 1: expected a JSON object, not list"),
        ("{", "row 1: not valid JSON"),
        ('{"query": "sort a list", "code": "x"}\n', "row 1: columns query, code: expected a query, a document and t"),
    ],
)
def test_files_that_hold_no_negatives_are_named(tmp_path, content, words):
    path = tmp_path / "negatives.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=f"negatives.jsonl.*{words}"):
        load_negatives(path, ROWS)
    with pytest.raises(UserError, match="other.jsonl: no such file"):
        load_negatives(tmp_path / "other.jsonl", ROWS)


def test_tables_that_hold_no_negatives_are_named(tmp_path):
    table = Dataset.from_dict({"query": ["sort a list"], "code": ["x"], "negative": [["y y"]]})
    table.to_parquet(str(tmp_path / "lists.parquet"))
    (tmp_path / "broken.parquet").write_text("x")
    (tmp_path / "empty").mkdir()
    DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "two"))
    for name, words in (
        ("lists.parquet", "row 1: the document is list, text is expected"),
        ("broken.parquet", "cannot be read"),
        ("empty", "no rows"),
        ("two", "one table of negatives is expected, not train, test"),
    ):
        with refused(f"{name}", words):
            load_negatives(tmp_path / name, ROWS)


def test_a_column_names_codes_by_url_or_text():
    values = [["u/1", "def far(): pass", "def  far():  pass"], "def sort(xs):   pass", None, [], ["u/1", "u/3", "u/3"]]
    negatives = column_negatives(values, ROWS)
    # Texts that differ in white space alone are one code; row 4's first negative has the text of its own code.
    assert lists(negatives) == [[1, "def far(): pass"], [0], [], [], [3]]
    assert np.isnan(negatives.scores).all() and np.isnan(negatives.own).all() and len(negatives.own) == 5
    assert negatives.code_only == [{"code": "def far(): pass"}]


def test_a_url_that_is_no_code_is_named_with_its_row():
    without = TrainingRows(*TEXTS[:2], ["u/0", "u/1", "", "u/3", "u/0"])
    with refused("rows, row 1: the negative '' is neither the url of a training row"):
        column_negatives([[""], None, None, None, None], without, place="rows")
    with refused("train.jsonl, row 2: the negative 'u/17' is neither the url of a training row"):
        column_negatives([None, ["u/1", "u/17"], None, None, None], ROWS, place="train.jsonl")


SORT, READ, MAIL, ORDER = TEXTS[1][:4]
FAR = "def far(): pass"
TUPLES = {
    "triplet": (
        ["anchor", "positive", "negative"],
        [
            ("sort a list", SORT, READ, [0.9, 0.5]),
            ("sort a list", SORT, FAR, [0.9, 0.6]),
            ("sort a list", ORDER, READ, [0.8, 0.5]),
            ("read a file", READ, MAIL, [0.7, 0.4]),
        ],
    ),
    "n-tuple": (
        ["anchor", "positive", "negative_1", "negative_2"],
        [
            ("sort a list", SORT, READ, FAR, [0.9, 0.5, 0.6]),
            ("sort a list", ORDER, READ, FAR, [0.8, 0.5, 0.6]),
            ("read a file", READ, MAIL, SORT, [0.7, 0.4, 0.3]),
        ],
    ),
}


@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scores"])
@pytest.mark.parametrize("name", TUPLES)
def test_tuples_of_sentence_transformers(tmp_path, name, scored):
    columns, lines = TUPLES[name]
    table = Dataset.from_list([dict(zip([*columns, "scores"], line, strict=True)) for line in lines])
    table = table if scored else table.remove_columns("scores")
    table.to_parquet(tmp_path / "table.parquet")
    table.to_json(tmp_path / "table.jsonl")
    table.save_to_disk(tmp_path / "table")
    of_read = [2, 0] if name == "n-tuple" else [2]
    files = [load_negatives(tmp_path / file, ROWS) for file in ("table.parquet", "table.jsonl", "table")]
    for negatives in (tuple_negatives(table, ROWS), *files):
        of_sort = [FAR, 1] if scored else [1, FAR]
        assert lists(negatives) == [of_sort, of_read, [], of_sort, []]
        if scored:
            assert negatives.scores.tolist() == pytest.approx([0.6, 0.5, 0.4, *[0.3] * (len(of_read) - 1), 0.6, 0.5])
            np.testing.assert_allclose(negatives.own, [0.9, 0.7, math.nan, 0.8, math.nan], rtol=1e-6)
        else:
            assert np.isnan(negatives.scores).all() and np.isnan(negatives.own).all()


def test_a_layout_of_other_rows_is_refused():
    table = [
        {"anchor": "fly to the moon", "positive": SORT, "negative": READ},
        {"anchor": "sort a list", "positive": SORT, "negative": READ},
    ]
    with pytest.raises(UserError, match="^negatives: made for other rows: 1 of its 2 queries .*'fly to the moon'$"):
        tuple_negatives(table, ROWS)


class WordModel:
    """The part of a SentenceTransformer that mining needs: embeddings are counts of characters."""

    device = torch.device("cpu")

    def encode_query(self, texts, **options):
        counts = np.array([[text.count(chr(letter)) for letter in range(97, 123)] for text in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)

    encode_document = encode_query

    def similarity(self, queries, documents):
        return torch.as_tensor(queries) @ torch.as_tensor(documents).T

    def similarity_pairwise(self, queries, documents):
        return (torch.as_tensor(queries) * torch.as_tensor(documents)).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scores"])
@pytest.mark.parametrize("name", TUPLES)
def test_tables_that_sentence_transformers_itself_makes(rows, name, scored):
    from sentence_transformers.util import mine_hard_negatives

    queries, codes = ([row[name] for row in rows] for name in ("docstring", "code"))
    own = TrainingRows(queries, codes, [None] * len(rows))
    pairs, options = Dataset.from_dict({"question": queries, "answer": codes}), {"output_scores": scored}
    table = mine_hard_negatives(pairs, WordModel(), num_negatives=3, output_format=name, verbose=False, **options)
    vectors = [WordModel().encode_query(texts) for texts in (queries, codes)]
    scores = vectors[0] @ vectors[1].T
    negatives = tuple_negatives(table, own)
    order = np.argsort(-(scores - 9 * np.eye(len(own))), axis=1)[:, :3]
    assert [set(codes) for codes in lists(negatives)] == [set(codes) for codes in order.tolist()]
    if scored:
        np.testing.assert_allclose(negatives.own, scores.diagonal(), rtol=1e-5)
        np.testing.assert_allclose(negatives.scores, np.take_along_axis(scores, order, 1).ravel(), rtol=1e-5)
