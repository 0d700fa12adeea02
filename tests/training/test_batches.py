"""A process's batch has its queries of the global batch, the codes to compare them with, and the right targets."""

import dataclasses

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy import sparse

from soft_trainer.criterion import Criterion
from soft_trainer.data.columns import text_ids
from soft_trainer.data.split import RelevantCodes, Split
from soft_trainer.data.tokens import TokenColumn
from soft_trainer.encoders.encoding import Collator
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.training import targets as making
from soft_trainer.training.batches import TrainBatches, relevant_codes
from soft_trainer.training.collator import PairCollator
from soft_trainer.training.targets import TargetMaker

ROWS = 10


@pytest.fixture
def tokens():
    """Token ids: row r has the query [100 + r] and the code [200 + r, 200 + r]."""
    ids = {"query": [[100 + row] for row in range(ROWS)], "code": [[200 + row] * 2 for row in range(ROWS)]}
    return {side: TokenColumn(Dataset.from_dict(ids), side) for side in ids}


def first_ids(batch) -> tuple[list[int], list[int]]:
    """Returns the first token of each query and of each function."""
    queries, codes = (inputs["input_ids"][:, 0] for inputs in batch.passes)
    return queries.tolist(), codes.tolist()


def padding(largest: int | None = None) -> PairCollator:
    return PairCollator(Collator(0), {"query": 8, "code": 8}, {"query": 0, "code": 0}, largest)


FIVE = [7, 2, 5, 0, 9]


def batches_of(tokens, collator=None, answers=None, **options) -> TrainBatches:
    """Makes `TrainBatches` in which pair i has query i and code i."""
    rows = np.arange(ROWS)
    options = {"target_maker": TargetMaker(Criterion("info_nce"), relevant=answers)} | options
    return TrainBatches(tokens, np.stack([rows, rows], axis=1), collator or padding(), **options)


@pytest.mark.parametrize(
    "options, rows, code_rows, positives",
    [
        ({}, FIVE, FIVE, [0, 1, 2, 3, 4]),
        ({"rank": 0, "world_size": 2}, [7, 2, 5], FIVE, [0, 1, 2]),
        ({"rank": 1, "world_size": 2}, [0, 9], FIVE, [3, 4]),
        ({"rank": 1, "world_size": 2, "gather": False}, [0, 9], [0, 9], [0, 1]),
    ],
    ids=["one process", "first of two", "second of two", "without gathering"],
)
def test_a_process_takes_its_part_and_meets_the_codes_that_are_gathered(tokens, options, rows, code_rows, positives):
    batch = batches_of(tokens, **options).__getitems__(FIVE)
    assert batch.rows.tolist() == rows and batch.code_rows.tolist() == code_rows
    assert first_ids(batch) == ([100 + row for row in rows], [200 + row for row in rows])
    assert batch.targets.positives.tolist() == positives
    assert batch.sizes == ((3, 2) if options else (5,))
    assert batch.false_negatives == 0 and batch.targets.negatives is None and batch.targets.weights is None


def test_an_estimate_is_of_these_queries_and_those_codes(tokens):
    class Numbers:
        def similarity(self, query_rows, code_rows):
            return 10.0 * query_rows[:, None] + code_rows[None, :]

    maker = TargetMaker(Criterion("bce"), Numbers())
    options = {"rank": 1, "world_size": 2}
    targets = batches_of(tokens, target_maker=maker, **options).__getitems__([7, 2, 5, 0]).targets
    assert targets.similarity.tolist() == [[57, 52, 55, 50], [7, 2, 5, 0]]
    assert targets.positives.tolist() == [2, 3] and targets.negatives is None
    maker = dataclasses.replace(maker, estimator=None)  # data workers cannot ask it
    assert batches_of(tokens, target_maker=maker, **options).__getitems__([7, 2, 5, 0]).targets.similarity is None


class Doubles:
    """An estimator whose similarities are float64."""

    def similarity(self, query_rows, code_rows):
        return (query_rows[:, None] - code_rows[None, :]).double().abs() / 3


@pytest.mark.parametrize("kind", ["float64", "float32", "too large", "not needed"])
def test_workers_send_similarities_and_the_step_makes_the_same_weights(tokens, monkeypatch, kind):
    if kind == "too large":
        monkeypatch.setattr(making, "MOST_SENT", 24)
    criterion = Criterion("info_nce" if kind == "not needed" else "soft_info_nce", alpha=0.5)
    maker = TargetMaker(criterion, Doubles(), sends_float32=kind == "float32")
    batch = batches_of(tokens, target_maker=maker).__getitems__(FIVE)
    sent = batch.targets.similarity
    assert batch.targets.weights is None and (sent is None) == (kind in ("too large", "not needed"))
    assert sent is None or sent.dtype == getattr(torch, kind)
    weighed = maker.add_weights(batch.targets, batch.query_rows, batch.code_rows)
    if kind == "not needed":
        assert weighed.weights is None
        return
    expected = criterion.targets(torch.arange(5), similarity=Doubles().similarity(*[torch.tensor(FIVE)] * 2)).weights
    tolerance = 1e-6 if kind == "float32" else 0
    torch.testing.assert_close(weighed.weights, expected.float(), atol=tolerance, rtol=0)


def answers_of(queries: str, codes: str) -> RelevantCodes:
    """Makes the look-up of relevant codes for pairs with these texts, one letter per query and code."""
    own = sparse.eye_array(ROWS, dtype=np.float32, format="csr")
    return RelevantCodes(own, text_ids(queries), text_ids(codes))


def test_a_negative_with_the_positives_query_or_code_does_not_count(tokens):
    batches = batches_of(tokens, answers=answers_of("abacdefghi", "ABCDBEFGHI"))
    batch = batches.__getitems__([0, 1, 2, 3, 4])
    assert batch.targets.negatives.tolist() == [
        [True, True, False, True, True],
        [True, True, True, True, False],
        [False, True, True, True, True],
        [True, True, True, True, True],
        [True, False, True, True, True],
    ]
    assert batch.false_negatives == 4


def test_a_batch_without_duplicates_has_no_mask_and_those_of_another_process_are_masked(tokens):
    answers = answers_of("abcdefghia", "abcdefghij")
    batches = batches_of(tokens, answers=answers)
    assert batches.__getitems__([0, 1, 2]).targets.negatives is None
    assert batches.__getitems__([0, 9]).targets.negatives.tolist() == [[True, False], [False, True]]
    second = batches_of(tokens, answers=answers, rank=1, world_size=2).__getitems__([0, 1, 9, 2])
    assert second.targets.negatives.tolist() == [[False, True, True, True], [True, True, True, True]]


def test_versions_of_one_function_answer_each_others_queries():
    rows = {"docstring": list("abcdef"), "code": ["f 1", "f 2", "g 1", "f 2", "h 1", "i 1"]}
    urls = ["f", "f", "g", "copy of f", None, None]
    answers = relevant_codes(Split.from_pairs(Dataset.from_dict(rows | {"url": urls})), PROFILES["auto"])
    everything = np.arange(6)
    right = answers.among(everything, everything).int()
    assert right[0].tolist() == [1, 1, 0, 1, 0, 0]  # the other version, and its copy
    assert right[3].tolist() == [0, 1, 0, 1, 0, 0]
    assert right[2:].sum(1).tolist() == [1, 2, 1, 1]


def test_a_batch_of_pairs_with_several_codes_and_several_queries():
    tokens = {
        "query": TokenColumn(Dataset.from_dict({"query": [[100], [101]]}), "query"),
        "code": TokenColumn(Dataset.from_dict({"code": [[200], [201], [202]]}), "code"),
    }
    right = sparse.csr_matrix(np.array([[1, 1, 0], [0, 1, 1]], np.float32))
    answers = RelevantCodes(right, np.arange(2), np.arange(3))
    pairs = np.array([[0, 0], [0, 1], [1, 1], [1, 2]])
    maker = TargetMaker(Criterion("info_nce"), relevant=answers, keeps_positives=True)
    batches = TrainBatches(tokens, pairs, padding(), maker)
    batch = batches.__getitems__([0, 3, 2])
    assert batch.rows.tolist() == [0, 3, 2]
    assert batch.query_rows.tolist() == [0, 1, 1] and batch.code_rows.tolist() == [0, 2, 1]
    assert first_ids(batch) == ([100, 101, 101], [200, 202, 201])
    assert batch.targets.extra_positives.int().tolist() == [[0, 0, 1], [0, 0, 1], [0, 1, 0]]
    assert (batch.targets.negatives == ~batch.targets.extra_positives).all()
    assert batches.lengths().tolist() == [2] * 4


def test_text_ids_are_equal_for_equal_texts():
    _, number = np.unique(text_ids(["a", "b", "a", "", "b", ""]), return_inverse=True)
    assert len(set(number[[0, 1, 3]])) == 3
    assert number[[2, 4, 5]].tolist() == number[[0, 1, 3]].tolist()
    assert text_ids([]).dtype == np.uint64


class TwoEach:
    """Hard negatives: two for every query, and four for query 5."""

    def columns(self, queries, codes, epoch):
        return np.array([(row + n) % ROWS for row in queries for n in range(1, 5 if row == 5 else 3)], int)


@pytest.mark.parametrize("gather", [True, False])
def test_processes_with_different_negatives_make_equal_passes(tokens, gather):
    collator, options = padding(largest=2), {"gather": gather, "hard_negatives": TwoEach()}
    batches = [batches_of(tokens, collator, rank=rank, world_size=2, **options) for rank in range(2)]
    shares = [batch.__getitems__([5, 1, 2, 3]) for batch in batches]
    assert len({len(batch.passes) for batch in shares}) == 1
    assert len({batch.code_sizes for batch in shares}) == 1
    assert [batch.code_sizes[rank] for rank, batch in enumerate(shares)] == [len(b.codes) for b in shares]
