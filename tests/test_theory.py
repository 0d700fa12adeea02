"""Claims about the losses, true and false, numbered as in `benchmarks/theory.md`, all in float64."""

from math import log
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from soft_trainer import losses
from soft_trainer.weights import negative_weights

NEARLY = 1e-9
fast = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def off_diagonal(matrix):
    """Removes the diagonal of Tensor[N, N]. Returns Tensor[N, N - 1]."""
    n = len(matrix)
    return matrix[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)


def make(scores, similarity, alpha=1.0, beta=1.0, floor=0.0):
    """Computes all quantities in the theorems, per query: sim_ij, P over the negatives, P over all codes, losses."""
    scores, similarity = (torch.as_tensor(x, dtype=torch.float64) for x in (scores, similarity))
    sim = off_diagonal(similarity).softmax(1)
    weights = negative_weights(similarity, alpha, beta, 1.0, floor)
    positive = scores.diagonal()
    soft = (scores + weights.log()).logsumexp(1) - positive
    assert losses.soft_info_nce(scores, weights).item() == pytest.approx(soft.mean().item(), abs=NEARLY)
    return SimpleNamespace(
        scores=scores,
        similarity=similarity,
        alpha=alpha,
        beta=beta,
        n=len(scores),
        m=len(scores) - 1,
        sim=sim,
        entropy=-torch.xlogy(sim, sim).sum(1),
        weights=weights,
        soft=soft,
        uniformity=soft + positive,
        log_z=off_diagonal(scores).logsumexp(1),
        log_p_negatives=off_diagonal(scores).log_softmax(1),
        log_p=off_diagonal(scores.log_softmax(1)),
        log_p_positive=scores.log_softmax(1).diagonal(),
    )


def divergence(b, log_p):
    """Computes KL(S || P) for each query."""
    return -b.entropy - (b.sim * log_p).sum(1)


@st.composite
def batches(draw, lowest_score=-10.0, gentle=True, floor=0.0):
    """Draws a batch of 3 to 7 queries. If `gentle`, alpha sim <= beta, so that no weight is negative."""
    n = draw(st.integers(3, 7))
    scores = draw(arrays("float64", (n, n), elements=st.floats(lowest_score, 10)))
    similarity = draw(arrays("float64", (n, n), elements=st.floats(-3, 3)))
    beta, alpha = draw(st.floats(0.1, 3)), 0.0
    if gentle:
        steepest = off_diagonal(torch.from_numpy(similarity)).softmax(1).max().item()
        alpha = draw(st.floats(0, 0.95)) * beta / steepest
    return make(scores, similarity, alpha, beta, floor)


def raw(sim):
    """Makes a square matrix of similarities whose softmax is `sim` for every query. The diagonal is unused."""
    n = len(sim) + 1
    matrix = torch.zeros(n, n, dtype=torch.float64)
    matrix[~torch.eye(n, dtype=torch.bool)] = torch.tensor(sim, dtype=torch.float64).log().repeat(n)
    return matrix


def same_scores(positive, negatives):
    """Makes the scores of N queries: `positive` for the query's code and `negatives` for the other codes."""
    n = len(negatives) + 1
    matrix = torch.full((n, n), float(positive), dtype=torch.float64)
    matrix[~torch.eye(n, dtype=torch.bool)] = torch.tensor(negatives, dtype=torch.float64).repeat(n)
    return matrix


# Section 3


@fast
@given(arrays("float64", (5, 5), elements=st.floats(-20, 20)), st.floats(-5, 5))
def test_uniform_similarity_gives_info_nce(scores, value):
    scores = torch.from_numpy(scores)
    weights = negative_weights(torch.full((5, 5), value, dtype=torch.float64), alpha=1, beta=1, temperature=1)
    soft, plain = losses.soft_info_nce(scores, weights), losses.info_nce(scores)
    assert soft.item() == pytest.approx(plain.item(), abs=1e-12)


@fast
@given(batches())
def test_weights_before_the_floor_sum_to_their_number(b):
    torch.testing.assert_close(off_diagonal(b.weights).sum(1), torch.full((b.n,), float(b.m), dtype=torch.float64))


@fast
@given(batches())
def test_gradient_of_section_3_2(b):
    exponentials = b.scores.exp().requires_grad_()
    losses.soft_info_nce(exponentials.log(), b.weights).backward()
    expected = b.weights / (b.n * (b.weights * exponentials.detach()).sum(1, keepdim=True))
    # The positive appears in the numerator too.
    expected -= torch.diag(1 / (b.n * exponentials.detach().diagonal()))
    torch.testing.assert_close(exponentials.grad, expected, rtol=1e-7, atol=1e-12)


# Theorem 1


def theorem_1(b, normaliser, sign=1):
    """Computes the right-hand side of Theorem 1 for each query. A sign of -1 gives the constant as printed."""
    bracket = b.beta * b.log_p_negatives.sum(1) + b.alpha * divergence(b, b.log_p_negatives)
    return (bracket + sign * b.alpha * b.entropy) / normaliser


@fast
@given(batches(floor=0.1))
def test_theorem_1_for_all_scores(b):
    bound = log(b.m) + b.log_z + theorem_1(b, b.beta * b.m - b.alpha)
    assert (b.uniformity >= bound - NEARLY).all()


@fast
@given(batches(lowest_score=0.0))
def test_theorem_1_for_scores_that_are_not_negative(b):
    bound = theorem_1(b, b.beta * b.m - b.alpha)
    assert (b.uniformity >= bound - NEARLY).all()
    # The inequality always holds and is useless, because zero lies between the two sides.
    assert (b.uniformity >= log(b.n) - NEARLY).all() and (bound <= NEARLY).all()


def test_theorem_1_is_attained():
    b = make(same_scores(-60, [2, 2, 2]), raw([0.5, 0.3, 0.2]), alpha=0.9, beta=0.6)
    bound = log(b.m) + b.log_z + theorem_1(b, b.beta * b.m - b.alpha)
    torch.testing.assert_close(b.uniformity, bound, rtol=0, atol=NEARLY)


@pytest.mark.parametrize("sign", [1, -1], ids=["constant", "printed_constant"])
def test_theorem_1_fails_with_the_printed_normaliser(sign):
    # beta N - alpha - 1 = -0.1 where beta (N - 1) - alpha = 0.4.
    b = make(same_scores(0, [0, 0, 0, 10]), raw([1 / 4] * 4), alpha=1.6, beta=0.5)
    assert (b.uniformity < 10.001).all()
    assert (theorem_1(b, b.beta * b.n - b.alpha - 1, sign) > 29).all()
    assert (theorem_1(b, b.beta * b.m - b.alpha) < 0).all()
    # With the paper's settings for BM25 and the smallest batch they allow, the formula divides by zero.
    assert 0.5 * 5 - 1.5 - 1 == 0 < 0.5 * (5 - 1) - 1.5


@pytest.mark.parametrize("sign", [1, -1], ids=["constant", "printed_constant"])
def test_theorem_1_fails_for_negative_scores(sign):
    b = make(same_scores(-10, [-10, -10]), raw([1 / 2] * 2))  # alpha = beta = 1: both normalisers are 1.
    assert b.uniformity[0].item() == pytest.approx(log(3) - 10)
    assert (theorem_1(b, 1, sign) > -2.1).all()


def test_theorem_1_fails_for_a_steep_similarity():
    # alpha sim = 1.5 > beta = 0.5: the weight before the floor is -8, and the floor of 0.1 does not rescue the bound.
    steep = raw([1 - 3e-9, 1e-9, 1e-9, 1e-9])
    b = make(same_scores(0, [0, 20, 20, 20]), steep, alpha=1.5, beta=0.5, floor=0.1)
    assert (b.uniformity < 22.5).all()
    assert (theorem_1(b, b.beta * b.m - b.alpha) > 38).all()


# Theorem 2


def theorem_2(b):
    """Computes the corrected right-hand side of Theorem 2 for each query, with P over all codes."""
    negatives = -torch.log1p(-b.log_p.exp()).sum(1)
    return (negatives - b.log_p_positive + divergence(b, b.log_p) + b.entropy) / b.n


@fast
@given(batches(gentle=False))
def test_theorem_2(b):
    loss = losses.binary_cross_entropy(b.scores, b.similarity, temperature=1.0)
    bound = theorem_2(b)
    assert loss <= bound.mean() + NEARLY
    gap = -(b.sim * torch.log1p(-b.log_p.exp())).sum(1) / b.n
    torch.testing.assert_close(bound.mean() - loss, gap.mean(), rtol=0, atol=1e-8)


def test_theorem_2_fails_with_the_printed_sign():
    # The positive has nearly all of P: the loss grows with KL(S || P), but the printed bound falls.
    b = make(same_scores(20, [0, 0]), raw([1 / 2] * 2))
    loss = losses.binary_cross_entropy(b.scores, b.similarity, temperature=1.0)
    printed = -(torch.log1p(-b.log_p.exp()).sum(1) + divergence(b, b.log_p) - b.entropy).mean() / b.n
    assert loss > 6.6 and printed < -6.1


def test_theorem_2_fails_with_the_constant_of_its_proof():
    # Only the negatives, with P over the negatives, as in the proof: here P = S and KL = 0.
    b = make(same_scores(0, [0, 0]), raw([1 / 2] * 2))
    p = b.log_p_negatives.exp()
    loss = -(b.sim * p.log() + (1 - b.sim) * torch.log1p(-p)).sum(1).mean() / b.n
    of_the_proof = (-torch.log1p(-p).sum(1) + divergence(b, b.log_p_negatives) - b.entropy).mean() / b.n
    assert loss.item() == pytest.approx(2 * log(2) / 3) and of_the_proof.item() == pytest.approx(log(2) / 3)
    assert loss <= of_the_proof + 2 * b.entropy.mean() / b.n


# Proposition 1


@fast
@given(batches())
def test_proposition_1_holds_because_zero_lies_between(b):
    b = make(b.scores, b.similarity)  # alpha = beta = 1, as in the proof
    weighted = -b.log_p_positive - (b.sim * b.log_p).sum(1)
    printed = weighted + b.log_p_positive + ((b.m - b.sim) / (b.m - 1) * b.log_p).sum(1)
    torch.testing.assert_close(printed, (off_diagonal(b.weights) * b.log_p).sum(1))
    assert (b.soft >= -NEARLY).all() and (printed <= 0).all()


@fast
@given(batches())
def test_weighted_info_nce_is_the_larger_one(b):
    soft = losses.soft_info_nce(b.scores, b.weights)
    weighted = losses.weighted_info_nce(b.scores, b.similarity, temperature=1.0)
    if b.alpha > 1e-3 * b.beta:
        ratio = b.alpha / b.beta
        assert weighted >= soft + log(4 * ratio * (1 - ratio / b.m)) - NEARLY
    b = make(b.scores, b.similarity)
    assert weighted >= losses.soft_info_nce(b.scores, b.weights) + log(4 * (1 - 1 / b.m)) - NEARLY


def test_the_gap_to_weighted_info_nce_is_attained():
    # alpha = beta = 1. S has one negative. P is divided between this negative and the other; the positive has none.
    b = make(same_scores(-60, [0, 0]), raw([1 - 1e-12, 1e-12]))
    weighted = losses.weighted_info_nce(b.scores, b.similarity, temperature=1.0)
    assert (weighted - b.soft.mean()).item() == pytest.approx(log(2), abs=NEARLY)


def test_soft_info_nce_does_not_bound_weighted_info_nce():
    b = make(same_scores(30, [0, 0]), raw([1 / 2] * 2))
    assert b.soft.mean() < 1e-12
    assert losses.weighted_info_nce(b.scores, b.similarity, temperature=1.0) > 29
