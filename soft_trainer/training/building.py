"""The encoder that a run asked for: profile, tokenizer and model."""

from __future__ import annotations

from datasets import Dataset

from soft_trainer.arguments import ModelArguments
from soft_trainer.data.tokens import SIDES, column_texts, side_settings, text_column
from soft_trainer.encoders.loading import load_model, load_tokenizer, resolve_profile
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.encoders.scratch import kept_tokenizer, parse_size, small_roberta
from soft_trainer.errors import UserError

DEFAULT_MODEL = "microsoft/unixcoder-base"
OVERRIDES = (
    "pooling",
    "query_prefix",
    "code_prefix",
    "query_length",
    "code_length",
    "data_flow_length",
    "score_function",
    "score_scale",
)


def build_profile(arguments: ModelArguments) -> EncoderProfile:
    """The profile of the model, or of `profile`, with what the arguments override.

    Raises:
        UserError: a value that a profile does not take, or a model that cannot be had.
    """
    if arguments.from_scratch:
        if arguments.model_name_or_path:
            raise UserError("from_scratch and model_name_or_path: give one of them")
        parse_size(arguments.from_scratch)
        profile = resolve_profile("", name=arguments.profile or "auto")
    else:
        name = model_name(arguments)
        profile = resolve_profile(name, name=arguments.profile, revision=arguments.model_revision)
    columns = {
        f"{side}_columns": tuple(name.strip() for name in value.split(","))
        for side in SIDES
        if (value := getattr(arguments, f"{side}_columns")) is not None
    }
    return profile.replace(**{name: getattr(arguments, name) for name in OVERRIDES}, **columns)


def build_tokenizer(arguments: ModelArguments, profile: EncoderProfile, train: Dataset):
    """The model's tokenizer, or one trained on the training rows."""
    if not arguments.from_scratch:
        name = model_name(arguments)
        return load_tokenizer(name, profile, arguments.model_revision)
    columns = [text_column(train, side_settings(profile, side)["columns"], side) for side in SIDES]
    return kept_tokenizer(
        lambda: (text for column in columns for text in column_texts(train, column)),
        profile,
        arguments.vocabulary_size,
    )


def build_model(arguments: ModelArguments, profile: EncoderProfile, tokenizer):
    """The model, pretrained or with random weights."""
    if arguments.from_scratch:
        return small_roberta(arguments.from_scratch, tokenizer, profile)
    model = load_model(model_name(arguments), profile, arguments.model_revision)
    _check_lengths(model.config, profile)
    return model


def _check_lengths(config, profile: EncoderProfile) -> None:
    """Refuse texts longer than the model has positions for; RoBERTa's begin after the padding token's id."""
    shift = config.pad_token_id + 1 if "roberta" in config.model_type else 0
    positions = getattr(config, "max_position_embeddings", None)
    for name, length in (
        ("query_length", profile.query_length),
        ("code_length", profile.code_length + profile.data_flow_length),
    ):
        if positions is not None and length > positions - shift:
            raise UserError(f"{name}={length}: the model reads at most {positions - shift} tokens")


def model_name(arguments: ModelArguments) -> str:
    """The folder or Hub name of the pretrained model."""
    return arguments.model_name_or_path or DEFAULT_MODEL


def model_label(arguments: ModelArguments) -> str:
    """A short name of the model for folders and tables."""
    if arguments.from_scratch:
        return f"{arguments.profile or 'scratch'}-{arguments.from_scratch}"
    return model_name(arguments).rstrip("/").rsplit("/", 1)[-1]
