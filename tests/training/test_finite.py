"""Steps skipped by loss scaling are counted, even with a fused optimizer, and too many in a row stop the run."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerState

from soft_trainer.training.finite import FiniteGuard, NotFiniteError, OverflowCounter


class Training:
    """Trains one parameter with fp16 loss scaling, like `accelerate`."""

    def __init__(self, fused: bool):
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.weight], fused=fused)
        self.scaler = torch.amp.GradScaler("cpu")
        self.counter, self.state = OverflowCounter(lambda: self.scaler), TrainerState()

    def step(self, factor: float) -> None:
        self.scaler.scale((self.weight * factor).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.counter.on_optimizer_step(None, self.state, None)
        self.state.global_step += 1


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_counted_and_change_nothing(fused):
    training = Training(fused)
    training.step(1.0)
    before = training.weight.detach().clone()
    for _ in range(3):
        training.step(float("inf"))
    assert torch.equal(training.weight, before)
    for _ in range(2):
        training.step(1.0)
    assert training.counter.count == 3
    assert not torch.equal(training.weight, before)


def test_overflows_with_good_steps_between_never_stop_a_run():
    training = Training(fused=False)
    for step in range(3 * OverflowCounter.MOST):
        training.step(1.0 if step % 3 == 0 else float("inf"))
    assert training.counter.count >= 2 * OverflowCounter.MOST - 2


def test_overflow_in_every_step_stops_the_run_with_advice():
    training = Training(fused=False)
    training.step(1.0)
    with pytest.raises(NotFiniteError, match=r"overflowed in 20 steps in a row, up to step \d+.*Train in bf16"):
        for _ in range(2 * OverflowCounter.MOST):
            training.step(float("inf"))
    assert training.state.global_step == OverflowCounter.MOST + 1


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"docstring": "adds one", "url": "code:0123"}, "row 1 of train_dataset: adds one"),
        ({"docstring_tokens": ["adds", "one"], "url": "code:0123"}, "row 1 of train_dataset: adds one"),
        ({"docstring": "adds one", "url": "https://a.b/c.py#L1"}, "row 1 of train_dataset: https://a.b/c.py#L1"),
    ],
)
def test_rows_of_a_loss_that_is_not_finite_are_described_in_the_users_words(row, shown):
    guard = FiniteGuard(Dataset.from_list([row]))
    guard.watch(1, torch.tensor(float("nan")), np.array([0]))
    with pytest.raises(NotFiniteError, match=shown):
        guard.check()
