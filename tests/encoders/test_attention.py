"""The attention of packed passes on a CPU is exact, and its dropout is reproducible and unbiased."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from soft_trainer.encoders.attention import (
    LARGEST_GROUP,
    ROWS,
    SCORES,
    TextAttention,
    kept,
    layout_of,
    masked,
)

# One text has no tokens, and one has several blocks.
BORDERS = tuple(np.cumsum([0, 5, 17, 33, 1, 16, 0, 48, 47, 600, 40]).tolist())
SCALE = 0.3
KINDS = list(itertools.product((4, 2, 1), (False, True), (None, 3, 20)))  # heads of keys, causal, sliding window


def make_values(heads: int = 4, dtype=torch.float64) -> list[torch.Tensor]:
    """Draws queries with four heads, and keys and values with fewer."""
    torch.manual_seed(0)
    shapes = [(BORDERS[-1], number, 8) for number in (4, heads, heads)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def one_by_one(query, key, value, seen_of) -> torch.Tensor:
    """Computes the attention of one text after the other with torch. `seen_of(text, length)` returns its mask."""
    outputs = []
    for text, (start, end) in enumerate(itertools.pairwise(BORDERS)):
        one = [each[start:end].transpose(0, 1)[None] for each in (query, key, value)]
        mask = seen_of(text, end - start)
        attended = F.scaled_dot_product_attention(*one, mask, scale=SCALE, enable_gqa=True)
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def check_equal(values, found, expected) -> None:
    """Checks outputs and gradients."""
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    gradient = torch.randn_like(found)
    gradients = [torch.autograd.grad(outputs, values, gradient) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("heads", "causal", "window"), KINDS)
def test_outputs_and_gradients_are_those_of_one_text_after_the_other(heads, causal, window):
    def seen(text, length):
        position = torch.arange(length)
        apart = position[:, None] - position
        near = apart.abs() <= (length if window is None else window)
        return near & (apart >= 0) if causal else near

    values = make_values(heads)
    found = TextAttention.apply(*values, layout_of(tuple(BORDERS), causal, window), 0.0, SCALE)
    check_equal(values, found, one_by_one(*values, seen))


@pytest.mark.parametrize("window", [None, 64])
def test_blocks_are_small_and_have_each_query_once(window):
    lengths = np.append(np.random.default_rng(0).integers(0, 300, 200), 5000)
    layout = layout_of((0, *np.cumsum(lengths).tolist()), False, window)
    pieces = list(layout.pieces(torch.empty(12, 0, 1, 0)))
    queries = np.concatenate(
        [np.arange(len(layout.tokens))[block.queries] for block, heads in pieces if not heads.start]
    )
    assert sorted(layout.tokens[queries][layout.real[queries]].tolist()) == list(range(lengths.sum()))
    for block, heads in pieces:
        size = block.queries.stop - block.queries.start
        seen = block.keys.stop - block.keys.start
        assert block.number == 1 or size * seen <= block.number * LARGEST_GROUP
        assert size <= ROWS * block.number and (window is None or seen <= (ROWS + 2 * window) * block.number)
        assert size * seen <= SCORES * block.number or heads.stop - heads.start == 1


@pytest.mark.parametrize(("heads", "causal", "window"), [(4, False, None), (2, True, None), (1, False, 3)])
def test_gradients_with_dropout_are_finite_differences(heads, causal, window):
    layout = layout_of(tuple(BORDERS), causal, window)
    values = make_values(heads)
    gradient = torch.randn_like(values[0])

    def loss(*values):
        torch.manual_seed(3)
        return (TextAttention.apply(*values, layout, 0.1, SCALE) * gradient).sum()

    for number, found in enumerate(torch.autograd.grad(loss(*values), values)):
        step = torch.randn_like(found) * 1e-6
        above = [each.detach() + step if position == number else each.detach() for position, each in enumerate(values)]
        below = [each.detach() - step if position == number else each.detach() for position, each in enumerate(values)]
        assert float(loss(*above) - loss(*below)) / 2 == pytest.approx(float((found * step).sum()), rel=1e-6)


def test_the_rate_of_dropout_is_rounded_to_a_byte_and_the_mean_is_kept():
    zeros = float((kept((1000, 1001), 26) == 0).float().mean())
    assert zeros == pytest.approx(26 / 256, abs=1e-3)
    values = [torch.randn(50, 4, 8) for _ in range(3)]
    layout = layout_of((0, 5, 50), False, None)
    exact = TextAttention.apply(*values, layout, 0.0, SCALE)
    total = sum(TextAttention.apply(*values, layout, 0.1, SCALE) for _ in range(1000))
    assert float((total / 1000 - exact).abs().mean()) < 0.01 * float(exact.abs().mean()) + 0.005


@pytest.mark.parametrize("rate", [0.997, 0.999, 0.9999])
def test_a_rate_near_one_keeps_the_mean(rate):
    values = [torch.zeros(500, 1, 2, requires_grad=True), torch.zeros(500, 1, 2), torch.ones(500, 1, 2)]
    layout = layout_of((0, 500), False, None)
    outputs = torch.stack([TextAttention.apply(*values, layout, rate, SCALE) for _ in range(20)])
    padded = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in values), dropout_p=rate)
    assert padded.isfinite().all() and float(outputs.detach().mean()) == pytest.approx(1, abs=0.05)
    assert torch.autograd.grad(outputs.sum(), values[0])[0].isfinite().all()


def test_second_derivatives_are_an_error():
    values = make_values()
    outputs = TextAttention.apply(*values, layout_of(tuple(BORDERS), False, None), 0.0, SCALE)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), values[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_same_generator_draws_the_same_dropout_and_rate_zero_draws_nothing():
    values = make_values()
    layout = layout_of(tuple(BORDERS), False, None)
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(TextAttention.apply(*values, layout, 0.1, SCALE))
    assert torch.equal(*outputs) and not torch.equal(outputs[0], TextAttention.apply(*values, layout, 0.1, SCALE))
    state = torch.get_rng_state()
    TextAttention.apply(*values, layout, 0.0, SCALE)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dropped_values_are_zero_and_others_unchanged(dtype):
    values = torch.randn(50, 7).to(dtype)
    keep = kept(values.shape, 128)
    assert torch.equal(masked(values, keep), torch.where(keep != 0, values, 0))


def test_half_precision_is_near_float32():
    layout = layout_of(tuple(BORDERS), False, None)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        values = make_values(dtype=dtype)
        outputs = TextAttention.apply(*values, layout, 0.0, SCALE)
        results.append([outputs, *torch.autograd.grad(outputs.float().square().sum(), values)])
    for exact, rounded in zip(*results, strict=True):
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).norm() < 0.02 * exact.norm()
