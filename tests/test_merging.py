"""Merging encoders: the arithmetic, the ratio, and merged folders that every library loads."""

import copy
import json

import pytest
import torch
from peft import LoraConfig
from refusals import refused
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, T5Config, T5EncoderModel

from soft_trainer import UserError, load_encoder, merge_encoders
from soft_trainer.cli.__main__ import run_command
from soft_trainer.encoders.adapters import add_lora, merge_adapter
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_model
from soft_trainer.encoders.profiles import resolve_profile
from soft_trainer.merging import interpolate
from soft_trainer.options.model import ModelArguments

TEXTS = ["read all lines of a file", "sort a list", "def reverse(text): return text[::-1]"]


# ---- The arithmetic ----


def test_floating_point_weights_are_interpolated_and_the_rest_is_the_first_models():
    base = {"weight": torch.tensor([0.0, 2.0]), "position_ids": torch.tensor([1, 2])}
    models = [
        {"weight": torch.tensor(values), "position_ids": torch.tensor(numbers)}
        for values, numbers in (([4.0, 2.0], [3, 4]), ([8.0, 6.0], [5, 6]))
    ]
    merged = interpolate(base, models, 0.25)
    assert merged["weight"].tolist() == [1.5, 2.5]
    assert merged["position_ids"].tolist() == [3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_ends_are_exact_and_the_middle_is_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    base, model = ({"w": (1e4 * torch.randn(999, generator=generator)).to(dtype)} for _ in range(2))
    assert torch.equal(interpolate(base, [model], 0.0)["w"], base["w"])
    assert torch.equal(interpolate(base, [model], 1.0)["w"], model["w"])
    middle = interpolate(base, [model], 0.3)["w"]
    exact = 0.7 * base["w"].double() + 0.3 * model["w"].double()
    assert middle.dtype == dtype
    torch.testing.assert_close(middle, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


# ---- Encoders in folders ----


@pytest.fixture(scope="module")
def before(_model):
    """The tiny encoder with larger weights, so that embeddings of different texts differ."""
    model = copy.deepcopy(_model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return model


@pytest.fixture
def folder_of(tokenizer, profile, tmp_path):
    """Returns a function that exports an encoder. `seed` changes the weights slightly, like training."""

    def make(model, name, seed=None, **settings):
        model = copy.deepcopy(model)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.05 * torch.randn(weight.shape, generator=generator).to(weight))
        return export_encoder(model, tokenizer, profile.replace(**settings), tmp_path / name)

    return make


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def check_merged(found, base, models, ratio, rtol=0.0):
    """Compares merged weights with the same arithmetic in double precision."""
    for name, tensor in found.items():
        mean = sum(model[name].double() for model in models) / len(models)
        expected = (1 - ratio) * base[name].double() + ratio * mean
        torch.testing.assert_close(tensor.double(), expected, rtol=rtol, atol=1e-6, msg=name)


def test_a_merged_encoder_loads_in_every_library_with_the_same_embeddings(before, folder_of, tmp_path):
    base = folder_of(before, "base", query_length=9)
    models = [folder_of(before, f"model-{seed}", seed, matryoshka_dims=(32, 8)) for seed in (1, 2)]
    merged = merge_encoders(base, models, 0.3, tmp_path / "merged")
    check_merged(weights_of(merged), weights_of(base), [weights_of(model) for model in models], 0.3)
    encoder = load_encoder(merged, device="cpu")
    assert encoder.profile.matryoshka_dims == (32, 8) and encoder.profile.query_length == 16
    ours = encoder.encode_codes(TEXTS)
    assert not torch.allclose(ours, load_encoder(base, device="cpu").encode_codes(TEXTS), atol=1e-3)
    theirs = SentenceTransformer(str(merged), device="cpu").encode_document(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    plain = AutoModel.from_pretrained(merged)
    inputs = AutoTokenizer.from_pretrained(merged)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = plain(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    torch.testing.assert_close((hidden * mask).sum(1) / mask.sum(1), ours, rtol=0, atol=1e-5)


def test_tied_weights_stay_tied(tokenizer, profile, folder_of, tmp_path):
    config = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    tied = T5EncoderModel(config)
    base, model = folder_of(tied, "base"), folder_of(tied, "model", 1)
    merged = merge_encoders(base, [model], 0.5, tmp_path / "merged")
    loaded = load_model(merged, profile)
    assert loaded.shared.weight is loaded.encoder.embed_tokens.weight
    before, after = (load_model(folder, profile).state_dict() for folder in (base, model))
    check_merged(loaded.state_dict(), before, [after], 0.5)


@pytest.fixture
def adapter(before, folder_of, tokenizer, profile, tmp_path):
    """Folders of a base and of an adapter that changes the base's embeddings."""
    base = folder_of(before, "base")
    model = load_model(base, profile)
    add_lora(model, ModelArguments(lora_r=4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return base, export_encoder(model, tokenizer, profile, tmp_path / "adapter")


def test_an_adapter_is_scaled_and_stays_an_adapter(adapter, before, profile, tmp_path):
    base, model = adapter
    merged = merge_encoders(base, [model], 0.25, tmp_path / "merged")
    assert (merged / "adapter_model.safetensors").exists() and not (merged / "model.safetensors").exists()
    trained = merge_adapter(load_model(model, profile)).state_dict()
    whole = SentenceTransformer(str(base), device="cpu")
    whole[0].auto_model.load_state_dict(interpolate(before.state_dict(), [trained], 0.25))
    expected = whole.encode_document(TEXTS, convert_to_tensor=True)
    found = [load_encoder(merged, device="cpu").encode_codes(TEXTS)]
    found.append(SentenceTransformer(str(merged), device="cpu").encode_document(TEXTS, convert_to_tensor=True))
    for embeddings in found:
        torch.testing.assert_close(embeddings, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(found[0], load_encoder(base, device="cpu").encode_codes(TEXTS), atol=1e-2)


def test_several_adapters_become_a_whole_encoder(adapter, before, profile, tmp_path):
    base, model = adapter
    merged = merge_encoders(base, [model, model], 0.5, tmp_path / "merged")
    whole = merge_adapter(load_model(model, profile)).state_dict()
    check_merged(weights_of(merged), before.state_dict(), [whole], 0.5)


def test_card_and_record_say_what_was_merged(before, folder_of, tmp_path):
    base, model = folder_of(before, "base"), folder_of(before, "model", 1)
    bare = merge_encoders(base, [model], 0.5, tmp_path / "bare")
    sentence = "Every weight is 0.5 x its value in `model` + 0.5 x its value in `base`."
    assert sentence in (bare / "README.md").read_text()
    known = json.loads((bare / "run.json").read_text()) | {
        "dataset": "someone/rows", "languages": ["go"], "base_model": "base", "training": {"steps": 7},
        "loss": {"loss": "info_nce"}, "results": {"test": {"trained": {"mrr": 0.4321, "pool_size": 3}}},
        "depends on": {"seed": 1},
    }  # fmt: skip
    (model / "run.json").write_text(json.dumps(known))
    merged = merge_encoders(base, [model], 0.5, tmp_path / "merged")
    record = json.loads((merged / "run.json").read_text())
    assert record["merging"] == {"ratio": 0.5, "base": "base", "models": ["model"]}
    assert str(tmp_path) not in json.dumps(record) and "model.safetensors" in record["files"]
    assert record["training"] == {"steps": 7} and record["results"] == {}  # the results belong to the unmerged encoder
    assert "depends on" not in record  # otherwise a run with the first model's options could overwrite this folder
    card = (merged / "README.md").read_text()
    assert sentence in card and "someone/rows" in card and "0.432" not in card


def test_the_command(before, folder_of, tmp_path, capsys):
    base, model = folder_of(before, "base"), folder_of(before, "model", 1)
    words = ["merge", str(base), str(model), "--ratio", "0.5", "--output_dir", str(tmp_path / "merged")]
    assert run_command(words) == 0
    assert f"Written to {tmp_path / 'merged'}" in capsys.readouterr().err
    load_encoder(tmp_path / "merged", device="cpu")


def test_a_ratio_may_be_a_tensor_and_a_bad_record_is_refused_at_the_start(before, folder_of, tmp_path):
    base, model = folder_of(before, "base"), folder_of(before, "model", 1)
    merged = merge_encoders(base, model, torch.tensor(0.5), tmp_path / "merged")
    assert json.loads((merged / "run.json").read_text())["merging"]["ratio"] == 0.5
    (model / "run.json").write_text("[]")
    with refused("run.json: expected a mapping"):
        merge_encoders(base, model, 0.5, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_outside_its_range_is_refused(tmp_path, ratio):
    with refused("between 0 (before training) and 1"):
        merge_encoders("base", ["base"], ratio, tmp_path / "merged")


@pytest.mark.parametrize(
    "case, says",
    [
        ("grown", "cannot be merged with .*: embeddings.word_embeddings.weight is .*, not "),
        ("other architecture", "RobertaModel.*BertModel"),
        ("other tokenizer", "cannot be merged with .*: its tokenizer numbers '"),
        ("other token weights", "token_weights=log, but .* has token_weights=count; merge encoders"),
        ("missing weights", "no weights for .*encoder.layer.0"),
        ("no models", "pass at least one trained encoder"),
        ("full folder", "already exists and is not empty"),
        ("adapter on another base", "belongs to .*base"),
        ("adapter with trained tokens", "adapter_config.json: only plain LoRA can be scaled; merge the adapter first"),
        ("nothing", "neither a folder here nor a repository"),
    ],
)
def test_what_does_not_merge_is_refused_in_one_line(case, says, before, folder_of, adapter, tokenizer, tmp_path):
    base, output = folder_of(before, "start"), tmp_path / "merged"
    models, encoder = [folder_of(before, "model", 1)], copy.deepcopy(before)
    if case == "grown":
        encoder.resize_token_embeddings(len(tokenizer) + 8)
        models = [folder_of(encoder, "grown", 1)]
    elif case == "other architecture":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        models = [folder_of(BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)), "bert")]
    elif case == "other tokenizer":
        content = json.loads((base / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        one, other = sorted(vocabulary, key=vocabulary.get)[-2:]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        (base / "tokenizer.json").write_text(json.dumps(content))
    elif case == "other token weights":
        base = folder_of(before, "log", token_weights="log", pooling="mean")
    elif case == "missing weights":
        weights = {name: tensor for name, tensor in weights_of(base).items() if "layer.0.attention" not in name}
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    elif case == "adapter with trained tokens":
        encoder = load_model(base, resolve_profile(base))
        encoder.add_adapter(LoraConfig(r=2, target_modules=["query"], trainable_token_indices=[5, 7]))
        models = [folder_of(encoder, "tokens")]
    elif case == "full folder":
        output = base
    else:
        models = {"no models": [], "adapter on another base": [adapter[1]], "nothing": [tmp_path / "nowhere"]}[case]
    with pytest.raises(UserError, match=says) as error:
        merge_encoders(base, models, 0.5, output)
    assert "\n" not in str(error.value)
    assert output == base or not output.exists()
