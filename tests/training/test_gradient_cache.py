"""Gradient caching and accumulation give the losses and weights of whole batches, with the same dropout."""

import copy

import pytest
from trainings import check_weights, losses_of, still

from soft_trainer.criterion import LOSSES


@pytest.fixture
def trained(trainer_of, _model, monkeypatch):
    """Returns a function that trains with dropout, and returns the losses and the float64 weights."""
    monkeypatch.setattr("soft_trainer.trainer.LOSS_BLOCK", 3)

    def train(chunk_size, packing, **options):
        arguments = {"model": copy.deepcopy(_model).double()}
        # With plain gradient descent, the size of the gradients matters too.
        descent = {"optim": "sgd", "learning_rate": 0.1, "gradient_cache_chunk_size": chunk_size}
        trainer = trainer_of(arguments=arguments, packing=packing, **descent, **options)
        trainer.data_collator.largest = 3  # dropout is the same only if both methods run the same passes
        trainer.train()
        return losses_of(trainer), trainer.model.state_dict()

    return train


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param(
                {"loss": loss, "gradient_accumulation_steps": accumulated},
                marks=() if (loss, accumulated) == ("soft_info_nce", 1) else pytest.mark.slow,
            )
            for loss in LOSSES
            for accumulated in (1, 2)
        ),
        pytest.param({"cancel": "top_k", "cancel_k": 1}, marks=pytest.mark.slow),
        pytest.param({"loss": "own_losses:hinge", "weighting": "own_losses:halves"}, marks=pytest.mark.slow),
        pytest.param({"packing": "false"}, marks=pytest.mark.slow),
        pytest.param({"matryoshka_dims": "32,16,4"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cached_gradients_are_those_of_a_whole_batch(trained, options):
    options = {"packing": "auto"} | options
    expected_losses, expected = trained(None, **options)
    losses, weights = trained(3, **options)
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    check_weights(weights, expected, atol=1e-10)


@pytest.mark.parametrize(("number", "batch"), [(7, 5), (11, 4), (13, 12), (9, 3), (5, 8)])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_all_rows_of_a_step_weigh_the_same(trainer_of, _model, dataset, number, batch, chunk_size):
    """Compares a step that accumulates all batches with the mean over the rows of each batch alone."""
    options = {"dataloader_drop_last": False, "train_sampling_strategy": "sequential", "loss": "info_nce"}
    options |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": -(-number // batch)}
    arguments = {"model": still(_model), "train_dataset": dataset.select(range(number))}
    trainer = trainer_of(arguments=arguments, gradient_cache_chunk_size=chunk_size, max_steps=1, **options)
    model = trainer.model
    loss = 0.0
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for each in trainer.get_train_dataloader():
        model.zero_grad()
        with trainer.running():
            alone = trainer.compute_loss(model, each)
        alone.backward()
        loss += alone.item() * len(each.rows) / number
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                expected[name] -= weight.grad * len(each.rows) / number
    trainer.train()
    assert losses_of(trainer) == pytest.approx([loss], abs=1e-6)  # the log is in float32
    check_weights(model.state_dict(), expected, atol=1e-9)
