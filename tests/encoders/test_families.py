"""Encoders of every family train, resume, load in every library, and work with the gradient cache and LoRA."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from soft_trainer import BM25Estimator, EstimatorCallback, SoftInfoNCETrainer, SoftInfoNCETrainingArguments
from soft_trainer.encoders.adapters import adapter_state, add_lora
from soft_trainer.encoders.encoding import encode, pad, tokenize
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_model
from soft_trainer.options.model import ModelArguments

TEXTS = ["read a file", "x", "a much longer text than all of the others " * 9]


@pytest.fixture(scope="module")
def settings(family, profile):
    return profile.replace(pooling=family.pooling, query_prefix="query: ")


@pytest.fixture(scope="module")
def trainer_of(family, settings, dataset, tokenizer, tmp_path_factory):
    """Returns a function that makes a trainer for a copy of the family's model."""
    folder = tmp_path_factory.mktemp("family")

    def make(callbacks=(), model=None, **options):
        arguments = {"per_device_train_batch_size": 8, "max_steps": 2, "save_steps": 1, "save_strategy": "steps"}
        arguments |= {"learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
        return SoftInfoNCETrainer(
            model=family.copy() if model is None else model,
            args=SoftInfoNCETrainingArguments(**{"output_dir": str(folder)} | arguments | options),
            train_dataset=dataset,
            processing_class=tokenizer,
            encoder=settings,
            callbacks=list(callbacks),
        )

    return make


@pytest.fixture(scope="module")
def trained(trainer_of):
    """Returns a trainer after two steps, with a checkpoint of each step and the saved encoder."""
    trainer = trainer_of(callbacks=[EstimatorCallback(BM25Estimator())])
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.mark.slow
def test_trains_and_resumes(family, trained, trainer_of):
    before, after = family.model.state_dict(), trained.model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name, _ in family.model.named_parameters())
    assert all(weight.isfinite().all() for weight in after.values())
    resumed = trainer_of(callbacks=[EstimatorCallback(BM25Estimator())])
    resumed.train(resume_from_checkpoint=f"{trained.args.output_dir}/checkpoint-1")
    for name, weight in after.items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_loads_everywhere(family, settings, trained, same_everywhere):
    check_loaded(family, settings, trained, trained.args.output_dir, same_everywhere)


def check_loaded(family, settings, trained, folder, same_everywhere):
    """Checks that every library loads a folder and computes the same embeddings as the trainer's model."""
    ours, model = same_everywhere(folder, TEXTS), trained.model.eval()
    queries, codes = ours.encode_queries(TEXTS), ours.encode_codes(TEXTS)
    assert (queries[0] - queries[2]).abs().max() > 1e-3  # the texts differ, so equal embeddings mean something
    plain, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    plain = plain.encoder if family.name == "t5" else plain
    for expected, prefix, length in (
        (queries, settings.query_prefix, settings.query_length),
        (codes, settings.code_prefix, settings.code_length),
    ):
        inputs = pad(tokenize(tokenizer, TEXTS, prefix, length), tokenizer.pad_token_id)
        with torch.no_grad():
            for each in (model, plain):
                torch.testing.assert_close(encode(each, settings, inputs), expected, atol=1e-5, rtol=0)


def first_loss(trainer) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Returns loss, gradients and number of forward passes of a training step on the first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = 1
    with trainer.running():
        loss = trainer.training_step(trainer.model, batch)
    return loss, {name: p.grad for name, p in trainer.model.named_parameters()}, len(batch.passes)


def test_packed_and_cached_steps_equal_a_padded_one(family, trainer_of):
    trainer = trainer_of(model=family.copy().double(), packing="false")
    trainer.data_collator.pieces = 1
    expected_loss, expected, passes = first_loss(trainer)
    assert passes == 2
    tolerance = 1e-6 if family.name == "gemma2" else 1e-10  # Gemma's norms compute in float32
    for options in ({}, {"gradient_cache_chunk_size": 3}):
        loss, gradients, passes = first_loss(trainer_of(model=family.copy().double(), **options))
        assert passes > 2 or not options
        torch.testing.assert_close(loss, expected_loss, atol=tolerance, rtol=0)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float64
            torch.testing.assert_close(gradient, expected[name], atol=tolerance, rtol=0, msg=f"{options}, {name}")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "modernbert", "qwen3", "t5"], indirect=True, scope="module")
def test_lora(family, settings, trainer_of, tokenizer, tmp_path, same_everywhere):
    base = export_encoder(family.copy(), tokenizer, settings, tmp_path / "base")

    def make(seed):
        torch.manual_seed(seed)
        model = load_model(base, settings)
        add_lora(model, ModelArguments(lora_r=2))
        options = {"optim": "sgd", "learning_rate": 1.0, "output_dir": str(tmp_path / "out")}
        return trainer_of(callbacks=[EstimatorCallback(BM25Estimator())], model=model, **options)

    trained, resumed = make(0), make(1)
    trained.train()
    resumed.train(resume_from_checkpoint=f"{tmp_path}/out/checkpoint-1")
    weights = adapter_state(trained.model)
    for name, weight in adapter_state(resumed.model).items():
        assert weight.any() and torch.equal(weight, weights[name]), name
    for merge in (False, True):
        folder = export_encoder(trained.model, tokenizer, settings, tmp_path / str(merge), merge=merge)
        check_loaded(family, settings, trained, folder, same_everywhere)
