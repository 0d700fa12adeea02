"""A batch in padded chunks: nothing is lost, and the order comes back."""

import numpy as np
import pytest

from soft_trainer.data.chunks import ChunkCost
from soft_trainer.data.collator import PairCollator

PAD = 1


def feature(query: int, code: int) -> dict:
    """Ids 10, 11, ..., so that every row can be identified by its length."""
    return {"query_ids": np.arange(10, 10 + query), "code_ids": np.arange(10, 10 + code)}


def restored(side: dict) -> list[list[int]]:
    """Recovers the ids of every row of the batch from the padded chunks."""
    rows = [
        ids[mask.bool()].tolist()
        for chunk in side.chunks
        for ids, mask in zip(chunk["input_ids"], chunk["attention_mask"], strict=True)
    ]
    return [rows[place] for place in side.order.tolist()]


def test_without_chunks_each_side_is_padded_to_its_own_longest():
    batch = PairCollator(PAD)([feature(2, 3), feature(4, 1)])
    assert set(batch) == {"query", "code"}
    [query], [code] = batch["query"].chunks, batch["code"].chunks
    assert query["input_ids"].tolist() == [[10, 11, PAD, PAD], [10, 11, 12, 13]]
    assert query["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert code["input_ids"].tolist() == [[10, 11, 12], [10, PAD, PAD]]
    assert batch["code"].order.tolist() == [0, 1]


@pytest.mark.parametrize("cost", [None, ChunkCost(), ChunkCost(overhead=0.0), ChunkCost(overhead=1e9)])
def test_every_row_is_there_once_in_the_batchs_order(cost):
    lengths = [(3, 40), (30, 200), (3, 41), (17, 8), (9, 100), (30, 9), (1, 1)]
    batch = PairCollator(PAD, cost)([feature(*pair) for pair in lengths])
    for side, wanted in zip(("query", "code"), zip(*lengths, strict=True), strict=True):
        assert restored(batch[side]) == [list(range(10, 10 + length)) for length in wanted]


def test_chunks_of_like_length_hold_less_padding():
    features = [feature(8, length) for length in (250, 10, 240, 12, 9, 245, 11, 8)]
    whole, chunked = (PairCollator(PAD, cost)(features)["code"].chunks for cost in (None, ChunkCost()))
    assert len(whole) == 1 and len(chunked) == 2
    sizes = [sum(chunk["input_ids"].numel() for chunk in chunks) for chunks in (whole, chunked)]
    assert sizes == [8 * 250, 3 * 250 + 5 * 12]


def test_no_chunk_is_larger_than_asked():
    features = [feature(4, length) for length in (7, 30, 7, 200, 30, 7, 7)]
    batch = PairCollator(PAD, ChunkCost(), largest_chunk=3)(features)
    assert max(len(chunk["input_ids"]) for side in batch.values() for chunk in side.chunks) <= 3
    assert [len(ids) for ids in restored(batch["code"])] == [7, 30, 7, 200, 30, 7, 7]
