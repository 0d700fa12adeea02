"""Weights by Eq. 4 (computed by hand, floor, masks, limits), positive-aware weights, and cancellation."""

import math

import pytest
import torch

from soft_trainer.weights import (
    cancel_above_ratio,
    cancel_top_k,
    negative_weights,
    positive_aware_weights,
    smallest_batch,
)

PAPER = {"bm25": (1.5, 0.5, 1.0), "simcse": (1.3, 0.7, 0.1), "trained_model": (1.3, 0.7, 5.0)}


def similarity(queries=6, codes=6, dtype=torch.float64):
    return torch.randn(queries, codes, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def close(value, expected):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=value.dtype), rtol=0, atol=1e-12)


def test_by_hand():
    # sim = (1/2, 1/4, 1/4) for the first query, whatever is added to the row and whatever the positive's value.
    raw = 2 * torch.tensor([[7, 1 / 2, 1 / 4, 1 / 4], [1, 7, 1, 1]], dtype=torch.float64).log() + 5
    close(negative_weights(raw, 1, 1, 2, floor=0), [[1, 0.75, 1.125, 1.125], [1, 1, 1, 1]])
    # alpha = 3 beta and four negatives: w = 4 (1 - 3 sim).
    raw = torch.tensor([[7, 1 / 2, 1 / 4, 1 / 8, 1 / 8]], dtype=torch.float64).log()
    close(negative_weights(raw, 1.5, 0.5, 1), [[1, 0.1, 1, 2.5, 2.5]])
    close(negative_weights(raw, 1.5, 0.5, 1, floor=0), [[1, 0, 1, 2.5, 2.5]])


@pytest.mark.parametrize("setting", PAPER.values(), ids=PAPER)
def test_floor_only_raises(setting):
    weights = negative_weights(similarity(), *setting)
    unfloored = negative_weights(similarity(), *setting, floor=0)
    torch.testing.assert_close(weights, unfloored.clamp_min(0.1), rtol=0, atol=0)
    assert (weights.sum(1) >= 6 - 1e-12).all()
    assert (weights.diagonal() == 1).all()


def test_masks_and_positives_equal_deleted_columns():
    raw = similarity(2, 9)
    positives = torch.tensor([4, 1])
    negatives = torch.ones(2, 9, dtype=torch.bool)
    negatives[0, [0, 5]] = False
    negatives[1, [7, 1]] = False
    weights = negative_weights(raw, 1.5, 0.5, 1, positives=positives, negatives=negatives)
    for row, dropped in enumerate(([0, 5], [7])):
        kept = [column for column in range(9) if column not in dropped]
        position = torch.tensor([kept.index(positives[row])])
        alone = negative_weights(raw[row : row + 1, kept], 1.5, 0.5, 1, positives=position)
        torch.testing.assert_close(weights[row : row + 1, kept], alone, rtol=0, atol=1e-12)
        assert (weights[row, dropped] == 0).all() and weights[row, positives[row]] == 1


@pytest.mark.parametrize(
    "alpha, beta, smallest",
    [(1.5, 0.5, 5), (1.3, 0.7, 3), (1, 1, 3), (0.5, 1, 2), (0, 1, 2), (2, 0.5, 6), (1.2, 0.4, 5), (0.3, 0.1, 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smallest_batch_is_where_eq_4_begins(alpha, beta, smallest, dtype):
    assert smallest_batch(alpha, beta) == smallest
    weights = negative_weights(torch.zeros(smallest, smallest, dtype=dtype), alpha, beta, 1)
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=1e-5)
    if smallest > 2:
        few = torch.eye(smallest - 1, dtype=dtype)
        assert (negative_weights(few, alpha, beta, 1) == 1).all()


def test_too_few_in_one_row():
    raw = similarity(2, 6)
    negatives = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    weights = negative_weights(raw, 1.5, 0.5, 1, negatives=negatives)
    close(weights[0], [1.0, 1, 1, 1, 0, 0])
    torch.testing.assert_close(weights[1], negative_weights(raw, 1.5, 0.5, 1)[1], rtol=0, atol=0)


def test_a_query_without_negatives_needs_no_weights():
    negatives = torch.tensor([[False] * 6, [True] * 6])
    weights = negative_weights(similarity(2, 6), 1.5, 0.5, 1, negatives=negatives)
    close(weights[0], [1.0, 0, 0, 0, 0, 0])


OUT_OF_RANGE = {"alpha": (-0.1, math.nan), "beta": (0, -1, math.inf), "temperature": (0, -1), "floor": (-0.1, 1.1)}


@pytest.mark.parametrize("name, value", [(name, value) for name in OUT_OF_RANGE for value in OUT_OF_RANGE[name]])
def test_settings_out_of_range(name, value):
    settings = {"alpha": 1.5, "beta": 0.5, "temperature": 1.0, "floor": 0.1, name: value}
    with pytest.raises(ValueError, match=f"^{name}={value:g}: must be "):
        negative_weights(similarity(), **settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float32_or_higher(dtype):
    raw = similarity(dtype=dtype)
    weights = negative_weights(raw, 1.3, 0.7, 0.1)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = negative_weights(raw.double(), 1.3, 0.7, 0.1)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0)


def mask(rows):
    return torch.tensor(rows, dtype=torch.bool)


def test_cancel_top_k():
    raw = torch.tensor([[9.0, 3, 1, 2], [5, 0, 5, 5]])  # The second query's positive is its least similar code.
    assert torch.equal(cancel_top_k(raw, 0), mask([[0, 1, 1, 1], [1, 0, 1, 1]]))
    assert torch.equal(cancel_top_k(raw, 1), mask([[0, 0, 1, 1], [0, 0, 1, 1]]))
    assert torch.equal(cancel_top_k(raw, 2), mask([[0, 0, 1, 0], [0, 0, 0, 1]]))
    for k in (3, 4, 100):
        assert not cancel_top_k(raw, k).any()
    assert torch.equal(cancel_top_k(raw, 2, torch.tensor([3, 2])), mask([[0, 0, 1, 0], [0, 1, 0, 0]]))
    with pytest.raises(ValueError, match="k=-1"):
        cancel_top_k(raw, -1)


def test_cancel_top_k_cancels_k_of_many_ties():
    kept = cancel_top_k(torch.zeros(50, 50), 3)
    assert (kept.sum(1) == 46).all()
    assert torch.equal(kept[10], mask([0] * 3 + [1] * 7 + [0] + [1] * 39))


def test_cancel_above_ratio():
    raw = torch.tensor([[4.0, 2, 2.5, 9], [8, 2, 1, 1.5]])
    assert torch.equal(cancel_above_ratio(raw, 0.5), mask([[0, 1, 0, 0], [0, 0, 1, 0]]))
    assert torch.equal(cancel_above_ratio(raw, 1), mask([[0, 1, 1, 0], [0, 0, 1, 1]]))
    assert torch.equal(cancel_above_ratio(raw, 0.5, torch.tensor([3, 0])), mask([[1, 1, 1, 0], [0, 1, 1, 1]]))


def test_cancel_above_ratio_where_similarities_are_negative():
    # Whatever the sign, every ratio up to 1 cancels a code that is more similar than the query's positive.
    raw = torch.tensor([[-2.0, -1.0, -1.5, -9.0]])
    for ratio in (0.3, 0.5, 1):
        assert torch.equal(cancel_above_ratio(raw, ratio), mask([[0, 0, 0, 1]]))


def positive_aware_by_loops(similarity, margin, temperature, positives, negatives):
    weights = [[0.0] * similarity.shape[1] for _ in similarity]
    for query, positive in enumerate(positives):
        for code in range(similarity.shape[1]):
            lead = float(similarity[query, positive]) - margin - float(similarity[query, code])
            if code == positive:
                weights[query][code] = 1.0
            elif negatives[query][code]:
                weight = float(lead >= 0) if temperature == 0 else 2 / (1 + math.exp(-lead / temperature))
                weights[query][code] = min(1.0, weight)
    return weights


@pytest.mark.parametrize("temperature", [0, 0.05, 1.0])
@pytest.mark.parametrize("margin", [-0.3, 0, 0.2])
def test_positive_aware_weights_against_a_plain_loop(margin, temperature):
    raw = similarity(5, 8)
    raw[0, 3] = raw[0, 7]
    positives = torch.tensor([7, 0, 3, 3, 1])
    negatives = torch.rand(5, 8, generator=torch.Generator().manual_seed(1)) < 0.7
    weights = positive_aware_weights(raw, margin, temperature, positives, negatives)
    close(weights, positive_aware_by_loops(raw, margin, temperature, positives.tolist(), negatives.tolist()))
    all_negatives = torch.ones(5, 8, dtype=torch.bool).tolist()
    expected = positive_aware_by_loops(raw, margin, temperature, range(5), all_negatives)
    close(positive_aware_weights(raw, margin, temperature), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-6, 0.05, 1e6])
def test_positive_aware_weights_are_stable(dtype, temperature):
    raw = torch.tensor([[0, 6e4, -6e4, 0, -torch.inf], [-torch.inf, -torch.inf, 0, 6e4, -torch.inf]]).to(dtype)
    weights = positive_aware_weights(raw, 0, temperature, torch.tensor([0, 1]))
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert weights.isfinite().all() and (weights >= 0).all() and (weights <= 1).all()
    assert weights[0, [0, 2, 3, 4]].tolist() == [1] * 4 and weights[1, [0, 1, 4]].tolist() == [1] * 3
    assert weights[1, 2:4].tolist() == [0, 0]
    if temperature < 1:
        assert weights[0, 1] == 0


@pytest.mark.parametrize(
    ("margin", "temperature", "words"),
    [
        (math.nan, 1, "margin=nan: must be a finite number"),
        (math.inf, 1, "margin=inf"),
        (0, -1, "temperature=-1: must be 0 or more"),
        (0, math.nan, "temperature=nan"),
    ],
)
def test_positive_aware_settings_are_named(margin, temperature, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        positive_aware_weights(torch.ones(2, 2), margin, temperature)
