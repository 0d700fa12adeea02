"""BM25 with batch and corpus statistics equals `rank_bm25`, the published numbers and the formula."""

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from rank_bm25 import BM25Okapi

from soft_trainer.data.split import Split
from soft_trainer.errors import UserError
from soft_trainer.estimators.bm25 import BM25Estimator

QUERIES = [
    "sort a list with quick sort",
    "sort a list with bubble sort",
    "read a file",
    "read a file line by line",
    "return the a a a of a",
    "close it",
]
CODES = [
    "def sort xs sort",
    "def bubble xs",
    "def read path open",
    "def lines path open open",
    "return a",
    "def close",
]


def fitted(queries=QUERIES, codes=None, **options) -> BM25Estimator:
    rows = {"docstring_tokens": [text.split() for text in queries]}
    if codes is not None:
        rows["code_tokens"] = [text.split() for text in codes]
    estimator = BM25Estimator(**options)
    estimator.fit(Split.from_pairs(Dataset.from_dict(rows)))
    return estimator


def close(found: torch.Tensor, wanted) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), atol=1e-6, rtol=0)


def test_columns_of_tokens_may_differ_in_the_type_of_their_texts():
    tokens = pa.array([text.split() for text in QUERIES], pa.large_list(pa.large_string()))
    estimator = BM25Estimator(document_column="code_tokens")
    estimator.fit(Split.from_pairs(Dataset(pa.table({"docstring_tokens": tokens, "code": pa.array(CODES)}))))
    expected = fitted(codes=CODES, document_column="code_tokens").similarity(range(6), range(6))
    close(estimator.similarity(range(6), range(6)), expected.tolist())


# ---- rank_bm25 ----

FORMULAS = {
    "robertson": lambda total, having: math.log((total - having + 0.5) / (having + 0.5)),
    "lucene": lambda total, having: math.log(1 + (total - having + 0.5) / (having + 0.5)),
}
SETTINGS = [
    *({}, {"k1": 2.0, "b": 0.3}, {"b": 0.0}, {"average_length": 11.5}, {"document_column": "code_tokens"}),
    *({"idf": name} for name in FORMULAS),
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("scope", ["batch", "corpus"])
def test_scores_are_those_of_rank_bm25_on_the_codes_of_the_batch_or_on_the_training_set(scope, options):
    generator = np.random.default_rng(0)
    words = [f"w{int(n)}" for n in generator.zipf(1.3, 8000) % 300]  # some words repeat within a text
    queries, codes = (
        [" ".join(words[start : start + int(generator.integers(1, 30))]) for start in range(first, first + 3900, 65)]
        for first in (0, 4000)
    )
    documents = [text.split() for text in (codes if "document_column" in options else queries)]
    rows, columns = np.split(generator.permutation(len(queries))[:26], [10])
    scoped = columns if scope == "batch" else range(len(queries))
    known = BM25Okapi([documents[row] for row in scoped], k1=options.get("k1", 1.2), b=options.get("b", 0.75))
    known.avgdl = options.get("average_length", known.avgdl)
    if "idf" in options:
        having = Counter(word for row in scoped for word in set(documents[row]))
        known.idf = {word: FORMULAS[options["idf"]](len(scoped), count) for word, count in having.items()}
    positions = range(len(columns)) if scope == "batch" else columns
    wanted = [[known.get_scores(queries[row].split())[position] for position in positions] for row in rows]
    close(fitted(queries, codes, scope=scope, **options).similarity(rows, columns), wanted)


def test_a_token_of_most_documents_is_raised_to_a_quarter_of_the_mean_idf():
    texts = ["a b", "a c", "a d", "e"]
    idf = {"a": math.log(1.5) - math.log(3.5)} | {word: math.log(3.5) - math.log(1.5) for word in "bcde"}
    floor = 0.25 * sum(idf.values()) / 5
    assert idf["a"] < 0 < floor
    weight = 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 1.75))
    wanted = [(floor + idf["b"]) * weight, floor * weight, floor * weight, 0.0]
    close(fitted(texts).similarity([0], range(4)), [wanted])


# ---- The published numbers and other formulas ----

# Token ids of a batch of queries, without special tokens, and their published in-batch BM25 scores.
PUBLISHED_IDS = [
    [6, 57, 22, 20, 6, 42],
    [6, 22, 11, 61, 67, 8, 8, 77],
    [6, 22, 57, 59, 25, 514, 49, 9, 58],
    [6, 94, 6, 17, 14, 19],
]
PUBLISHED = [
    [-5.555527907, -5.241747015, -4.986743106, -6.499353372],
    [-4.193502151, 2.67473812, -2.896410535, -3.249676686],
    [-4.193502151, -3.044522438, 1.940057252, -3.249676686],
    [-6.499353372, -4.394449155, -4.180665142, -2.724051513],
]


def test_robertson_is_the_published_bm25_on_token_ids():
    estimator = BM25Estimator(column="ids", idf="robertson", average_length=8.0)
    estimator.fit(Split.from_pairs(Dataset.from_dict({"ids": PUBLISHED_IDS})))
    close(estimator.similarity(range(4), range(4)), PUBLISHED)


# ---- Counting tokens ----


def test_a_text_column_is_split_at_white_space():
    estimator = BM25Estimator(column="docstring")
    estimator.fit(Split.from_pairs(Dataset.from_dict({"docstring": [f" {text}\n" for text in QUERIES]})))
    assert torch.equal(estimator.similarity(range(6), range(6)), fitted().similarity(range(6), range(6)))


@pytest.mark.parametrize("scope", ["batch", "corpus"])
@pytest.mark.parametrize("idf", ["okapi", "robertson", "lucene"])
@pytest.mark.parametrize("texts", [["sort a list", "", "read"], ["", ""], ["a"]])
def test_empty_documents_are_similar_to_none(texts, idf, scope):
    found = fitted(texts, idf=idf, scope=scope).similarity(range(len(texts)), range(len(texts)))
    assert torch.isfinite(found).all()
    empty = [row for row, text in enumerate(texts) if not text]
    assert not found[empty].any() and not found[:, empty].any()


@pytest.mark.parametrize("rows", [[3, 0], (3, 0), np.array([3, 0]), torch.tensor([3, 0])], ids=type)
def test_rows_of_any_kind_repeatedly(rows):
    estimator = fitted()
    first = estimator.similarity(rows, rows)
    assert first.shape == (2, 2) and torch.equal(estimator.similarity(rows, rows), first)
    assert torch.equal(estimator.similarity(rows, [0])[:, 0], fitted().similarity([3, 0], [0])[:, 0])
    assert estimator.similarity([0], rows).shape == (1, 2)


def test_fitting_again_forgets_the_first_rows():
    estimator = fitted()
    estimator.fit(Split.from_pairs(Dataset.from_dict({"docstring_tokens": [["x"], ["x", "y"], ["z"]]})))
    assert torch.equal(
        estimator.similarity(range(3), range(3)), fitted(["x", "x y", "z"]).similarity(range(3), range(3))
    )


# ---- User errors ----


@pytest.mark.parametrize(
    "options, words",
    [
        ({"idf": "tfidf"}, "idf='tfidf'.*okapi, robertson, lucene"),
        ({"scope": "epoch"}, "scope='epoch'.*batch, corpus"),
        ({"column": "words"}, "'words'.*docstring_tokens"),
        (
            {"document_column": "words"},
            "'words', but the code rows have only: gaps, stars, vectors; set code_column",
        ),
        ({"document_column": "gaps"}, "gaps.*row 2"),
        ({"document_column": "stars"}, "'stars', which contains int64"),
        ({"document_column": "vectors"}, "'vectors', which contains list<.*double>"),
    ],
)
def test_what_a_user_can_get_wrong(options, words):
    others = {"gaps": [["sort"], None], "stars": [3, 4], "vectors": [[0.5], [1.5]]}
    rows = Dataset.from_dict({"docstring_tokens": [["sort"], ["read"]]} | others)
    with pytest.raises(UserError, match=words):
        BM25Estimator(**options).fit(Split.from_pairs(rows))
