"""Models that come with code, other precisions and attentions, and models that do not fit their profile."""

import json
import logging
import re
import shutil

import pytest
import torch
from refusals import refused
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5Model,
)

from soft_trainer.encoders.lazy import LazyEncoder
from soft_trainer.encoders.loading import load_encoder, load_model, load_tokenizer
from soft_trainer.encoders.positions import most_tokens
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.encoders.transformer import check_model, is_causal, profile_warnings
from soft_trainer.errors import UserError
from soft_trainer.estimators.frozen_encoder import TrainedModelEstimator
from soft_trainer.estimators.registry import choose_estimator
from soft_trainer.hub.export import export_encoder
from soft_trainer.options.fields import DataArguments
from soft_trainer.training.messages import warnings_of

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
    """A folder whose model comes with its code."""
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
    with refused(f"{remote}: its code comes", "--trust_remote_code true", "trust_remote_code=True"):
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
    options = DataArguments(estimator="trained_model", estimator_model=str(remote), no_estimator_cache=True)
    assert choose_estimator(options, trust_remote_code=True).load().model.config.hidden_size == 16
    with refused("trust_remote_code"):
        TrainedModelEstimator(str(remote)).load()
    with refused(f"{remote}: ", "a search never runs such code"):
        LazyEncoder(str(remote)).queries(["read a file"])


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
        ({"attn_implementation": "fast"}, ["no such attn_implementation; use eager, sdpa or flash_attention_2"]),
        ({"attn_implementation": "flash_attention_2"}, ["lash"]),
    ):
        with refused(*words):
            load_model(saved, profile, **options)


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


def test_lengths_of_sentence_transformers_end_at_the_positions(saved):
    (saved / "soft_trainer.json").unlink()
    assert resolve_profile(saved).code_length == 32
    settings = json.loads((saved / "sentence_bert_config.json").read_text())
    settings = {name: value for name, value in settings.items() if not name.endswith("_length")}
    (saved / "sentence_bert_config.json").write_text(json.dumps(settings | {"max_seq_length": 512}))
    assert resolve_profile(saved).code_length == 32


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
         "flash_attention_2: takes no mask for data flow; use sdpa or eager"),
    ):  # fmt: skip
        with refused(message):
            check_model(wrong, EncoderProfile(**settings))


def test_a_trainer_warns_of_settings_without_effect(model, profile, trainer_of):
    encoder = profile.replace(include_prompt=False)
    warned = warnings_of(trainer_of(arguments={"encoder": encoder}))
    assert profile_warnings(model, encoder)[0] in warned


# ---- Published encoders ----


def test_t5_gives_its_encoder_to_auto_model(tokenizer, tmp_path):
    torch.manual_seed(0)
    T5Model(T5Config(vocab_size=len(tokenizer), **T5)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = load_encoder(tmp_path, device="cpu")
    assert type(encoder.model).__name__ == "T5EncoderModel"
    export_encoder(encoder.model, encoder.tokenizer, encoder.profile, tmp_path / "out")
    whole = AutoModel.from_pretrained(tmp_path / "out")
    assert type(whole) is T5Model
    for name, weight in encoder.model.encoder.state_dict().items():
        assert torch.equal(whole.encoder.state_dict()[name], weight), name


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"include_prompt": False}, "no effect without --query_prompt or --code_prompt"),
        ({"include_prompt": False, "query_prefix": "q: ", "pooling": "last_token"}, "pooling=last_token reads no"),
        ({"pooling": "cls"}, "pooling=cls: .*is a decoder.* sees no other.*--pooling last_token"),
        ({"pooling": "last_token"}, None),
        ({"include_prompt": False, "query_prefix": "q: "}, None),
    ],
)
def test_settings_without_effect_are_named(changes, says):
    model = Qwen3Model(Qwen3Config(**SIZE, num_key_value_heads=1, head_dim=8, vocab_size=20))
    assert is_causal(model)
    warnings = profile_warnings(model, EncoderProfile(**changes))
    assert [bool(re.search(says, warning)) for warning in warnings] == ([True] if says else [])


# ---- Messages while loading ----


@pytest.mark.parametrize("pooler, missing", [(True, False), (False, True)], ids=["a-spare-pooler", "a-missing-pooler"])
def test_only_missing_weights_are_reported(tmp_path, caplog, monkeypatch, pooler, missing):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # other tests make it quiet
    config = BertConfig(vocab_size=40, max_position_embeddings=40, **SIZE)
    BertModel(config, add_pooling_layer=pooler).save_pretrained(tmp_path)
    load_model(tmp_path, EncoderProfile(query_length=16, code_length=16, pooling="pooler" if missing else "mean"))
    assert ("LOAD REPORT" in caplog.text) == missing
