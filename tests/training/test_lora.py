"""Training an adapter: no other weight changes, resuming is exact, and the output has the requested form."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from trainings import check_weights, fingerprint_of, still, warned

from soft_trainer.data.split import Split
from soft_trainer.encoders.adapters import adapter_state, add_lora, base_name, has_adapter
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder, load_model
from soft_trainer.errors import UserError
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.folder import compared, mark_complete

FAST = {"learning_rate": 1e-2, "optim": "adamw_torch"}


@pytest.fixture(scope="module")
def base(_model, tokenizer, profile, tmp_path_factory):
    return export_encoder(copy.deepcopy(_model), tokenizer, profile, tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapted(base, profile):
    """Returns a function that makes the base with a new adapter, initialised from `seed`."""

    def make(seed=0, **options):
        torch.manual_seed(seed)
        model = load_model(base, profile)
        add_lora(model, ModelArguments(**{"lora_r": 4, "lora_dropout": 0.1} | options))
        return model

    return make


@pytest.fixture
def train(trainer_of, adapted):
    """Returns a function that trains an adapter and returns the trainer."""

    def run(model=None, resume=None, **options):
        trainer = trainer_of(arguments={"model": adapted() if model is None else model}, **FAST | options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


@pytest.mark.parametrize(("options", "rate"), [({}, 1e-4), ({"learning_rate": 3e-4}, 3e-4)])
def test_an_adapter_has_its_own_learning_rate(trainer_of, adapted, options, rate):
    assert trainer_of(arguments={"model": adapted()}, **options).args.learning_rate == rate


def test_only_the_adapter_learns(train, base, profile):
    trainer = train(weight_decay=0.1)
    weights = {name.replace("base_layer.", ""): tensor for name, tensor in trainer.model.state_dict().items()}
    for name, tensor in load_model(base, profile).state_dict().items():
        assert torch.equal(weights[name], tensor), name
    for name, tensor in adapter_state(trainer.model).items():
        assert tensor.any(), name
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(adapter_state(trainer.model))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"gradient_cache_chunk_size": 3}, {"gradient_checkpointing": True}], ids=str)
def test_less_memory_changes_no_gradient(train, adapted, options):
    models = [still(adapted(lora_dropout=0.0)) for _ in range(2)]
    expected, trainer = (
        train(each, max_steps=2, optim="sgd", **more) for each, more in zip(models, ({}, options), strict=True)
    )
    assert any(tensor.any() for name, tensor in adapter_state(trainer.model).items() if "lora_B" in name)
    check_weights(adapter_state(trainer.model), adapter_state(expected.model), atol=1e-5)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(train, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = train(max_steps=4, learning_rate=1.0, save_total_limit=None, load_best_model_at_end=True, **options)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path / "out"
    saved = load_file(best / "adapter_model.safetensors")
    saved = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
    check_weights(adapter_state(trainer.model), saved)


@pytest.mark.slow
def test_merged_on_request_and_checkpoints_are_adapters(train, tmp_path):
    trainer = train(max_steps=2, save_strategy="steps", save_steps=1, merge_lora=True)
    trainer.save_model()
    assert has_adapter(trainer.model)
    folder = tmp_path / "out"
    assert (folder / "model.safetensors").is_file() and (folder / "adapter" / "adapter_config.json").is_file()
    assert not (folder / "adapter_config.json").exists()
    assert (folder / "checkpoint-2" / "adapter_model.safetensors").is_file()
    texts = ["sort a list", "read a file"]
    merged, adapter = (load_encoder(each, device="cpu") for each in (folder, folder / "checkpoint-2"))
    torch.testing.assert_close(merged.encode_queries(texts), adapter.encode_queries(texts), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_initial_model_stays_the_frozen_start(train, adapted, dataset, profile, tokenizer, base):
    from soft_trainer.estimators.frozen_encoder import InitialModelEstimator, TrainedModelEstimator

    estimator = InitialModelEstimator(cache_dir=None)
    train(estimator=estimator)
    untrained = TrainedModelEstimator(base, cache_dir=None)
    untrained.fit(Split.from_pairs(dataset))
    rows = range(8)
    torch.testing.assert_close(estimator.similarity(rows, rows), untrained.similarity(rows, rows), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_peft_model_trains_as_the_encoder_inside(trainer_of, base, profile):
    wrapped = get_peft_model(load_model(base, profile), LoraConfig(r=2, target_modules=["query"]))
    trainer = trainer_of(arguments={"model": wrapped})
    trainer.train()
    trainer.save_model()
    assert trainer.model is wrapped.get_base_model()
    assert any(tensor.any() for name, tensor in adapter_state(trainer.model).items() if "lora_B" in name)
    assert has_adapter(load_model(trainer.args.output_dir, profile))


def test_a_checkpoint_with_other_settings_is_refused(adapted, model, trainer_of, tmp_path):
    def compare(model):
        return compared(lambda: fingerprint_of(trainer_of(arguments={"model": model})), str(tmp_path))

    mark_complete(tmp_path, fingerprint_of(trainer_of(arguments={"model": adapted()})))
    compare(adapted())
    for options in ({"lora_alpha": 99}, {"lora_dropout": 0.3}, {"lora_r": 8}):
        with pytest.raises(UserError, match="the adapter changed"):
            compare(adapted(**options))
    with pytest.raises(UserError, match="the adapter changed"):
        compare(model)


def test_models_that_could_not_be_trained_or_saved(trainer_of, adapted, model, base):
    with pytest.raises(UserError, match="output_dir=.*: this folder holds the adapter's base"):
        trainer_of(arguments={"model": adapted()}, output_dir=str(base))
    frozen, unsaved, nameless = adapted().requires_grad_(False), adapted(), adapted()
    unsaved.embeddings.LayerNorm.weight.requires_grad_(True)
    nameless.config._name_or_path = ""
    refused = {
        "the adapter is frozen, because AutoModel freezes": (frozen, {}),
        "embeddings.LayerNorm.weight is trained but is not part of the adapter": (unsaved, {}),
        "neither a folder nor a name on the Hub": (nameless, {}),
        "merge_lora: the encoder has no adapter": (model, {"merge_lora": True}),
    }
    for says, (each, options) in refused.items():
        with pytest.raises(UserError, match=says) as error:
            trainer_of(arguments={"model": each}, **options)
        assert "\n" not in str(error.value)
    trainer_of(arguments={"model": nameless}, merge_lora=True)
    assert "eval_mrr" in trainer_of(arguments={"model": frozen, "train_dataset": None}).evaluate()


def test_a_revision_that_other_libraries_would_not_load_is_named(adapted, trainer_of):
    model = adapted()
    assert not warned(trainer_of(arguments={"model": model}))
    model.peft_config["default"].revision = "v2"
    [warning] = warned(trainer_of(arguments={"model": model}))
    assert "revision v2 of its base" in warning
    assert not warned(trainer_of(arguments={"model": model}, merge_lora=True))


# ---- A base that its name does not load ----


def tuned(model, tokenizer):
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.add_(0.1)


def resized(model, tokenizer):
    tokenizer.add_tokens(["<new>"])
    model.resize_token_embeddings(len(tokenizer))


CHANGED = {
    tuned: "model: encoder.layer.1.output.dense.weight is not what ",
    resized: "model: embeddings.word_embeddings.weight is not what ",
}


@pytest.mark.parametrize("change", CHANGED)
def test_an_adapter_on_a_changed_base_is_refused(base, tokenizer, profile, trainer_of, tmp_path, change):
    tokenizer = copy.deepcopy(tokenizer)
    model = load_model(base, profile)
    change(model, tokenizer)
    model.save_pretrained(tmp_path / "changed")
    add_lora(model, ModelArguments(lora_r=4))
    arguments = {"model": model, "processing_class": tokenizer}
    with pytest.raises(
        UserError, match=rf"{CHANGED[change]}{base} contains.*load it from its folder.*merge_lora=True"
    ):
        trainer_of(arguments=arguments)
    trainer_of(arguments=arguments, merge_lora=True)
    loaded = load_model(tmp_path / "changed", profile)
    add_lora(loaded, ModelArguments(lora_r=4))
    trainer = trainer_of(arguments=arguments | {"model": loaded}, **FAST)
    trainer.train()
    trainer.save_model()
    assert base_name(trainer.model) == str(tmp_path / "changed")
    texts = ["sort a list", "read a <new> file"]
    expected = trainer.text_encoder.encode_queries(texts)
    folder = trainer.args.output_dir
    torch.testing.assert_close(load_encoder(folder, device="cpu").encode_queries(texts), expected, atol=1e-5, rtol=0)
    theirs = SentenceTransformer(folder, device="cpu").encode_query(texts)
    torch.testing.assert_close(torch.tensor(theirs), expected, atol=1e-5, rtol=0)
