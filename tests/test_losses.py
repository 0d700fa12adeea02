"""The losses equal published numbers and plain loops, also with excluded columns and extreme scores."""

import json
from contextlib import nullcontext
from math import log
from pathlib import Path

import pytest
import torch

from soft_trainer import losses
from soft_trainer.options import choices
from soft_trainer.weights import negative_weights

ORACLE = json.loads((Path(__file__).parent / "oracle_losses.json").read_text())["cases"]


def soft(scores, similarity, positives=None, negatives=None, alpha=1.3, beta=0.7, temperature=0.5, **reduction):
    options = {"positives": positives, "negatives": negatives}
    weights = negative_weights(similarity, alpha, beta, temperature, **options)
    return losses.soft_info_nce(scores, weights, positives, **reduction)


def info(scores, similarity, positives=None, negatives=None, alpha=None, beta=None, temperature=None, **reduction):
    return losses.info_nce(scores, positives, negatives=negatives, **reduction)


def weighted(scores, similarity, positives=None, negatives=None, alpha=None, beta=None, temperature=0.5, **reduction):
    return losses.weighted_info_nce(scores, similarity, temperature, positives, negatives=negatives, **reduction)


def bce(scores, similarity, positives=None, negatives=None, alpha=None, beta=None, temperature=0.5, **reduction):
    return losses.binary_cross_entropy(scores, similarity, temperature, positives, negatives=negatives, **reduction)


def kl(scores, similarity, positives=None, negatives=None, alpha=1.3, beta=0.7, temperature=0.5, **reduction):
    # The published code multiplies InfoNCE by beta and the divergence by alpha. The paper's text does the opposite.
    settings = temperature, beta, alpha, positives
    return losses.kl_regularized_info_nce(scores, similarity, *settings, negatives=negatives, **reduction)


LOSSES = {"info_nce": info, "soft_info_nce": soft, "weighted_info_nce": weighted, "bce": bce, "kl_regularization": kl}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def test_every_loss_is_tested():
    assert LOSSES.keys() == choices.LOSSES.keys()


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def batch(queries=3, codes=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores, similarity = (torch.randn(queries, codes, generator=generator, dtype=torch.float64) for _ in range(2))
    return (3 * scores).to(dtype), similarity.to(dtype)


@pytest.mark.parametrize("name", ORACLE[0]["loss"])  # a new loss has no published values
@pytest.mark.parametrize("case", ORACLE, ids=lambda case: f"{case['n']}-{case['alpha']}-{case['temperature']}")
def test_published_losses_and_gradients(case, name):
    # The published weighted InfoNCE adds 1e-15 inside the logarithm. Ours is exact, so they differ for tiny p.
    tolerance = 1e-6 if name == "weighted_info_nce" else 1e-9
    queries, codes = (double(case[key]).requires_grad_() for key in "qc")
    settings = {key: case[key] for key in ("alpha", "beta", "temperature")}
    loss = LOSSES[name](queries @ codes.T, double(case["similarity"]), **settings)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"][name], abs=tolerance)
    torch.testing.assert_close(queries.grad, double(case["grad_q"][name]), rtol=0, atol=tolerance)
    torch.testing.assert_close(codes.grad, double(case["grad_c"][name]), rtol=0, atol=tolerance)


@every_loss
def test_gradcheck(loss):
    scores, similarity = batch(3, 6)
    negatives = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) < 0.7
    scores.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: loss(s, similarity), scores)
    assert torch.autograd.gradcheck(lambda s: loss(s, similarity, torch.tensor([5, 0, 2]), negatives), scores)


@every_loss
def test_masked_negatives_equal_deleted_columns(loss):
    scores, similarity = batch(4, 9)
    positives = torch.arange(3, 7)
    negatives = torch.rand(4, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    scores.requires_grad_()
    value = loss(scores, similarity, positives, negatives)
    (gradient,) = torch.autograd.grad(value, scores)

    kept = negatives.scatter(1, positives.unsqueeze(1), True)
    alone = []
    for row, (columns, positive) in enumerate(zip(kept, positives, strict=True)):
        position = columns[:positive].sum().unsqueeze(0)
        alone.append(loss(scores[row : row + 1, columns], similarity[row : row + 1, columns], position))
    expected = torch.stack(alone).mean()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, scores)[0], rtol=0, atol=1e-12)
    assert (gradient[~kept] == 0).all() and (gradient[kept] != 0).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(loss, dtype):
    scores, similarity = batch(dtype=dtype)
    value = loss(scores, similarity)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(scores.float(), similarity.float()), rtol=0, atol=0)


EXTREMES = (
    100 * torch.eye(4),  # the positive far ahead
    100 - 200 * torch.eye(4),  # the positive far behind
    100 * torch.eye(4).roll(1, 1),  # one negative far ahead
    torch.full((4, 4), 100.0),
    torch.linspace(-100, 100, 16).view(4, 4),
)
NUMBERS = {"all": torch.ones(4, 4), "one": torch.eye(4).roll(2, 1), "none": torch.zeros(4, 4)}


@every_loss
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=["float32", "fp16", "bf16"])
def test_finite_for_scores_up_to_ten_thousand(loss, number, autocast):
    queries = torch.cat(EXTREMES).requires_grad_()
    with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
        scores = queries @ (100 * torch.eye(4))
        assert scores.dtype == (autocast or torch.float32) and scores.abs().max() > 9900
        negatives = NUMBERS[number].bool().repeat(len(EXTREMES), 1)
        value = loss(scores, torch.eye(4).repeat(len(EXTREMES), 1), torch.arange(4).repeat(len(EXTREMES)), negatives)
    value.backward()
    assert value.isfinite() and value >= 0
    assert queries.grad.isfinite().all()


@every_loss
def test_a_batch_of_one_has_nothing_to_learn(loss):
    scores = torch.tensor([[1e4]], requires_grad=True)
    value = loss(scores, torch.ones(1, 1))
    value.backward()
    assert value.item() == 0 and scores.grad.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_binary_cross_entropy_where_p_is_one(dtype):
    ahead = 1e4 * torch.eye(3, dtype=dtype)
    zeros = torch.zeros_like(ahead)
    # Each of the six negatives has y = 1/2 and log p = -10,000.
    assert bce(ahead, zeros).item() == pytest.approx(6 * 5000 / 9, rel=1e-6)
    negative_ahead = torch.tensor([[0, 1e4, 0]], dtype=dtype, requires_grad=True)
    value = bce(negative_ahead, zeros[:1])
    assert value.item() == pytest.approx((1e4 + (1e4 - log(2)) / 2 + 1e4 / 2) / 3, rel=1e-6)
    # d/ds of -log p_0 - (log(1 - p_1) + log p_2) / 2, over three entries.
    (gradient,) = torch.autograd.grad(value, negative_ahead)
    torch.testing.assert_close(gradient, torch.tensor([[-1.25, 2.0, -0.75]], dtype=dtype) / 3)


@every_loss
def test_without_reduction_every_query_has_its_own_loss(loss):
    scores, similarity = batch(4, 9)
    each = loss(scores, similarity, reduction="none")
    assert each.shape == (4,) and each.mean() == loss(scores, similarity)
    alone = [loss(scores[row : row + 1], similarity[row : row + 1], torch.tensor([row])) for row in range(4)]
    torch.testing.assert_close(each, torch.stack(alone), rtol=0, atol=1e-12)


POSITIVES = torch.tensor([2, 0, 5, 7])


@pytest.mark.parametrize("masked", [False, True])
def test_the_divergence_is_what_kl_regularization_adds_to_info_nce(masked):
    scores, similarity = batch(4, 9)
    negatives = torch.rand(4, 9, generator=torch.Generator().manual_seed(5)) < 0.6 if masked else None
    columns = {"negatives": negatives}
    both = losses.kl_regularized_info_nce(scores, similarity, 0.5, 1.0, 0.3, POSITIVES, **columns)
    alone = losses.kl_divergence(scores, similarity, 0.5, POSITIVES, **columns)
    assert alone > 0.1
    torch.testing.assert_close(both, losses.info_nce(scores, POSITIVES, **columns) + 0.3 * alone, rtol=0, atol=1e-12)


def test_the_divergence_of_a_model_from_itself_is_zero_and_teaches_nothing():
    scores, _ = batch(4, 9)
    scores.requires_grad_()
    value = losses.kl_divergence(scores, scores.detach() / 20, 1 / 20, POSITIVES)
    assert value.item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(value, scores)[0], torch.zeros(4, 9).double(), rtol=0, atol=1e-12)
