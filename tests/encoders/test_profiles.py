"""The profiles of the published encoders, and the values that a profile refuses."""

import dataclasses
import json

import pytest
from refusals import refused

from soft_trainer.encoders.profiles import PROFILE_FILE, PROFILES, EncoderProfile

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


def test_tokens_are_read_before_texts_but_graphs_need_the_original_text():
    for name in ("codebert", "unixcoder", "auto"):
        assert PROFILES[name].query_columns == ("docstring_tokens", "docstring")
        assert PROFILES[name].code_columns == ("code_tokens", "code")
    assert PROFILES["graphcodebert"].code_columns[0] == "original_string"
    assert PROFILES["auto"].pooling == "mean" and PROFILES["auto"].query_prefix == ""


def test_replace_changes_what_is_given_and_keeps_what_is_none():
    changed = PROFILES["unixcoder"].replace(query_length=64, code_length=None, query_prefix="")
    assert (changed.query_length, changed.code_length, changed.query_prefix) == (64, 256, "")
    assert changed.code_prefix == "<encoder-only></s>" and PROFILES["unixcoder"].query_length == 128


def test_a_saved_profile_comes_back(tmp_path):
    profile = PROFILES["unixcoder"].replace(normalize=True, score_scale=20.0, code_columns=("body",))
    profile.save(tmp_path)
    [path] = tmp_path.iterdir()
    assert path.name == PROFILE_FILE and EncoderProfile.load(path) == profile
    path.write_text(json.dumps(dataclasses.asdict(profile) | {"from_the_future": 1}))
    assert EncoderProfile.load(path) == profile  # of a later version
    for content, words in (("{", "not valid JSON"), ("[]", "a mapping is expected")):
        path.write_text(content)
        with refused(f"{PROFILE_FILE}: {words}"):
            EncoderProfile.load(path)


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
    ],
)
def test_a_wrong_value_names_itself_and_the_allowed(value, words):
    with refused(*words):
        EncoderProfile(**value)
