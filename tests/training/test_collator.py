"""A batch in padded chunks of similar length: no division is cheaper, no row is lost, the order can be restored."""

import itertools

import numpy as np
import pytest

from soft_trainer.encoders.static import static_model
from soft_trainer.training.collator import STEP, ChunkCost, PairCollator, chunk_by_length

PAD = 1


def cost_of(chunks, lengths, cost: ChunkCost) -> float:
    """Computes the cost of chunks by definition, with lengths rounded up to a multiple of STEP."""
    total = 0.0
    for chunk in chunks:
        longest = STEP * -(-max(lengths[row] for row in chunk) // STEP)
        total += cost.overhead + len(chunk) * longest * (1 + cost.attention * longest)
    return total


def cheapest(lengths, cost: ChunkCost) -> float:
    """Finds the lowest cost by trying every way to divide the rows, sorted by length, into chunks."""
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    partitions = []
    for cuts in itertools.product((False, True), repeat=len(rows) - 1):
        chunks = [[rows[0]]]
        for row, cut in zip(rows[1:], cuts, strict=True):
            chunks.append([row]) if cut else chunks[-1].append(row)
        partitions.append(cost_of(chunks, lengths, cost))
    return min(partitions)


@pytest.mark.parametrize("overhead", [0.0, 20.0, 64.0, 400.0])
@pytest.mark.parametrize("attention", [0.0, 5e-4, 1e-2])
def test_no_partition_is_cheaper(overhead, attention):
    cost = ChunkCost(overhead, attention)
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(3, 257, size=9)
        assert cost_of(chunk_by_length(lengths, cost), lengths, cost) == pytest.approx(cheapest(lengths, cost))


@pytest.mark.parametrize("largest, number", [(None, 1), (8, 1), (None, 40)])
def test_every_row_is_in_one_chunk_longest_first(largest, number):
    lengths = np.random.default_rng(0).integers(1, 300, size=100)
    chunks = chunk_by_length(lengths, ChunkCost(), largest, number)
    assert sorted(np.concatenate(chunks).tolist()) == list(range(100))
    assert max(map(len, chunks)) <= (largest or 100) and len(chunks) >= number
    longest = [int(lengths[chunk].max()) for chunk in chunks]
    assert longest == sorted(longest, reverse=True) and len(chunks) > 2


def test_without_a_cost_there_is_one_chunk_in_the_order_given():
    [chunk] = chunk_by_length(np.array([3, 200, 1]), None)
    assert chunk.tolist() == [0, 1, 2]
    assert [len(chunk) for chunk in chunk_by_length(np.ones(10), None, largest=4)] == [4, 4, 2]
    for lengths in ([7], [5, 5, 5]):  # nothing to gain
        assert [len(chunk) for chunk in chunk_by_length(np.array(lengths), ChunkCost(overhead=0.0))] == [len(lengths)]


def test_dear_chunks_are_few_and_free_ones_many_and_a_model_says_what_they_cost():
    lengths = np.array([10, 50, 100, 10])
    assert len(chunk_by_length(lengths, ChunkCost(overhead=1e6))) == 1
    chunks = [sorted(chunk.tolist()) for chunk in chunk_by_length(lengths, ChunkCost(overhead=0.0))]
    assert chunks == [[2], [1], [0, 3]]
    small, large = ChunkCost.of(128), ChunkCost.of(768)
    assert small.overhead > large.overhead > 0
    assert large.attention == pytest.approx(4 * 768 / (24 * 768**2))


def test_a_static_encoder_takes_a_batch_in_one_chunk_unless_padding_costs_more_than_a_gradient(model):
    static = ChunkCost.of_model(static_model(50, 8, 1))
    lengths = np.array([400, *[3] * 11])
    assert len(chunk_by_length(lengths, static)) == 1
    assert len(chunk_by_length(np.array([4000, *[3] * 11]), static)) == 2
    assert ChunkCost.of_model(model) == ChunkCost.of(model.config.hidden_size)


# ---- Padding ----


def feature(query: int, code: int) -> dict:
    """Makes a feature with token ids 10, 11, and so on, so that the length identifies the row."""
    return {"query_ids": np.arange(10, 10 + query), "code_ids": np.arange(10, 10 + code)}


def restored(side: dict) -> list[list[int]]:
    """Recovers the token ids of every row of a batch from padded chunks."""
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


@pytest.mark.parametrize("largest", [None, 3])
@pytest.mark.parametrize("cost", [None, ChunkCost(), ChunkCost(overhead=0.0), ChunkCost(overhead=1e9)])
def test_every_row_is_there_once_in_the_batchs_order_and_no_chunk_is_larger_than_asked(cost, largest):
    lengths = [(3, 40), (30, 200), (3, 41), (17, 8), (9, 100), (30, 9), (1, 1)]
    batch = PairCollator(PAD, cost, largest_chunk=largest)([feature(*pair) for pair in lengths])
    for side, wanted in zip(("query", "code"), zip(*lengths, strict=True), strict=True):
        assert restored(batch[side]) == [list(range(10, 10 + length)) for length in wanted]
        assert max(len(chunk["input_ids"]) for chunk in batch[side].chunks) <= (largest or 7)


def test_chunks_of_like_length_hold_less_padding():
    features = [feature(8, length) for length in (250, 10, 240, 12, 9, 245, 11, 8)]
    whole, chunked = (PairCollator(PAD, cost)(features)["code"].chunks for cost in (None, ChunkCost()))
    assert len(whole) == 1 and len(chunked) == 2
    sizes = [sum(chunk["input_ids"].numel() for chunk in chunks) for chunks in (whole, chunked)]
    assert sizes == [8 * 250, 3 * 250 + 5 * 12]
