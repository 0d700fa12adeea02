"""Encoders load with remote code and in every precision. Bad files, and models that do not fit, are refused."""

import contextlib
import json
import logging
import re
import shutil

import pytest
import torch
from refusals import refused
from trainings import warned
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5Model,
)

from soft_trainer.encoders.encoding import Encoder
from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import (
    check_model,
    load_encoder,
    load_model,
    load_tokenizer,
    profile_warnings,
)
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile, most_tokens
from soft_trainer.encoders.scratch import random_model
from soft_trainer.encoders.text_encoder import open_encoder
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.hub.files import reading
from soft_trainer.options.fields import EstimatorOptions

TEXTS = ["read a file", "x"]
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CODE = """
from transformers import BertConfig, BertModel

class OwnConfig(BertConfig):
    model_type = "own"

class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.fixture
def remote(tokenizer, profile, tmp_path):
    """Writes the folder of a model that comes with its code."""
    folder = tmp_path / "own"
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **SIZE)
    export_encoder(BertModel(config, add_pooling_layer=False), tokenizer, profile, folder)
    content = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    content |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "own.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("load", [load_encoder, lambda folder: load_model(folder, EncoderProfile())])
def test_code_runs_only_on_request_and_the_refusal_names_the_option(remote, load):
    with refused(f"{remote}: the model needs code from its repository", "trust_remote_code=True"):
        load(remote)


@pytest.mark.slow
def test_a_model_with_code_trains_and_its_folder_has_the_code(remote, trainer_of, profile, same_everywhere):
    model = load_model(remote, profile, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel" and model.pooler is None
    tokenizer = load_tokenizer(remote, profile, trust_remote_code=True)
    trainer = trainer_of(max_steps=1, estimator=None, arguments={"model": model, "processing_class": tokenizer})
    trainer.train()
    trainer.save_model()
    shutil.rmtree(remote)
    same_everywhere(trainer.args.output_dir, TEXTS, trust_remote_code=True)


def test_encoders_of_estimators_get_the_option_too_and_a_search_does_not(remote):
    options = EstimatorOptions(estimator="trained_model", estimator_model=str(remote), estimator_cache_dir="none")
    assert choose_estimator(options, trust_remote_code=True).load().model.config.hidden_size == 16
    with refused("trust_remote_code"):
        TrainedModelEstimator(str(remote)).load()
    with refused(f"{remote}: ", "search never runs such code"):
        open_encoder(str(remote))


# ---- Precision and attention ----


@pytest.fixture
def saved(model, tokenizer, profile, tmp_path):
    return export_encoder(model, tokenizer, profile, tmp_path / "saved")


def test_dtype_and_attention_are_those_asked_for(saved, profile):
    assert load_model(saved, profile).dtype == torch.float32
    half = load_model(saved, profile, dtype="bfloat16", attn_implementation="eager")
    assert half.dtype == torch.bfloat16 and half.config._attn_implementation == "eager"
    for options, words in (
        ({"dtype": "int8"}, ["int8", "floating-point"]),
        (
            {"attn_implementation": "fast"},
            ["does not support this attn_implementation; use eager, sdpa or flash_attention_2"],
        ),
        ({"attn_implementation": "flash_attention_2"}, ["lash"]),
    ):
        with refused(*words):
            load_model(saved, profile, **options)


def test_the_cut_of_sentence_transformers_is_read(saved):
    assert load_encoder(saved, device="cpu").encode_queries([]).shape == (0, 32)
    path = saved / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncate_dim": 8}))
    assert load_encoder(saved, device="cpu").encode_queries(TEXTS).shape[1] == 8
    assert load_encoder(saved, device="cpu", truncate_dim=16).encode_queries(TEXTS).shape[1] == 16


# ---- Data flow ----

CODES = ["def f(a):\n    b = a\n    return b", "def g():\n    pass", "def h(x, y):\n    z = x + y\n    return z * z"]


def test_codes_are_read_with_their_data_flow(tokenizer):
    profile = PROFILES["graphcodebert"].replace(query_length=16, code_length=24, data_flow_length=8)
    torch.manual_seed(0)
    encoder = Encoder(random_model("32x2", tokenizer, profile).eval(), tokenizer, profile)
    together = encoder.encode_codes(CODES, language="python")
    alone = torch.cat([encoder.encode_codes([code], language="python") for code in CODES])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    plain = Encoder(encoder.model, tokenizer, profile.replace(data_flow_length=0))
    changed = (together - plain.encode_codes(CODES)).abs().amax(1) > 1e-4
    assert changed[0] and changed[2]
    for language, words in ((None, "pass language"), ("cobol", "language='cobol'")):
        with refused(words):
            encoder.encode_codes(CODES, language=language)


# ---- Missing and damaged files ----


def test_a_folder_without_a_model_is_refused(tmp_path):
    for name in ("no/such/folder", "/no/such/folder"):
        with refused(f"{name}: neither a folder here nor a repository"):
            load_encoder(name)
    for load in (load_encoder, lambda folder: load_model(folder, PROFILES["auto"])):
        with refused(f"{tmp_path}: no config.json in it, so it is not a model's folder"):
            load(tmp_path)


def test_weights_that_cannot_be_read_are_refused(saved, model, profile):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with refused(f"{saved}: "):
        load_encoder(saved)
    weights.unlink()
    torch.save(model.state_dict(), saved / "pytorch_model.bin")  # a pickle
    with refused("no safetensors weights"):
        load_model(saved, profile)


def test_a_folder_without_a_tokenizer_says_how_to_add_one(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    command = f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(tmp_path)!r})"
    # Here, transformers makes a tokenizer with only five special tokens, without a warning. For bloom, it fails.
    config = json.loads((tmp_path / "config.json").read_text())
    for kind in ("bloom", config["model_type"]):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        with refused(f"{tmp_path}: no tokenizer (tokenizer.json)", f": {command}"):
            load_tokenizer(tmp_path, PROFILES["auto"])
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path, PROFILES["auto"])) == len(tokenizer)


def test_an_error_of_several_lines_is_told_in_full_on_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with refused(f"{tmp_path}: one of: (1) the first, (2) the second"), reading(tmp_path):
        raise ValueError("one of:\n(1) the first,\n(2) the second")


# ---- Models and profiles that do not fit ----


def test_the_number_of_tokens_that_a_model_reads():
    bert = {"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}
    assert most_tokens(bert) == 512
    for kind in ("roberta", "xlm-roberta", "mpnet"):
        assert most_tokens({"model_type": kind, "max_position_embeddings": 514, "pad_token_id": 1}) == 512
    assert most_tokens({"model_type": "t5"}) is None
    assert most_tokens({"model_type": "xlnet", "max_position_embeddings": -1}) is None


def test_texts_longer_than_the_positions_are_refused_from_python(saved, profile, trainer_of):
    long = profile.replace(code_length=33)
    long.save(saved)
    for call in (
        lambda: trainer_of(arguments={"encoder": long}),
        lambda: load_model(saved, long),
        lambda: load_encoder(saved),
    ):
        with pytest.raises(UserError, match="^code_length=33: the model reads at most 32 tokens$"):
            call()


DISTILBERT = DistilBertConfig(vocab_size=9, dim=8, n_layers=1, n_heads=1, hidden_dim=8)
T5 = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}


def test_a_model_that_does_not_fit_is_refused(model):
    model.config._attn_implementation = "flash_attention_2"
    for wrong, settings, message in (
        (DistilBertModel(DISTILBERT), {"pooling": "pooler"},
         "pooling=pooler: DistilBertModel has no pooler; use cls, mean or last_token"),
        (T5Model(T5Config(vocab_size=9, **T5)), {},
         "model: T5Model also has a decoder; pass T5EncoderModel instead"),
        (model, {"query_length": 8, "code_length": 8, "data_flow_length": 8},
         "flash_attention_2: does not support the mask for data flow; use sdpa or eager"),
    ):  # fmt: skip
        with refused(message):
            check_model(wrong, EncoderProfile(**settings))


def test_a_trainer_warns_of_settings_without_effect(model, profile, trainer_of):
    encoder = profile.replace(include_prompt=False)
    warnings = warned(trainer_of(arguments={"encoder": encoder}))
    assert profile_warnings(model, encoder)[0] in warnings


# ---- Published encoders ----


def test_of_a_t5_only_the_encoder_is_loaded(tokenizer, tmp_path):
    torch.manual_seed(0)
    T5Model(T5Config(vocab_size=len(tokenizer), **T5)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, device="cpu")
    assert type(encoder.model).__name__ == "T5EncoderModel"


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"include_prompt": False}, "no effect without query_prompt or code_prompt"),
        ({"include_prompt": False, "query_prefix": "q: ", "pooling": "last_token"}, "pooling=last_token never"),
        ({"pooling": "cls"}, "pooling=cls .*is a decoder.* attends to no other.*pooling=last_token"),
        ({"pooling": "last_token"}, None),
        ({"include_prompt": False, "query_prefix": "q: "}, None),
    ],
)
def test_settings_without_effect_are_named(changes, says):
    model = Qwen3Model(Qwen3Config(**SIZE, num_key_value_heads=1, head_dim=8, vocab_size=20))
    warnings = profile_warnings(model, EncoderProfile(**changes))
    assert [bool(re.search(says, warning)) for warning in warnings] == ([True] if says else [])


# ---- Messages while loading ----


@pytest.mark.parametrize(
    ("pooling", "lacking", "message"),
    [
        ("mean", "pooler.", None),
        ("mean", "nothing, but has a spare pooler", None),
        (
            "pooler",
            "pooler.",
            "no weights for pooler.dense.bias, which would be random; check the files, or use pooling=mean or cls",
        ),
        (
            "cls",
            "embeddings.word_embeddings",
            "no weights for embeddings.word_embeddings.weight, which would be random",
        ),
        ("mean", "layer.0.output.LayerNorm", "no weights for encoder.layer.0.output.LayerNorm.bias"),
    ],
)
def test_weights_that_embeddings_read_are_not_invented(tmp_path, caplog, monkeypatch, pooling, lacking, message):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # other tests make it quiet
    model = BertModel(BertConfig(vocab_size=40, max_position_embeddings=40, **SIZE))
    weights = {name: tensor for name, tensor in model.state_dict().items() if lacking not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with refused(message) if message else contextlib.nullcontext():
        load_model(tmp_path, EncoderProfile(query_length=16, code_length=16, pooling=pooling))
    assert "LOAD REPORT" not in caplog.text
