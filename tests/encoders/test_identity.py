import copy
import dataclasses

import pytest
import torch

from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.identity import encoder_identity, tokenizer_identity
from soft_trainer.options.model import LoraOptions


def change_a_weight(model, tokenizer):
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[0] += 1e-3


CHANGES = {
    "a weight": change_a_weight,
    "activation": lambda model, tokenizer: setattr(model.config, "hidden_act", "relu"),
    "epsilon": lambda model, tokenizer: setattr(model.config, "layer_norm_eps", 1e-3),
    "decoder": lambda model, tokenizer: setattr(model.config, "is_decoder", True),
    "side of the cut": lambda model, tokenizer: setattr(tokenizer, "truncation_side", "left"),
    "one more token": lambda model, tokenizer: tokenizer.add_tokens(["<one_more>"]),
    "an adapter": lambda model, tokenizer: add_lora(model, LoraOptions(lora_r=2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_model_or_tokenizer_changes_the_identity(model, tokenizer, profile, change):
    before = encoder_identity(model, tokenizer, profile)
    tokenizer = copy.deepcopy(tokenizer)
    assert encoder_identity(model, tokenizer, profile) == before
    CHANGES[change](model, tokenizer)
    assert encoder_identity(model, tokenizer, profile) != before


@pytest.mark.parametrize(
    "change",
    [
        {"code_length": 31},
        {"query_length": 15},
        {"code_prefix": "code: "},
        {"pooling": "cls"},
        {"include_prompt": False},
        {"normalize": True},
    ],
    ids=str,
)
def test_a_change_of_the_profile_changes_the_identity(model, tokenizer, profile, change):
    changed = dataclasses.replace(profile, **change)
    assert encoder_identity(model, tokenizer, changed) != encoder_identity(model, tokenizer, profile)


def test_the_settings_of_an_adapter_count(model, tokenizer, profile):
    add_lora(model, LoraOptions(lora_r=2))
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
