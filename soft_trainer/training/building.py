"""The encoder that a run asked for: profile, tokenizer and model."""

from __future__ import annotations

import dataclasses

from datasets import Dataset
from transformers import AutoConfig

from soft_trainer.arguments import ModelArguments
from soft_trainer.data.tokens import SIDES, column_texts, side_settings, text_column
from soft_trainer.encoders.loading import load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.encoders.repository import published_name, reading
from soft_trainer.encoders.scratch import kept_tokenizer, parse_size, small_roberta
from soft_trainer.errors import UserError

DEFAULT_MODEL = "microsoft/unixcoder-base"


def build_profile(arguments: ModelArguments) -> EncoderProfile:
    """Returns the profile of the model, or the one that `profile` names, with the overrides of the arguments.

    Raises:
        UserError: a value that a profile does not take, or a model that cannot be loaded.
    """
    if arguments.from_scratch:
        if arguments.model_name_or_path:
            raise UserError("from_scratch and model_name_or_path: give only one of them")
        parse_size(arguments.from_scratch)
        profile = resolve_profile("", name=arguments.profile or "auto")
    else:
        name = model_name(arguments)
        profile = resolve_profile(name, name=arguments.profile, revision=arguments.model_revision)
    # An argument with the name of a profile's field overrides that field. Columns are separated by commas.
    changes = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(EncoderProfile)}
    for columns in (f"{side}_columns" for side in SIDES):
        if changes[columns] is not None:
            changes[columns] = tuple(name.strip() for name in changes[columns].split(","))
    return profile.replace(**changes).with_prompts(arguments.query_prompt, arguments.code_prompt)


def build_tokenizer(arguments: ModelArguments, profile: EncoderProfile, train: Dataset):
    """Loads the model's tokenizer, or trains one on the training rows.

    Raises:
        UserError: no tokenizer, or texts that are longer than the model's positions.
    """
    if not arguments.from_scratch:
        name, revision = model_name(arguments), arguments.model_revision
        tokenizer = load_tokenizer(name, profile, revision)
        with reading(name, revision):
            _check_lengths(AutoConfig.from_pretrained(name, revision=revision or "main"), profile)
        return tokenizer
    columns = [text_column(train, side_settings(profile, side)["columns"], side) for side in SIDES]
    return kept_tokenizer(
        lambda: (text for column in columns for text in column_texts(train, column)),
        profile,
        arguments.vocabulary_size,
    )


def build_model(arguments: ModelArguments, profile: EncoderProfile, tokenizer):
    """Loads the pretrained model, or makes one with random weights."""
    if arguments.from_scratch:
        return small_roberta(arguments.from_scratch, tokenizer, profile)
    return load_model(model_name(arguments), profile, arguments.model_revision)


def _check_lengths(config, profile: EncoderProfile) -> None:
    """Refuses texts that are longer than the model's positions; RoBERTa's begin after the id of the padding token."""
    shift = config.pad_token_id + 1 if "roberta" in config.model_type else 0
    positions = getattr(config, "max_position_embeddings", None)
    for name, length in (
        ("query_length", profile.query_length),
        ("code_length", profile.code_length + profile.data_flow_length),
    ):
        if positions is not None and length > positions - shift:
            raise UserError(f"{name}={length}: the model reads at most {positions - shift} tokens")


def model_name(arguments: ModelArguments) -> str:
    """Returns the folder or Hub name of the pretrained model."""
    return arguments.model_name_or_path or DEFAULT_MODEL


def model_label(arguments: ModelArguments) -> str:
    """Returns a short name of the model for folders and tables."""
    if arguments.from_scratch:
        return f"{arguments.profile or 'scratch'}-{arguments.from_scratch}"
    return published_name(model_name(arguments)).rsplit("/", 1)[-1]
