"""Profiles come from published names, `soft_trainer.json` or sentence-transformers' files, or are refused."""

import dataclasses
import json

import pytest
from refusals import refused

from soft_trainer.encoders.export import export_encoder
from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import PROFILES, EncoderProfile, resolve_profile
from soft_trainer.hub.files import published_name
from soft_trainer.system.files import PROFILE_FILE

# The settings of the published scripts: pooling, maximum tokens of a query, a code and its data flow, prefix.
PUBLISHED = {
    "codebert": ("pooler", 200, 200, 0, ""),
    "graphcodebert": ("pooler", 128, 256, 64, ""),
    "unixcoder": ("mean", 128, 256, 0, "<encoder-only></s>"),
    "auto": ("mean", 128, 256, 0, ""),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_encoders(name):
    profile = PROFILES[name]
    found = profile.pooling, profile.query_length, profile.code_length, profile.data_flow_length, profile.query_prefix
    assert found == PUBLISHED[name] and profile.code_prefix == profile.query_prefix
    assert (profile.score_function, profile.score_scale, profile.normalize) == ("dot", 1.0, False)
    assert profile.query_columns == ("docstring_tokens", "docstring")
    # Data flow needs the original text of the code.
    code_columns = ("original_string", "code") if profile.data_flow_length else ("code_tokens", "code")
    assert profile.code_columns == code_columns


def test_replace_changes_what_is_given_and_keeps_what_is_none():
    changed = PROFILES["unixcoder"].replace(query_length=64, code_length=None, query_prefix="")
    assert (changed.query_length, changed.code_length, changed.query_prefix) == (64, 256, "")
    assert changed.code_prefix == "<encoder-only></s>" and PROFILES["unixcoder"].query_length == 128


@pytest.mark.parametrize(
    "value, words",
    [
        ({"pooling": "max"}, ["pooling='max'", "mean, cls, last_token, pooler"]),
        ({"score_function": "euclid"}, ["score_function='euclid'", "dot, cosine"]),
        ({"score_scale": 0.0}, ["score_scale=0.0", "above 0"]),
        ({"score_scale": float("nan")}, ["score_scale=nan"]),
        ({"score_scale": float("inf")}, ["score_scale=inf", "finite"]),
        ({"query_length": 2}, ["query_length=2", "at least 3"]),
        ({"code_length": 0}, ["code_length=0", "at least 3"]),
        ({"data_flow_length": -1}, ["data_flow_length=-1", "at least 0"]),
        ({"include_prompt": False, "pooling": "pooler"}, ["include_prompt=False: ", "use pooling mean or cls"]),
        ({"include_prompt": False, "data_flow_length": 8}, ["include_prompt=False: ", "use pooling mean or cls"]),
    ],
)
def test_a_wrong_value_names_itself_and_the_allowed(value, words):
    with refused(*words):
        EncoderProfile(**value)


# ---- Names ----

SNAPSHOT = "snapshots/5604afdc964f6c53782a6813140ade5216b99006"


def test_a_profile_by_its_name():
    assert all(resolve_profile("wherever", name=name) is profile for name, profile in PROFILES.items())
    with refused("codebert, graphcodebert, unixcoder, ", "auto"):
        resolve_profile("wherever", name="bert")


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
        ("nomic-ai/CodeRankEmbed", "coderankembed"),
        ("Qwen/Qwen3-Embedding-0.6B", "qwen3-embedding"),
        ("Alibaba-NLP/gte-modernbert-base", "gte-modernbert"),
        ("someone/ModernBERT-base", "modernbert"),
    ],
)
def test_the_profile_of_a_published_encoder_by_the_name_of_its_folder(tmp_path, monkeypatch, folder, name):
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    whole_name = folder.split("/")[0] in ("nomic-ai", "Qwen", "Alibaba-NLP")  # not the last part alone
    paths = (folder,) if whole_name else (folder, f"{folder}/", tmp_path / folder, f"{tmp_path}/{folder}/")
    assert all(resolve_profile(path) is PROFILES[name] for path in paths)


def test_published_name():
    snapshot = "/cache/hub/models--a--b/snapshots/5604af"
    assert published_name(snapshot) == "a/b"
    assert published_name("outputs/run/") == "outputs/run"
    for name in ("/cache/hub/models--a--b", f"{snapshot}/1_Pooling", "microsoft/unixcoder-base", ""):
        assert published_name(name) == name


# ---- Our file ----


def change(path, changes) -> None:
    """Changes keys of a JSON file. A list replaces the whole content."""
    content = changes if isinstance(changes, list) else json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))


def test_a_saved_profile_comes_back_before_all_others(folder, tmp_path):
    profile = PROFILES["unixcoder"].replace(normalize=True, score_scale=20.0, code_columns=("body",))
    profile.save(folder)
    assert EncoderProfile.load(folder / PROFILE_FILE) == resolve_profile(folder) == profile
    change(folder / PROFILE_FILE, {"from_the_future": 1})
    assert resolve_profile(folder) == profile


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a mapping"),
        ({"pooling": 1}, "pooling=1: must be of type str"),
        ({"query_length": "16"}, "query_length='16': must be of type int"),
        ({"code_length": None}, "code_length=None: must be of type int"),
        ({"normalize": "false"}, "normalize='false': must be of type bool"),
        ({"score_scale": [20]}, "score_scale=(20,): must be of type float"),
        ({"code_columns": "code"}, "code_columns='code': must be of type tuple"),
        ({"pooling": "max"}, "pooling='max': use one of mean"),
    ],
)
def test_a_damaged_profile(profile, tmp_path, content, message):
    if isinstance(content, dict):
        content = json.dumps(dataclasses.asdict(profile) | content)
    (tmp_path / PROFILE_FILE).write_text(content)
    for read in (resolve_profile, load_encoder):
        with refused(f"{PROFILE_FILE}: {message}"):
            read(tmp_path)


# ---- The files of sentence-transformers ----

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
TEXTS, SETTINGS = "sentence_bert_config.json", "config_sentence_transformers.json"


@pytest.fixture
def folder(model, tokenizer, profile, tmp_path):
    """Exports an encoder and deletes its profile, so that the files of sentence-transformers are read."""
    export_encoder(model, tokenizer, profile, tmp_path)
    (tmp_path / PROFILE_FILE).unlink()
    return tmp_path


DOT = {"similarity_fn_name": "dot"}
READ = {"query_length": 32, "code_length": 32, "score_function": "cosine", "score_scale": 20.0}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({SETTINGS: {"prompts": {"document": "d: ", "passage": "p: "}}}, {"code_prefix": "d: "}),
        ({SETTINGS: {"prompts": {"query": "Q: ", "document": None}}}, {"query_prefix": "Q: "}),
        ({POOLING: {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 0}}, {}),
        # Dot products are not scaled, but the dot products of normalised embeddings are cosines.
        ({SETTINGS: DOT}, {"score_function": "dot", "score_scale": 1.0}),
        ({SETTINGS: DOT, MODULES: "Normalize"}, {"score_function": "dot", "normalize": True}),
        # Lengths are limited by the positions. If the module has no length, the tokenizer's is used.
        ({TEXTS: {"max_seq_length": 512}}, {}),
        ({TEXTS: {"query_length": 8, "max_seq_length": 20}}, {"query_length": 8, "code_length": 20}),
        ({TEXTS: {"max_seq_length": None}, "tokenizer_config.json": {"model_max_length": 24}},
         {"query_length": 24, "code_length": 24}),
        ({TEXTS: {"max_seq_length": None, "query_length": 8}, "tokenizer_config.json": {"model_max_length": 10**30}},
         {"query_length": 8, "code_length": PROFILES["auto"].code_length}),
        ({"config.json": {"max_position_embeddings": 20.0}}, {"query_length": 18, "code_length": 18}),
    ],
)  # fmt: skip
def test_what_is_read(folder, files, expected):
    change(folder / TEXTS, {"query_length": None, "document_length": None, "max_seq_length": 32})
    for file, changes in files.items():
        if file == MODULES:
            modules = json.loads((folder / MODULES).read_text())
            changes = [*modules, {"path": "2", "type": f"sentence_transformers.models.{changes}"}]
        change(folder / file, changes)
    assert resolve_profile(folder) == EncoderProfile(**READ | expected)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (MODULES, [{"path": ""}], "'type'"),
        (MODULES, ["Transformer"], "the wrong type"),
        (POOLING, {"pooling_mode": 3}, "the wrong type"),
        (POOLING, {"pooling_mode_cls_token": True}, "a profile cannot express these sentence-transformers modules"),
        (POOLING, None, "1_Pooling/config.json is missing or empty"),  # which does not mean that tokens are averaged
        (TEXTS, {"max_seq_length": "64"}, "the wrong type"),
        (TEXTS, {"query_length": 1}, "query_length=1"),
        (TEXTS, {"modality_config": "text"}, "the wrong type"),
        (SETTINGS, {"prompts": ["query: "]}, "the wrong type"),
        (SETTINGS, {"similarity_fn_name": ["dot"]}, "a profile cannot express these sentence-transformers modules"),
        ("tokenizer_config.json", {"model_max_length": "long"}, "the wrong type"),
        ("config.json", {"max_position_embeddings": "many"}, "the wrong type"),
    ],
)
def test_what_is_refused(folder, file, changes, message):
    if file == "tokenizer_config.json":
        change(folder / TEXTS, {"max_seq_length": None})
    if changes is None:
        (folder / file).unlink()
    else:
        change(folder / file, changes)
    with refused(message, folder):
        resolve_profile(folder)


def test_files_that_are_read_with_the_weights(folder):
    for value in (0, "8", 4.5, True):
        change(folder / SETTINGS, {"truncate_dim": value})
        with refused("truncate_dim=", ": must be a whole number from 1 to"):
            load_encoder(folder, device="cpu")
    for file in ("config.json", MODULES):
        (folder / file).unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": 5}))
    with refused("adapter_config.json has no base_model_name_or_path"):
        load_encoder(folder, device="cpu")
