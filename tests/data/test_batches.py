"""A process gets its own queries of a global batch, the codes they are compared with, and the pairs that count."""

import numpy as np
import pytest
import torch
from datasets import Dataset

from soft_trainer.data.batches import TrainBatches, text_ids_of
from soft_trainer.data.collator import PairCollator
from soft_trainer.data.tokens import TokenColumn, text_ids
from soft_trainer.encoders.profiles import PROFILES

ROWS = 10


@pytest.fixture
def tokens():
    """Row r has the query [100 + r] and the code [200 + r, 200 + r]."""
    ids = {"query": [[100 + row] for row in range(ROWS)], "code": [[200 + row] * 2 for row in range(ROWS)]}
    return {side: TokenColumn(Dataset.from_dict(ids), side) for side in ids}


def first_ids(side) -> list[int]:
    [chunk] = side.chunks
    return chunk["input_ids"][:, 0].tolist()


FIVE = [7, 2, 5, 0, 9]


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
    batch = TrainBatches(tokens, PairCollator(0), **options).__getitems__(FIVE)
    assert batch.rows.tolist() == rows and batch.code_rows.tolist() == code_rows
    assert first_ids(batch.query) == [100 + row for row in rows]
    assert first_ids(batch.code) == [200 + row for row in rows]
    assert batch.positives.tolist() == positives
    assert batch.sizes == ((3, 2) if options else (5,))
    assert batch.duplicates == 0 and batch.negatives is None and batch.loss_inputs is None


def test_an_estimate_is_of_these_queries_and_those_codes(tokens):
    def weigh(queries, codes, positives, negatives):
        assert positives.tolist() == [2, 3] and negatives is None
        return {"similarity": torch.tensor([[10.0 * query + code for code in codes] for query in queries])}

    batch = TrainBatches(tokens, PairCollator(0), weigh=weigh, rank=1, world_size=2).__getitems__([7, 2, 5, 0])
    assert batch.loss_inputs["similarity"].tolist() == [[57, 52, 55, 50], [7, 2, 5, 0]]


def test_a_negative_with_the_positives_query_or_code_does_not_count(tokens):
    ids = {
        "query": text_ids(["a", "b", "a", "c", "d", "e", "f", "g", "h", "i"]),
        "code": text_ids(["A", "B", "C", "D", "B", "E", "F", "G", "H", "I"]),
    }
    batch = TrainBatches(tokens, PairCollator(0), text_ids=ids).__getitems__([0, 1, 2, 3, 4])
    assert batch.negatives.tolist() == [
        [True, True, False, True, True],
        [True, True, True, True, False],
        [False, True, True, True, True],
        [True, True, True, True, True],
        [True, False, True, True, True],
    ]
    assert batch.duplicates == 4


def test_a_batch_without_duplicates_has_no_mask_and_those_of_another_process_are_masked(tokens):
    ids = {"query": text_ids(list("abcdefghia")), "code": text_ids(list("abcdefghij"))}
    batches = TrainBatches(tokens, PairCollator(0), text_ids=ids)
    assert batches.__getitems__([0, 1, 2]).negatives is None
    assert batches.__getitems__([0, 9]).negatives.tolist() == [[True, False], [False, True]]
    second = TrainBatches(tokens, PairCollator(0), text_ids=ids, rank=1, world_size=2).__getitems__([0, 1, 9, 2])
    assert second.negatives.tolist() == [[False, True, True, True], [True, True, True, True]]


def test_versions_of_one_function_count_as_the_same_code():
    rows = {"docstring": list("abcdef"), "code": ["f 1", "f 2", "g 1", "f 2", "h 1", "i 1"]}
    ids = text_ids_of(Dataset.from_dict(rows | {"url": ["f", "f", "g", "copy of f", None, None]}), PROFILES["auto"])
    assert len(set(ids["query"])) == 6
    assert ids["code"][0] == ids["code"][1] == ids["code"][3]
    assert len(set(ids["code"])) == 4
    single = text_ids_of(Dataset.from_dict(rows | {"url": list("uvwxyz")}), PROFILES["auto"])
    assert list(single["code"]) == list(text_ids(rows["code"]))


def test_text_ids_are_equal_for_equal_texts():
    _, number = np.unique(text_ids(["a", "b", "a", "", "b", ""]), return_inverse=True)
    assert len(set(number[[0, 1, 3]])) == 3
    assert number[[2, 4, 5]].tolist() == number[[0, 1, 3]].tolist()
    assert text_ids([]).dtype == np.uint64


class TwoEach:
    """Extra negatives: two for every row, and four for row 5."""

    def columns(self, rows, epoch):
        codes = [(row + n) % ROWS for row in rows for n in range(1, 5 if row == 5 else 3)]
        return np.array(codes, int), np.ones((len(rows), len(codes)), dtype=bool)


@pytest.mark.parametrize("gather", [True, False])
def test_processes_with_negatives_of_their_own_make_equal_passes(tokens, gather):
    collator, options = PairCollator(0, largest_chunk=2), {"gather": gather, "own_negatives": TwoEach()}
    batches = [TrainBatches(tokens, collator, rank=rank, world_size=2, **options) for rank in range(2)]
    shares = [batch.__getitems__([5, 1, 2, 3]) for batch in batches]
    assert len({len(batch.code.chunks) for batch in shares}) == 1
    assert len({batch.code_sizes for batch in shares}) == 1
    assert [batch.code_sizes[rank] for rank, batch in enumerate(shares)] == [len(b.code.order) for b in shares]
