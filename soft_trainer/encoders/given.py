"""Takes the encoder that a user passes to the trainer: a model, its name, or a model of sentence-transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from soft_trainer.encoders.adapters import plain_encoder
from soft_trainer.encoders.loading import load_model, load_tokenizer
from soft_trainer.encoders.profiles import EncoderProfile, profile_of, resolve_profile
from soft_trainer.errors import UserError


def given_encoder(
    model, tokenizer: PreTrainedTokenizerBase | None = None, profile: EncoderProfile | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, EncoderProfile]:
    """Returns the plain encoder with its tokenizer and its profile.

    Args:
        model: a `PreTrainedModel`, a `PeftModel`, a `SentenceTransformer`, a folder, or a name on the Hub.
        tokenizer, profile: the user's tokenizer and profile. By default, the model's.

    Raises:
        UserError: the model has another type, cannot be loaded, or has modules that a profile cannot express.
    """
    if isinstance(model, str | Path):
        profile = profile or resolve_profile(model)
        tokenizer = tokenizer or load_tokenizer(model, profile)
        return load_model(model, profile), tokenizer, profile
    if hasattr(model, "modules") and hasattr(model, "encode_query"):  # without importing sentence-transformers
        tokenizer = tokenizer or model.tokenizer
        if profile is None:
            with tempfile.TemporaryDirectory() as folder:
                model.save(folder, create_model_card=False)
                profile = resolve_profile(folder)
        model = model[0].auto_model
    elif not (isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")):
        raise UserError(
            "model: expected a PreTrainedModel encoder, a SentenceTransformer, a folder or a name on the Hub, not "
            f"{type(model).__name__}"
        )
    model = plain_encoder(model)
    return model, tokenizer, profile or profile_of(model)
