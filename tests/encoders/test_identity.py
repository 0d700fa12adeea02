import copy
import dataclasses

import pytest
import torch

from soft_trainer.encoders.identity import encoder_identity, tokenizer_identity


def _another_weight(model, tokenizer, profile):
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[0] += 1e-3
    return profile


def _config(name, value):
    def change(model, tokenizer, profile):
        setattr(model.config, name, value)
        return profile

    return change


def _profile(**changes):
    return lambda model, tokenizer, profile: dataclasses.replace(profile, **changes)


def _cut_on_the_left(model, tokenizer, profile):
    tokenizer.truncation_side = "left"
    return profile


def _another_token(model, tokenizer, profile):
    tokenizer.add_tokens(["<one_more>"])
    return profile


def _adapter(model, tokenizer, profile):
    pytest.importorskip("peft")
    from soft_trainer.encoders.adapters import add_lora
    from soft_trainer.options.model import LoraOptions

    add_lora(model, LoraOptions(lora_r=2))
    return profile


@pytest.mark.parametrize(
    "change",
    [
        _another_weight,
        _config("hidden_act", "relu"),
        _config("layer_norm_eps", 1e-3),
        _config("is_decoder", True),
        _profile(code_length=31),
        _profile(query_length=15),
        _profile(code_prefix="code: "),
        _profile(pooling="cls"),
        _profile(include_prompt=False),
        _profile(normalize=True),
        _cut_on_the_left,
        _another_token,
        _adapter,
    ],
)
def test_whatever_changes_an_embedding_changes_the_identity(model, tokenizer, profile, change):
    before = encoder_identity(model, tokenizer, profile)
    tokenizer = copy.deepcopy(tokenizer)
    assert encoder_identity(model, tokenizer, profile) == before
    changed = change(model, tokenizer, profile)
    assert encoder_identity(model, tokenizer, changed) != before


def test_the_settings_of_an_adapter_count(model, tokenizer, profile):
    _adapter(model, tokenizer, profile)
    before = encoder_identity(model, tokenizer, profile)
    model.peft_config["default"].lora_alpha *= 2
    assert encoder_identity(model, tokenizer, profile) != before


def test_what_leaves_embeddings_as_they_are_leaves_the_identity(model, tokenizer, profile):
    before = encoder_identity(model, tokenizer, profile), tokenizer_identity(tokenizer)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer(["a text"], truncation=True, max_length=5, padding=True)
    model.config._name_or_path = "elsewhere"
    profile = dataclasses.replace(profile, name="codebert", score_scale=7.0, code_columns=("text",))
    assert (encoder_identity(model, tokenizer, profile), tokenizer_identity(tokenizer)) == before
