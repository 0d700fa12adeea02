import json

import pytest
import torch
from refusals import refused

from soft_trainer.encoders.loading import Encoder, load_encoder, load_model, load_tokenizer
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile, resolve_profile
from soft_trainer.encoders.repository import published_name, reading
from soft_trainer.encoders.tokenizers import prepare_tokenizer, register_prefix_tokens
from soft_trainer.errors import UserError
from soft_trainer.hub.export import export_encoder

TEXTS = ["read a file", "def f(): pass", "x", "a much longer text than all of the others " * 9]


def sentence_transformer(folder, pooling=None, normalize=True, transformer=None, **settings):
    """Makes a folder with the settings of sentence-transformers, without weights."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    if not normalize:
        del kinds["2_Normalize"]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer or {"max_seq_length": 96}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


# ---- Profiles ----


def test_a_profile_by_its_name():
    assert all(resolve_profile("wherever", name=name) is profile for name, profile in PROFILES.items())
    with pytest.raises(UserError, match="codebert, graphcodebert, unixcoder, .*auto"):
        resolve_profile("wherever", name="bert")


SNAPSHOT = "snapshots/5604afdc964f6c53782a6813140ade5216b99006"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("unixcoder-base-nine", "unixcoder"),
        ("codebert-base", "codebert"),
        ("something-else", "auto"),
        (f"models--microsoft--unixcoder-base/{SNAPSHOT}", "unixcoder"),
        (f"models--someone--graphcodebert-base/{SNAPSHOT}", "graphcodebert"),
        (f"models--codebert-base/{SNAPSHOT}", "codebert"),
        (f"models--microsoft--unixcoder-base-finetuned/{SNAPSHOT}", "auto"),
    ],
)
def test_the_profile_of_a_published_encoder_by_the_name_of_its_folder(tmp_path, monkeypatch, folder, name):
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in (folder, f"{folder}/", tmp_path / folder, f"{tmp_path}/{folder}/"):
        assert resolve_profile(path) is PROFILES[name]


def test_the_profile_of_a_published_encoder_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, profile in {
        "nomic-ai/CodeRankEmbed": "coderankembed",
        "Qwen/Qwen3-Embedding-0.6B": "qwen3-embedding",
        "Alibaba-NLP/gte-modernbert-base": "gte-modernbert",
        "someone/ModernBERT-base": "modernbert",
    }.items():
        (tmp_path / name).mkdir(parents=True)
        assert resolve_profile(name) is PROFILES[profile]


def test_published_name():
    snapshot = "/cache/hub/models--a--b/snapshots/5604af"
    assert published_name(snapshot) == "a/b"
    assert published_name("outputs/run/") == "outputs/run"
    for name in ("/cache/hub/models--a--b", f"{snapshot}/1_Pooling", "microsoft/unixcoder-base", ""):
        assert published_name(name) == name


def test_own_profile_comes_before_all_others(tmp_path):
    folder = tmp_path / "unixcoder-base"
    folder.mkdir()
    profile = EncoderProfile(pooling="cls", query_length=7, code_columns=("body",))
    sentence_transformer(folder)
    profile.save(folder)
    assert resolve_profile(folder) == profile


def test_sentence_transformers_profile(tmp_path):
    resolved = resolve_profile(sentence_transformer(tmp_path, prompts={"query": "q: ", "passage": "p: "}))
    prefixes = {"query_prefix": "q: ", "code_prefix": "p: "}
    scores = {"normalize": True, "score_function": "cosine", "score_scale": 20.0}
    assert resolved == EncoderProfile(pooling="mean", query_length=96, code_length=96, **prefixes, **scores)


def test_lengths_come_from_the_tokenizer_where_the_module_has_none(tmp_path):
    folder = sentence_transformer(tmp_path, transformer={"query_length": 32})
    for saved, expected in ((200, (32, 200)), (10**30, (32, PROFILES["auto"].code_length))):
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": saved}))
        resolved = resolve_profile(folder)
        assert (resolved.query_length, resolved.code_length) == expected


def test_unbounded_dot_products_are_not_scaled(tmp_path):
    folder = sentence_transformer(tmp_path, {"pooling_mode": "cls"}, normalize=False, similarity_fn_name="dot")
    found = resolve_profile(folder)
    assert (found.pooling, found.normalize) == ("cls", False)
    assert (found.score_function, found.score_scale) == ("dot", 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": {"pooling_mode_max_tokens": True}},
        {"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}},
        {"pooling": {"pooling_mode": "weightedmean"}},
        {"similarity_fn_name": "euclidean"},
    ],
    ids=["max", "mean and cls", "weighted mean", "euclidean"],
)
def test_what_no_profile_expresses_is_refused(tmp_path, changes):
    with pytest.raises(UserError, match="more than a profile expresses"):
        resolve_profile(sentence_transformer(tmp_path, **changes))


# ---- Tokens ----


def test_prefix_token_keeps_its_id(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    number = content["model"]["vocab"]["<encoder-only>"] = len(content["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    published = type(tokenizer).from_pretrained(tmp_path)
    assert number not in published("<encoder-only>")["input_ids"]
    size = len(published)
    for _ in range(2):
        register_prefix_tokens(published, PROFILES["unixcoder"])
        assert published("<encoder-only>x")["input_ids"][1] == number
        assert len(published) == size


def test_a_missing_prefix_token_is_refused_but_a_prompt_that_begins_with_a_tag_stays_text(tokenizer):
    with refused("unixcoder", "<encoder-only>"):
        register_prefix_tokens(tokenizer, PROFILES["unixcoder"])
    prepare_tokenizer(tokenizer, PROFILES["auto"].with_prompts("<query> "))
    assert "<query>" not in tokenizer.all_special_tokens


# ---- Encoding ----


def test_the_cut_of_sentence_transformers_is_read(model, tokenizer, profile, tmp_path):
    export_encoder(model, tokenizer, profile, tmp_path)
    assert load_encoder(tmp_path, device="cpu").encode_queries([]).shape == (0, 32)
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncate_dim": 8}))
    assert load_encoder(tmp_path, device="cpu").encode_queries(TEXTS).shape[1] == 8
    assert load_encoder(tmp_path, device="cpu", truncate_dim=16).encode_queries(TEXTS).shape[1] == 16


# ---- Data flow ----


@pytest.fixture
def graph_encoder(tokenizer):
    from soft_trainer.encoders.scratch import small_roberta

    profile = PROFILES["graphcodebert"].replace(query_length=16, code_length=24, data_flow_length=8)
    torch.manual_seed(0)
    return Encoder(small_roberta("32x2", tokenizer, profile).eval(), tokenizer, profile)


CODES = ["def f(a):\n    b = a\n    return b", "def g():\n    pass", "def h(x, y):\n    z = x + y\n    return z * z"]


def test_codes_are_read_with_their_data_flow(graph_encoder):
    together = graph_encoder.encode_codes(CODES, language="python")
    alone = torch.cat([graph_encoder.encode_codes([code], language="python") for code in CODES])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    plain = Encoder(graph_encoder.model, graph_encoder.tokenizer, graph_encoder.profile.replace(data_flow_length=0))
    changed = (together - plain.encode_codes(CODES)).abs().amax(1) > 1e-4
    assert changed[0] and changed[2]
    for language, words in ((None, "pass language"), ("cobol", "language='cobol'")):
        with refused(words):
            graph_encoder.encode_codes(CODES, language=language)


# ---- Missing and damaged files ----


def test_a_folder_without_a_model_is_refused(tmp_path):
    for name in ("no/such/folder", "/no/such/folder"):
        with refused(f"{name}: neither a folder here nor a repository"):
            load_encoder(name)
    for load in (load_encoder, lambda folder: load_model(folder, PROFILES["auto"])):
        with refused(f"{tmp_path}: no config.json in it, so it is not the folder of a model"):
            load(tmp_path)


def test_weights_that_cannot_be_read_are_refused(model, tokenizer, profile, tmp_path):
    weights = export_encoder(model, tokenizer, profile, tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with refused(f"{tmp_path}: "):
        load_encoder(tmp_path)
    weights.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # a pickle
    with refused("no safetensors weights"):
        load_model(tmp_path, profile)


def test_folder_without_a_tokenizer_says_how_to_add_one(model, tokenizer, tmp_path):
    """For this folder transformers silently makes a tokenizer with only five special tokens."""
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError) as refusal:
        load_encoder(tmp_path)
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path}: no tokenizer in it") and "\n" not in message
    command = message[message.index("AutoTokenizer") :]
    assert command == f"AutoTokenizer.from_pretrained(BASE).save_pretrained({str(tmp_path)!r})"
    tokenizer.save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path, PROFILES["auto"])) == len(tokenizer)


def test_tokenizer_that_transformers_cannot_make_is_one_line(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    with pytest.raises(UserError, match=f"^{tmp_path}: no tokenizer in it .*save_pretrained"):
        load_tokenizer(tmp_path, PROFILES["auto"])


def test_an_error_of_several_lines_is_told_in_full_on_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError) as refusal, reading(tmp_path):
        raise ValueError("one of:\n(1) the first,\n(2) the second")
    assert str(refusal.value) == f"{tmp_path}: one of: (1) the first, (2) the second"
