"""Trainers that override parts of the step, as the page about training shows."""

import re
from pathlib import Path

import pytest
import torch
from trainings import check_weights, losses_of

from soft_trainer import SoftInfoNCETrainer

PAGE = Path(__file__).parents[1] / "docs" / "training.md"
CLASSES = re.findall(r"```python\n((?:(?!```).)*class \w+\(SoftInfoNCETrainer\).*?)```", PAGE.read_text(), re.DOTALL)


def subclass(name: str) -> type:
    """Returns the page's subclass with this name."""
    found = {}
    (code,) = [code for code in CLASSES if f"class {name}(" in code]
    exec(code, found)
    return found[name]


def trained(kind, model, dataset, tokenizer, profile, folder, **settings):
    """Trains a copy of the encoder for three steps, and returns the trainer."""
    from soft_trainer import SoftInfoNCETrainingArguments

    extra = {"labels": [row % 3 for row in range(len(dataset))]} if kind.__name__ == "WithHead" else {}
    args = SoftInfoNCETrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=8, logging_steps=1, report_to="none", **settings
    )
    trainer = kind(model, args, dataset, processing_class=tokenizer, encoder=profile, **extra)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["WithAlignment", "WithHead", "ByDistance"])
def test_a_subclass_from_the_page_trains_on_its_loss(name, model, dataset, tokenizer, profile, tmp_path):
    parts = (model, dataset, tokenizer, profile)
    plain = trained(SoftInfoNCETrainer, *parts, tmp_path / "plain")
    other = trained(subclass(name), *parts, tmp_path / "other")
    first = losses_of(other)[0], losses_of(plain)[0]
    assert first[0] != pytest.approx(first[1]) and torch.tensor(losses_of(other)).isfinite().all()
    if name == "WithHead":
        weights = {id(each) for group in other.optimizer.param_groups for each in group["params"]}
        assert all(id(each) in weights and each.grad is not None for each in other.head.parameters())


@pytest.mark.slow
def test_own_scores_are_the_same_with_gradient_caching(model, dataset, tokenizer, profile, tmp_path):
    parts = (subclass("ByDistance"), model, dataset, tokenizer, profile)
    plain = trained(*parts, tmp_path / "plain")
    cached = trained(*parts, tmp_path / "cached", gradient_cache_chunk_size=3)
    check_weights(cached.model.state_dict(), plain.model.state_dict(), atol=1e-5)
