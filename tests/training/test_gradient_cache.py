import copy

import pytest
import torch

from soft_trainer import BM25Estimator, EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.data.collator import ChunkCost, PairCollator

LOSSES = ("soft_info_nce", "info_nce", "weighted_info_nce", "bce", "kl_regularization")


@pytest.fixture
def trained(_model, dataset, tokenizer, profile, tmp_path, monkeypatch):
    """Returns weights in float64 after some steps with dropout, for the chunks and random numbers of `seed`."""
    monkeypatch.setattr("soft_trainer.trainer.LOSS_BLOCK", 3)

    def train(chunk_size, **options):
        # Both ways draw the same dropout only when they encode the same chunks.
        collator = PairCollator(tokenizer.pad_token_id, ChunkCost(overhead=1.0), largest_chunk=3)
        trainer = SoftInfoNCETrainer(
            model=copy.deepcopy(_model).double(),
            args=SoftInfoNCETrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=8,
                gradient_cache_chunk_size=chunk_size,
                use_cpu=True,
                max_steps=3,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                disable_tqdm=True,
                **options,
            ),
            train_dataset=dataset,
            processing_class=tokenizer,
            encoder=profile,
            data_collator=collator,
            callbacks=[EstimatorCallback(BM25Estimator())],
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, trainer.model.state_dict()

    return train


@pytest.mark.parametrize(
    "loss, accumulated",
    [
        pytest.param(loss, accumulated, marks=() if loss == "soft_info_nce" else pytest.mark.slow)
        for loss in LOSSES
        for accumulated in (1, 2)
    ],
)
def test_cached_gradients_are_those_of_a_whole_batch(trained, loss, accumulated):
    options = {"loss": loss, "gradient_accumulation_steps": accumulated}
    expected_losses, expected = trained(None, **options)
    losses, weights = trained(3, **options)
    assert losses == pytest.approx(expected_losses, abs=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=1e-10, rtol=0)


@pytest.mark.slow
def test_cancellation_and_duplicate_masks_go_by_blocks_too(trained):
    expected_losses, expected = trained(None, cancel="top_k", cancel_k=1)
    losses, weights = trained(3, cancel="top_k", cancel_k=1)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=1e-10, rtol=0)
