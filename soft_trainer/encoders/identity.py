"""The identity of an encoder: a hash of everything that its embeddings depend on besides the text."""

from __future__ import annotations

import dataclasses
import json

import torch
import xxhash
from torch import nn

from soft_trainer.encoders.profiles import EncoderProfile

# Fields of a profile, a configuration and an adapter that leave every embedding as it is.
_UNREAD_PROFILE = {"name", "score_scale", "query_columns", "code_columns", "matryoshka_dims"}
_UNREAD_CONFIG = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
_UNREAD_ADAPTER = {"base_model_name_or_path", "inference_mode", "revision", "task_type", "peft_version"}


def encoder_identity(model: nn.Module, tokenizer, profile: EncoderProfile) -> str:
    """Returns a hash that changes with the weights, the configuration, the tokenizer or the profile.

    Embeddings stored under this hash can be reused with any encoder of the same identity. An adapter's weights and
    settings are part of it. The score scale and the columns to read are not, since embeddings do not depend on them.
    Hashing takes about 0.1 s per GB of weights; callers should keep the result while the weights stay the same.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    adapters = {
        name: _without(config.to_dict(), _UNREAD_ADAPTER) for name, config in getattr(model, "peft_config", {}).items()
    }
    settings = [
        f"{type(model).__module__}.{type(model).__qualname__}",
        [name for name, module in model.named_modules() if getattr(module, "is_causal", False)],
        _without(model.config.to_dict(), _UNREAD_CONFIG),
        adapters,
        model.active_adapters() if adapters else [],
        _without(dataclasses.asdict(profile), _UNREAD_PROFILE),
        tokenizer_identity(tokenizer),
    ]
    digest.update(json.dumps(settings, sort_keys=True, default=_plain).encode())
    return digest.hexdigest()


def tokenizer_identity(tokenizer) -> str:
    """Returns a hash that changes if any text gets other ids, or if long texts are truncated on the other side."""
    if tokenizer.is_fast:
        # A copy without the truncation and padding of the last call.
        backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.to_str()
    else:
        vocabulary = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    splits = getattr(tokenizer, "split_special_tokens", False)
    settings = tokenizer.special_tokens_map, tokenizer.truncation_side, splits
    return xxhash.xxh3_128_hexdigest(f"{vocabulary}{settings!r}".encode())


def _without(settings: dict, unread: set[str]) -> dict:
    return {key: value for key, value in settings.items() if key not in unread}


def _plain(value):
    """Turns a set into a list in the same order in every process, and anything else that JSON lacks into text."""
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else str(value)
