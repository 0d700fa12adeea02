"""The profiles of the published encoders, and the values that a profile refuses."""

import dataclasses
import json

import pytest

from soft_trainer.encoders.profiles import PROFILE_FILE, PROFILES, EncoderProfile
from soft_trainer.errors import UserError

# The settings of the published scripts.
PUBLISHED = {
    "codebert": {"pooling": "pooler", "query_length": 200, "code_length": 200, "data_flow_length": 0},
    "graphcodebert": {"pooling": "pooler", "query_length": 128, "code_length": 256, "data_flow_length": 64},
    "unixcoder": {"pooling": "mean", "query_length": 128, "code_length": 256, "data_flow_length": 0},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_encoders(name):
    profile = PROFILES[name]
    assert {key: getattr(profile, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    assert (profile.score_function, profile.score_scale, profile.normalize) == ("dot", 1.0, False)
    prefix = "<encoder-only></s>" if name == "unixcoder" else ""
    assert profile.query_prefix == profile.code_prefix == prefix


@pytest.mark.parametrize("name", ["codebert", "unixcoder", "auto"])
def test_tokens_are_read_before_texts(name):
    assert PROFILES[name].query_columns == ("docstring_tokens", "docstring")
    assert PROFILES[name].code_columns == ("code_tokens", "code")


def test_graphcodebert_parses_the_original_text():
    assert PROFILES["graphcodebert"].code_columns[0] == "original_string"


def test_any_other_encoder_is_averaged():
    assert PROFILES["auto"].pooling == "mean" and PROFILES["auto"].query_prefix == ""


def test_replace_changes_what_is_given_and_keeps_what_is_none():
    changed = PROFILES["unixcoder"].replace(query_length=64, code_length=None, query_prefix="")
    assert (changed.query_length, changed.code_length, changed.query_prefix) == (64, 256, "")
    assert changed.code_prefix == "<encoder-only></s>" and PROFILES["unixcoder"].query_length == 128


def test_a_saved_profile_comes_back(tmp_path):
    profile = PROFILES["unixcoder"].replace(normalize=True, score_scale=20.0, code_columns=("body",))
    profile.save(tmp_path)
    assert EncoderProfile.load(tmp_path / PROFILE_FILE) == profile
    assert [path.name for path in tmp_path.iterdir()] == [PROFILE_FILE]


def test_a_profile_of_a_later_version_still_loads(tmp_path):
    values = dataclasses.asdict(PROFILES["codebert"]) | {"from_the_future": 1}
    (tmp_path / PROFILE_FILE).write_text(json.dumps(values))
    assert EncoderProfile.load(tmp_path / PROFILE_FILE) == PROFILES["codebert"]


@pytest.mark.parametrize("content, says", [("{", "not valid JSON"), ("[]", "a mapping is expected")])
def test_a_damaged_profile_names_its_file(tmp_path, content, says):
    (tmp_path / PROFILE_FILE).write_text(content)
    with pytest.raises(UserError, match=f"{PROFILE_FILE}: {says}"):
        EncoderProfile.load(tmp_path / PROFILE_FILE)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"pooling": "max"}, ["pooling='max'", "mean, cls, last_token, pooler"]),
        ({"score_function": "euclid"}, ["score_function='euclid'", "dot, cosine"]),
        ({"score_scale": 0.0}, ["score_scale=0.0", "above 0"]),
        ({"score_scale": float("nan")}, ["score_scale=nan"]),
        ({"score_scale": float("inf")}, ["score_scale=inf", "finite"]),
        ({"query_length": 2}, ["query_length=2", "at least 3"]),
        ({"code_length": 0}, ["code_length=0", "at least 3"]),
        ({"data_flow_length": -1}, ["data_flow_length=-1", "at least 0"]),
    ],
)
def test_a_wrong_value_names_itself_and_the_allowed(values, words):
    with pytest.raises(UserError) as caught:
        EncoderProfile(**values)
    assert all(word in str(caught.value) for word in words)
