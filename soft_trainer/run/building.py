"""Builds the encoder of a command-line run from the options: its profile, tokenizer and model."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import chain

from soft_trainer.data.split import Split
from soft_trainer.data.tokens import SIDES, column_texts, text_column
from soft_trainer.encoders.adapters import add_lora
from soft_trainer.encoders.hub_files import base_of, published_name, reading, reading_base
from soft_trainer.encoders.loading import load_config, load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, check_lengths, resolve_profile
from soft_trainer.encoders.scratch import kept_tokenizer, parse_size, random_model
from soft_trainer.fingerprints import rows_fingerprint
from soft_trainer.options.model import ModelArguments

DEFAULT_MODEL = "microsoft/unixcoder-base"


def build_profile(arguments: ModelArguments) -> EncoderProfile:
    """Returns the encoder profile of the model, or the profile that the option `profile` selects.

    An option named like a field of the profile, such as `pooling`, overrides that field.

    Raises:
        UserError: a value is not valid for a profile, or the model cannot be loaded.
    """
    if arguments.from_scratch:
        _, layers = parse_size(arguments.from_scratch)
        usual = "auto" if layers else "static"
        profile = resolve_profile("", name=arguments.profile or usual)
    else:
        profile = resolve_profile(model_name(arguments), name=arguments.profile, revision=arguments.model_revision)
    # An option with the name of a profile field overrides that field. Columns are separated by commas.
    changes = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(EncoderProfile)}
    for columns in (f"{side}_columns" for side in SIDES):
        if changes[columns] is not None:
            changes[columns] = tuple(name.strip() for name in changes[columns].split(","))
    return profile.replace(**changes).with_prompts(arguments.query_prompt, arguments.code_prompt)


def build_tokenizer(arguments: ModelArguments, profile: EncoderProfile, train: Split | None):
    """Loads the pretrained model's tokenizer or, for a model from scratch, trains a tokenizer on the training rows.

    Raises:
        UserError: the tokenizer cannot be loaded, or the profile's lengths exceed the model's positions.
    """
    if not arguments.from_scratch:
        source = arguments.model_revision, arguments.trust_remote_code
        tokenizer = load_tokenizer(model_name(arguments), profile, *source)
        check_lengths(pretrained_config(arguments).to_dict(), profile)
        return tokenizer
    pairs = train.to_pairs()
    columns = [text_column(pairs, getattr(profile, f"{side}_columns"), side) for side in SIDES]
    texts = chain.from_iterable(column_texts(pairs, column) for column in columns)
    ends = parse_size(arguments.from_scratch)[1] > 0
    return kept_tokenizer(texts, rows_fingerprint(pairs, columns), profile, arguments.vocabulary_size, ends)


def pretrained_config(arguments: ModelArguments):
    """Loads the configuration of the pretrained model or, if it is an adapter, of its base model.

    Raises:
        UserError: the configuration cannot be loaded.
    """
    name = model_name(arguments)
    revision = arguments.model_revision
    base = base_of(name, revision)
    with nullcontext() if base[0] == name else reading_base(name), reading(*base):
        return load_config(*base, arguments.trust_remote_code)


def build_model(arguments: ModelArguments, profile: EncoderProfile, tokenizer):
    """Loads the pretrained model, or creates a model with random weights. Adds a LoRA adapter if `lora_r` is set.

    Raises:
        UserError: the model cannot be loaded, or it lacks a module that LoRA should target.
    """
    if arguments.from_scratch:
        return random_model(arguments.from_scratch, tokenizer, profile)
    source = arguments.model_revision, arguments.trust_remote_code
    inferred = arguments.profile is None
    loading = arguments.attn_implementation, arguments.dtype, inferred
    model = load_model(model_name(arguments), profile, *source, *loading)
    if arguments.lora_r is not None:
        add_lora(model, arguments, arguments.model_revision)
    return model


def model_name(arguments: ModelArguments) -> str:
    """Returns the folder or Hub name of the pretrained model that the options select, by default UniXcoder."""
    return arguments.model_name_or_path or DEFAULT_MODEL


def model_label(arguments: ModelArguments) -> str:
    """Returns a short name of the model for folders and tables, such as `unixcoder-base`."""
    if arguments.from_scratch:
        return f"{arguments.profile or 'scratch'}-{arguments.from_scratch}"
    return published_name(model_name(arguments)).rsplit("/", 1)[-1]
