"""Valid JSON with wrong keys or values in a folder's files: one line names the folder."""

import json

import pytest
from refusals import refused

from soft_trainer.encoders.loading import load_encoder
from soft_trainer.encoders.profiles import PROFILE_FILE, resolve_profile
from soft_trainer.hub.export import export_encoder

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
TEXTS, SETTINGS = "sentence_bert_config.json", "config_sentence_transformers.json"


@pytest.fixture
def folder(model, tokenizer, profile, tmp_path):
    """An exported folder without the profile, so that the files of sentence-transformers are read."""
    export_encoder(model, tokenizer, profile, tmp_path)
    (tmp_path / PROFILE_FILE).unlink()
    return tmp_path


def change(path, changes) -> None:
    """Changes keys of a JSON file; a list replaces its content."""
    content = changes if isinstance(changes, list) else json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (MODULES, [{"path": ""}], "'type'"),
        (MODULES, ["Transformer"], "the wrong type"),
        (POOLING, {"pooling_mode": 3}, "the wrong type"),
        (TEXTS, {"max_seq_length": "64"}, "the wrong type"),
        (TEXTS, {"query_length": 1}, "query_length=1"),
        (TEXTS, {"modality_config": "text"}, "the wrong type"),
        (SETTINGS, {"prompts": ["query: "]}, "the wrong type"),
        (SETTINGS, {"similarity_fn_name": ["dot"]}, "more than a profile expresses"),
        ("tokenizer_config.json", {"model_max_length": "long"}, "the wrong type"),
        ("config.json", {"max_position_embeddings": "many"}, "the wrong type"),
    ],
)
def test_files_of_sentence_transformers(folder, file, changes, message):
    if file == "tokenizer_config.json":
        change(folder / TEXTS, {"max_seq_length": None})
    change(folder / file, changes)
    with refused(message, folder):
        resolve_profile(folder)


def test_files_that_are_read_with_the_weights(folder):
    for value in (0, "8", 4.5, True):
        change(folder / SETTINGS, {"truncate_dim": value})
        with refused("truncate_dim=", ": must be a whole number from 1 to"):
            load_encoder(folder, device="cpu")
    (folder / POOLING).unlink()  # which does not mean that the tokens are averaged
    with refused("1_Pooling/config.json is missing or empty"):
        resolve_profile(folder)
    (folder / "config.json").unlink()
    (folder / MODULES).unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": 5}))
    with refused("adapter_config.json has no base_model_name_or_path"):
        load_encoder(folder, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": 1}, "pooling=1: must be of type str"),
        ({"query_length": "16"}, "query_length='16': must be of type int"),
        ({"code_length": None}, "code_length=None: must be of type int"),
        ({"normalize": "false"}, "normalize='false': must be of type bool"),
        ({"score_scale": [20]}, "score_scale=(20,): must be of type float"),
        ({"code_columns": "code"}, "code_columns='code': must be of type tuple"),
        ({"pooling": "max"}, "pooling='max': use one of mean"),
    ],
)
def test_the_profile(profile, tmp_path, changes, message):
    profile.save(tmp_path)
    change(tmp_path / PROFILE_FILE, changes)
    for read in (resolve_profile, load_encoder):
        with refused(f"{PROFILE_FILE}: {message}"):
            read(tmp_path)


def test_a_misspelled_key_of_the_profile(profile, tmp_path):
    profile.save(tmp_path)
    path = tmp_path / PROFILE_FILE
    path.write_text(path.read_text().replace('"pooling"', '"poling"'))
    with refused(f"{PROFILE_FILE}: unknown key 'poling'; did you mean 'pooling'"):
        resolve_profile(tmp_path)


def test_null_and_numbers_that_sentence_transformers_takes(folder):
    change(folder / SETTINGS, {"prompts": {"query": "Q: ", "document": None}})
    change(folder / POOLING, {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 0})
    change(folder / "config.json", {"max_position_embeddings": 66.0})
    profile = resolve_profile(folder)
    assert (profile.query_prefix, profile.code_prefix, profile.pooling) == ("Q: ", "", "mean")
    assert profile.query_length <= 66
