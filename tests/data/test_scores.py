"""Scores of positives and negatives that come with the rows, in every form that is read."""

import math

import numpy as np
import pytest
from datasets import Dataset
from refusals import refused
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives

from soft_trainer.data.column_names import CODES
from soft_trainer.data.columns import known_columns, row_texts
from soft_trainer.data.load import read_source, training_split
from soft_trainer.data.make_splits import Context
from soft_trainer.data.split import Split
from soft_trainer.encoders.export import export_encoder

PAIR = {"query": "q", "code": "c"}
OTHER = {"query": "r", "code": "d"}
TRIPLE = PAIR | {"negative_1": "x", "negative_2": "y"}


def scores_of(split: Split) -> dict[str, dict[str, float]]:
    """Returns the known scores of each query's functions, by their texts."""
    codes = list(row_texts(split.corpus, known_columns(split.corpus, CODES)[0]))
    known = split.judgments.scores().tocoo()
    found = {query: {} for query in split.queries["docstring"][:]}
    for query, code, score in zip(known.row, known.col, known.data.tolist(), strict=True):
        found[split.queries["docstring"][int(query)]][codes[code]] = round(score, 5)
    return found


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([TRIPLE | {"scores": [0.9, 0.5, 0]}], {"q": {"c": 0.9, "x": 0.5, "y": 0}}),
        ([TRIPLE | {"negative_1": None, "scores": [3, 2, 1]}], {"q": {"c": 3, "y": 1}}),
        ([TRIPLE | {"scores": [None, math.nan, -4]}], {"q": {"y": -4}}),
        (
            [TRIPLE | {"scores": None}, TRIPLE | {"query": "r", "scores": [1, 2, 3]}],
            {"q": {}, "r": dict(c=1, x=2, y=3)},
        ),
        ([PAIR | {"negatives": ["x", "", "x"], "negative_scores": [1, 2, 3]}], {"q": {"x": 1}}),
        ([PAIR | {"neg": ["x"], "neg_scores": [1], "pos_scores": 2}], {"q": {"c": 2, "x": 1}}),
        (
            [{"query": "q", "pos": ["c", "e"], "neg": ["x"], "pos_scores": [4, 3], "neg_scores": [1]}],
            {"q": dict(c=4, e=3, x=1)},
        ),
        ([{"query": "q", "pos": ["c", " ", "e"], "neg": ["x"], "scores": [4, 3, 2, 1]}], {"q": dict(c=4, e=2, x=1)}),
        ([{"query": "q", "pos": ["c", "e"], "positive_scores": [4, None]}], {"q": {"c": 4}}),
        (
            [{"docstring": "q", "code_tokens": ["c", "d"], "negatives": ["x"], "scores": [2, 1]}],
            {"q": {"c d": 2, "x": 1}},
        ),
    ],
)
def test_scores_are_read_with_their_functions(rows, expected):
    split = training_split(rows)
    assert scores_of(split) == expected
    assert not [name for name in (*split.queries.column_names, *split.corpus.column_names) if "score" in name]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [TRIPLE | {"scores": [1.0, 2.0, 3.0]}, TRIPLE | {"scores": [1.0, 2.0]}],
            "row 2: scores has 2 values for 3 functions",
        ),
        (
            [PAIR | {"negatives": ["x"], "negative_scores": [1.0, 2.0]}],
            "row 1: negative_scores has 2 values for 1 functions",
        ),
        ([{"query": "q", "pos": ["c"], "pos_scores": [1.0, 2.0]}], "row 1: pos_scores has 2 values for 1 functions"),
        ([PAIR | {"negative": "x", "scores": "[0.5, 0.1]"}], "row 1: scores contains '[0.5, 0.1]'; expected numbers"),
        ([PAIR | {"negative": "x", "scores": [math.inf, 0.1]}], "row 1: scores contains inf; expected numbers"),
        ([PAIR | {"negative": 5, "scores": [0.5, 0.1]}], "row 1: a column of negatives contains 5; expected"),
        ([PAIR | {"score": 1}, PAIR | {"code": "x", "score": 0}], "scores do not say which functions answer"),
        ([{"query": "q", "pos": ["c", "x"], "scores": [2, 1]}], "scores do not say which functions answer"),
        ([{"query": "q", "answer": ["c", "x"], "scores": [2, 1]}], "scores do not say which functions answer"),
        ([{"query": "q", "pos": ["c", "x"], "labels": [1, 0]}], "column 'labels' contains lists; write each positive"),
        ([PAIR | {"score": 1.0, "label": 0}], "row 1: column 'label' is 0"),
    ],
)
def test_scores_that_do_not_fit_are_named_with_their_row(rows, message):
    with refused(message):
        training_split(rows)


@pytest.mark.parametrize(
    "rows",
    [
        [PAIR | {"score": 1}, OTHER | {"score": 0}],  # every function answers its query
        [PAIR | {"score": 1, "negative": "x"}],  # a margin, or the score of the positive
        [PAIR | {"score": 1, "scores": "8/10", "pos_scores": "high"}],
    ],
)
def test_a_score_whose_meaning_is_unclear_is_ignored(rows, capsys):
    split = training_split(rows)
    assert split.judgments.scores().nnz == 0 and len(split) == len(rows)
    assert "ignoring column 'score'" in capsys.readouterr().err


def test_scores_stay_with_their_pairs():
    first = training_split([TRIPLE | {"scores": [3, 2, 0]}, OTHER | {"scores": [5], "negative_1": None}], "first")
    second = training_split([{"query": "s", "code": "e", "negatives": ["x"], "scores": [7, 6]}])
    third = training_split([{"query": "t", "code": "f"}])
    joined = Split.joined({"first": first, "second": second, "third": third})
    expected = {"q": {"c": 3, "x": 2, "y": 0}, "r": {"d": 5}, "s": {"e": 7, "x": 6}, "t": {}}
    assert scores_of(joined) == expected
    turned = joined.select(np.array([2, 0]), np.arange(len(joined.corpus))[::-1])
    assert scores_of(turned) == {name: expected[name] for name in ("s", "q")}
    assert scores_of(joined.keep(np.array([1, 2]))) == {name: expected[name] for name in ("r", "s")}
    other = training_split([TRIPLE | {"scores": [4, 2, 0]}, OTHER | {"scores": [5], "negative_1": None}])
    assert first.fingerprint() != other.fingerprint()


# ---- As sentence-transformers writes them ----


@pytest.fixture(scope="module")
def scorer(_model, tokenizer, profile, tmp_path_factory):
    folder = export_encoder(_model, tokenizer, profile, tmp_path_factory.mktemp("scorer"))
    return SentenceTransformer(str(folder), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "ending"),
    [(("query", "code"), ".jsonl"), (("anchor", "positive"), ".parquet"), (("question", "answer"), ".jsonl")],
)
def test_mined_rows_load_with_the_same_numbers_or_are_refused(rows, scorer, columns, ending, tmp_path):
    query, code = columns
    pairs = Dataset.from_dict({query: [row["docstring"] for row in rows], code: [row["code"] for row in rows]})
    options = {"num_negatives": 3, "output_scores": True, "verbose": False, "relative_margin": 0.01}
    given = {}
    for form in ("triplet", "n-tuple", "labeled-pair", "labeled-list"):
        mined = mine_hard_negatives(pairs, scorer, output_format=form, **options)
        path = str(tmp_path / f"{form}{ending}")
        mined.to_parquet(path) if ending == ".parquet" else mined.to_json(path)
        given[form] = mined
    expected = {}
    for row in given["labeled-pair"]:
        expected.setdefault(row[query], {})[row[code]] = round(row["score"], 5)
    assert sum(map(len, expected.values())) > 40
    for form, mined in given.items():
        if form.startswith("labeled"):  # which function is the positive is in its order only
            with refused("which functions answer", "output_format='n-tuple'"):
                training_split(mined)
            continue
        for found in (scores_of(training_split(mined)), scores_of(load_whole(tmp_path / f"{form}{ending}"))):
            known = {query: scores for query, scores in expected.items() if query in found}
            assert found.keys() <= expected.keys() and found == {name: known[name] for name in found}, form


def load_whole(path) -> Split:
    """Loads a file without dividing it."""
    return read_source(path, Context(needed=("train",), division=None))["train"]
