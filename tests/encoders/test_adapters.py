"""Every library loads an adapter with the same embeddings, and bad adapters are refused."""

import copy
import json
import sys

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from soft_trainer.data.split import Split
from soft_trainer.encoders.adapters import (
    add_lora,
    base_name,
    has_adapter,
    merge_adapter,
    plain_encoder,
    target_modules,
)
from soft_trainer.encoders.encoding import encode, pad, tokenize
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder, load_model
from soft_trainer.encoders.profiles import resolve_profile
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator
from soft_trainer.options.model import ModelArguments
from soft_trainer.shell.building import build_encoder

TEXTS = ["read all lines of a file", "def reverse(text): return text[::-1]", "sort"]


@pytest.fixture(scope="module")
def base(_model, tokenizer, profile, tmp_path_factory):
    return export_encoder(copy.deepcopy(_model), tokenizer, profile, tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(adapted, tokenizer, profile, tmp_path):
    """Saves the adapter and returns its folder."""
    return export_encoder(adapted, tokenizer, profile, tmp_path / "adapter")


@pytest.fixture
def adapted(base, profile):
    """Returns a base model with an adapter that changes the embeddings."""
    torch.manual_seed(1)
    model = load_model(base, profile)
    add_lora(model, ModelArguments(lora_r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def embeddings(model, tokenizer, profile):
    inputs = pad(tokenize(tokenizer, TEXTS, max_length=profile.query_length), tokenizer.pad_token_id)
    with torch.no_grad():
        return encode(model.eval(), profile, inputs)


def close(ours, theirs):
    torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_a_saved_adapter_has_the_same_embeddings(adapted, base, tokenizer, profile, dataset, tmp_path, merge):
    expected = embeddings(adapted, tokenizer, profile)
    assert not torch.allclose(expected, embeddings(load_model(base, profile), tokenizer, profile), atol=1e-2)
    folder = export_encoder(adapted, tokenizer, profile, tmp_path / "saved", merge=merge)
    assert (folder / "adapter_config.json").is_file() is not merge
    assert (folder / "config.json").is_file() is merge
    assert has_adapter(adapted)
    close(embeddings(adapted, tokenizer, profile), expected)

    loaded = load_encoder(folder, device="cpu")
    assert type(loaded.model) is type(adapted) and not has_adapter(loaded.model)
    close(loaded.encode_queries(TEXTS), expected)
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())

    arguments = ModelArguments(model_name_or_path=str(folder))
    starting = build_encoder(arguments)
    again = starting.profile
    model, _ = starting.load()
    close(embeddings(model, tokenizer, again), expected)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable if merge else all("lora_" in name for name in trainable)

    estimator = TrainedModelEstimator(folder, cache_dir=None)
    estimator.fit(Split.from_pairs(dataset.select(range(4))))
    assert estimator.similarity([0, 1], [2, 3]).shape == (2, 2)


def test_a_merged_folder_has_its_adapter_beside_it(adapted, base, tokenizer, profile, tmp_path):
    from peft import PeftModel

    folder = export_encoder(adapted, tokenizer, profile, tmp_path, merge=True) / "adapter"
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["r"] == 4 and saved["inference_mode"] is True and saved["peft_type"] == "LORA"
    expected = embeddings(adapted, tokenizer, profile)
    close(embeddings(load_model(folder, profile), tokenizer, profile), expected)
    theirs = PeftModel.from_pretrained(load_model(base, profile), str(folder))
    close(embeddings(theirs, tokenizer, profile), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"trainable_token_indices": [5, 7, 30]},
        {"trainable_token_indices": {"position_embeddings": [1, 3]}},
        {"modules_to_save": ["LayerNorm"]},
        {"bias": "lora_only"},
        {"use_dora": True, "trainable_token_indices": [5], "modules_to_save": ["intermediate.dense"]},
    ],
    ids=str,
)
def test_adapters_of_every_kind_are_merged_and_saved_as_peft_does(base, tokenizer, profile, tmp_path, settings):
    from peft import LoraConfig, PeftModel, get_peft_model
    from sentence_transformers import SentenceTransformer

    wrapped = get_peft_model(
        load_model(base, profile), LoraConfig(r=2, target_modules=["query", "value"], **settings)
    ).eval()
    torch.manual_seed(2)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    encoder = plain_encoder(wrapped)
    folder = export_encoder(encoder, tokenizer, profile, tmp_path / "adapter")
    merged = merge_adapter(copy.deepcopy(encoder))
    expected = embeddings(wrapped, tokenizer, profile)
    assert not torch.allclose(expected, embeddings(load_model(base, profile), tokenizer, profile), atol=1e-2)
    for each in (folder, export_encoder(encoder, tokenizer, profile, tmp_path / "merged", merge=True)):
        close(load_encoder(each, device="cpu").encode_queries(TEXTS), expected)
        close(SentenceTransformer(str(each), device="cpu").encode_query(TEXTS), expected)
        close(embeddings(AutoModel.from_pretrained(each, add_pooling_layer=False), tokenizer, profile), expected)
    close(embeddings(PeftModel.from_pretrained(load_model(base, profile), str(folder)), tokenizer, profile), expected)
    theirs = wrapped.merge_and_unload().state_dict()
    torch.testing.assert_close(merged.state_dict(), theirs, atol=1e-6, rtol=0)
    shorter = load_file(folder / "adapter_model.safetensors")  # as peft names DoRA's magnitudes
    shorter = {name.replace("magnitude_vector.weight", "magnitude_vector"): each for name, each in shorter.items()}
    save_file(shorter, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    close(load_encoder(folder, device="cpu").encode_queries(TEXTS), expected)


def test_no_weights_of_the_other_form_stay_in_a_folder(adapted, base, tokenizer, profile, tmp_path):
    plain = load_model(base, profile)
    for _ in range(2):
        for model, merge in ((adapted, False), (plain, False), (adapted, True), (adapted, False)):
            folder = export_encoder(model, tokenizer, profile, tmp_path, merge=merge)
            close(load_encoder(folder, device="cpu").encode_queries(TEXTS), embeddings(model, tokenizer, profile))
            assert (folder / "adapter").is_dir() is False or merge or not any((folder / "adapter").iterdir())


def test_the_base_is_named_so_that_it_is_found_from_everywhere(adapted, base, profile, monkeypatch):
    monkeypatch.chdir(base.parent)
    assert base_name(load_model(base.name, profile)) == str(base.resolve())
    for name in ("someone/encoder", "/cache/models--someone--encoder/snapshots/abc"):
        adapted.config._name_or_path = name
        assert base_name(adapted) == "someone/encoder"


def test_the_profile_of_a_foreign_adapter_is_that_of_its_base(folder, profile):
    (folder / "soft_trainer.json").unlink()
    (folder / "modules.json").unlink()
    assert resolve_profile(folder) == profile


def test_an_adapter_is_neither_saved_over_its_base_nor_added_to_another(adapted, base, tokenizer, profile):
    before = sorted(path.name for path in base.rglob("*"))
    for merge in (False, True):
        with refused("this folder holds the adapter's base model, and saving would delete it"):
            export_encoder(adapted, tokenizer, profile, base, merge=merge)
    assert sorted(path.name for path in base.rglob("*")) == before
    with refused("already has an adapter"):
        add_lora(adapted, ModelArguments(lora_r=2))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"base_model_name_or_path": "gone/base"},
         ["the base of this adapter cannot be loaded: ", "gone/base", "If the base has moved, change base_model"]),
        ({"base_model_name_or_path": None}, ["no base_model_name"]),
        ({"base_model_name_or_path": "."}, ["lists the adapter as its own base"]),
        ({"peft_type": "GUESS"}, ["does not support 'GUESS'"]),
        (None, ["adapter_config.json: not valid JSON"]),
    ],
)  # fmt: skip
def test_a_damaged_adapter_config(folder, changes, words, monkeypatch):
    monkeypatch.chdir(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text("{" if changes is None else json.dumps(config | changes))
    with refused(*words):
        load_encoder(folder)


def test_damaged_and_missing_weights_of_an_adapter(folder):
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"x")
    with pytest.raises(UserError, match="^(?!.*no config.json)"):
        load_encoder(folder)
    weights.unlink()
    with refused("no adapter_model.safetensors"):
        load_encoder(folder)


def test_without_peft_one_line_names_the_extra(adapted, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    for call in (lambda: load_encoder(folder), lambda: add_lora(adapted, ModelArguments(lora_r=4))):
        with refused("pip install -c constraints.txt -e '.[lora]'"):
            call()


def test_target_modules(model):
    assert target_modules(model) == ["query", "value"]
    assert target_modules(model, "all-linear") == "all-linear"
    both = "attention.self.query, intermediate.dense"
    assert target_modules(model, both) == both.split(", ")
    model.config.model_type = "mpnet"  # peft knows no usual modules
    assert target_modules(model) == "all-linear"
    for wanted, missing in (("query,q_proj", "'q_proj'"), ("query,", "''"), ("", "''")):
        with refused(f"no linear layer {missing}; use some of query, key, value, dense, or all-linear"):
            target_modules(model, wanted)
    with refused("lora_r: Embedding has no linear layers to adapt; drop lora_r"):
        target_modules(torch.nn.Embedding(2, 2))


def test_a_peft_model_gives_the_encoder_inside_and_merging_leaves_no_trace(base, profile):
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    wrapped = get_peft_model(load_model(base, profile), LoraConfig(r=2, target_modules=["query"]))
    encoder = plain_encoder(wrapped)
    assert encoder is wrapped.get_base_model() and has_adapter(encoder)
    plain = load_model(base, profile)
    assert merge_adapter(copy.deepcopy(encoder)).state_dict().keys() == plain.state_dict().keys()
    prompts = PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    with refused("PROMPT_TUNING keeps its weights outside the encoder"):
        plain_encoder(get_peft_model(plain, prompts))
