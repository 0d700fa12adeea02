"""Merging weights: the arithmetic and the ratio. `tests/run/test_merge_ratio.py` merges at the end of a training."""

import pytest
import torch

from soft_trainer.run.merging import interpolate


def test_floating_point_weights_are_interpolated_and_the_rest_is_from_after_training():
    before = {"weight": torch.tensor([0.0, 2.0]), "position_ids": torch.tensor([1, 2])}
    after = {"weight": torch.tensor([4.0, 6.0]), "position_ids": torch.tensor([3, 4])}
    merged = interpolate(before, after, 0.25)
    assert merged["weight"].tolist() == [1.0, 3.0]
    assert merged["position_ids"].tolist() == [3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_ends_are_exact_and_the_middle_is_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    base, model = ({"w": (1e4 * torch.randn(999, generator=generator)).to(dtype)} for _ in range(2))
    assert torch.equal(interpolate(base, model, 0.0)["w"], base["w"])
    assert torch.equal(interpolate(base, model, 1.0)["w"], model["w"])
    middle = interpolate(base, model, 0.3)["w"]
    exact = 0.7 * base["w"].double() + 0.3 * model["w"].double()
    assert middle.dtype == dtype
    torch.testing.assert_close(middle, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)
