"""Describes the encoder that the options of a command-line run select."""

from __future__ import annotations

import dataclasses

from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.profiles import EncoderProfile, resolve_profile
from soft_trainer.encoders.scratch import parse_size
from soft_trainer.options.model import ModelArguments
from soft_trainer.run.starting import EncoderFromScratch, PretrainedEncoder, StartingEncoder

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
        name = arguments.model_name_or_path or DEFAULT_MODEL
        profile = resolve_profile(name, name=arguments.profile, revision=arguments.model_revision)
    # An option with the name of a profile field overrides that field. Columns are separated by commas.
    changes = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(EncoderProfile)}
    for columns in (f"{side}_columns" for side in SIDES):
        if changes[columns] is not None:
            changes[columns] = tuple(name.strip() for name in changes[columns].split(","))
    return profile.replace(**changes).with_prompts(arguments.query_prompt, arguments.code_prompt)


def build_encoder(arguments: ModelArguments) -> StartingEncoder:
    """Returns the encoder to start from: a pretrained one, with LoRA if `lora_r` is set, or one from scratch."""
    profile = build_profile(arguments)
    if arguments.from_scratch:
        label = f"{arguments.profile or 'scratch'}-{arguments.from_scratch}"
        return EncoderFromScratch(arguments.from_scratch, profile, arguments.vocabulary_size, label)
    name = arguments.model_name_or_path or DEFAULT_MODEL
    return PretrainedEncoder(name, profile, compare=arguments.profile is None, options=arguments)
