"""Building the encoder from command-line options."""

import pytest

from soft_trainer.data.split import Split
from soft_trainer.encoders.profiles import PROFILES
from soft_trainer.errors import UserError
from soft_trainer.options.model import ModelArguments
from soft_trainer.run import starting
from soft_trainer.shell import building
from soft_trainer.shell.building import build_encoder, build_profile


def test_from_scratch_is_the_plain_profile_or_the_named_one():
    assert build_profile(ModelArguments(from_scratch="32x1")) == PROFILES["auto"]
    assert build_profile(ModelArguments(from_scratch="32x1", profile="unixcoder")) == PROFILES["unixcoder"]


def test_the_command_line_changes_a_profile():
    changes = {"pooling": "cls", "query_length": 20, "code_length": 30}
    changes |= {"data_flow_length": 5, "score_function": "cosine", "score_scale": 20.0}
    columns = {"query_columns": "title,docstring", "code_columns": "body, code"}
    arguments = ModelArguments(from_scratch="32x1", profile="unixcoder", **changes, **columns)
    expected = PROFILES["unixcoder"].replace(query_columns=("title", "docstring"), code_columns=("body", "code"))
    assert build_profile(arguments) == expected.replace(**changes)
    prompts = {"query_prompt": "find: ", "code_prompt": "code: ", "include_prompt": False}
    built = build_profile(ModelArguments(from_scratch="32x1", profile="unixcoder", **prompts))
    assert (built.query_prefix, built.code_prefix) == ("<encoder-only></s>find: ", "<encoder-only></s>code: ")
    assert built.include_prompt is False


def test_a_saved_encoder_brings_its_own_profile(encoder_dir, profile):
    assert build_profile(ModelArguments(model_name_or_path=str(encoder_dir))) == profile
    changed = build_profile(ModelArguments(model_name_or_path=str(encoder_dir), score_scale=5.0))
    assert changed == profile.replace(score_scale=5.0)


def test_the_default_is_unixcoder(monkeypatch):
    asked = []

    def resolve_profile(name_or_path, **_):
        asked.append(name_or_path)
        return PROFILES["unixcoder"]

    monkeypatch.setattr(building, "resolve_profile", resolve_profile)
    assert build_profile(ModelArguments()) == PROFILES["unixcoder"]
    assert asked == ["microsoft/unixcoder-base"]


def test_from_scratch_learns_both_sides_of_the_training_rows(dataset):
    arguments = ModelArguments(from_scratch="32x1", vocabulary_size=600)
    encoder = build_encoder(arguments)
    encoder.rows = Split.from_pairs(dataset)
    model, tokenizer = encoder.load()
    assert len(tokenizer) <= 600
    words = tokenizer.convert_ids_to_tokens(tokenizer(" connection return")["input_ids"])
    assert words[1:-1] == ["Ġconnection", "Ġreturn"]
    assert model.config.hidden_size == 32 and model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    "values, label",
    [
        ({}, "unixcoder-base"),
        ({"model_name_or_path": "microsoft/codebert-base"}, "codebert-base"),
        ({"model_name_or_path": "outputs/mine/"}, "mine"),
        ({"model_name_or_path": "/hub/models--microsoft--unixcoder-base/snapshots/5604af/"}, "unixcoder-base"),
        ({"from_scratch": "32x1"}, "scratch-32x1"),
    ],
)
def test_a_short_name_for_folders(values, label, monkeypatch):
    monkeypatch.setattr(building, "resolve_profile", lambda *_, **__: PROFILES["unixcoder"])
    monkeypatch.setattr(starting, "saved_adapter", lambda *_: None)
    assert build_encoder(ModelArguments(**values)).label == label


@pytest.mark.parametrize(
    "values, words",
    [
        ({"dtype": "half"}, "dtype='half': use one of float32, bfloat16, float16"),
        (
            {"from_scratch": "32x1", "dtype": "bfloat16"},
            "dtype and attn_implementation do not apply with from_scratch",
        ),
        ({"from_scratch": "32x1", "pooling": "pooler", "include_prompt": False}, "include_prompt=False: the model's"),
        (
            {"from_scratch": "32x1", "profile": "graphcodebert", "pooling": "cls", "include_prompt": False},
            "include_prompt=False: data flow always includes the prompt",
        ),
    ],
)
def test_options_of_todays_encoders_that_cannot_work_are_one_line(values, words):
    with pytest.raises(UserError) as refusal:
        build_profile(ModelArguments(**values))
    assert str(refusal.value).startswith(words) and "\n" not in str(refusal.value)
