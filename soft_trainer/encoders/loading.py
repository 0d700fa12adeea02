"""Loads encoders from a folder or the Hub: model, tokenizer and profile, ready to encode."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoModelForTextEncoding, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from soft_trainer.encoders import profiles, repository
from soft_trainer.encoders.adapters import has_adapter, import_peft, load_adapter, merge_adapter
from soft_trainer.encoders.encoding import Encoder, check_dims
from soft_trainer.encoders.profiles import EncoderProfile, check_lengths
from soft_trainer.encoders.repository import reading
from soft_trainer.encoders.static import StaticModel, is_static
from soft_trainer.errors import UserError
from soft_trainer.files import read_json

MISSING_WEIGHTS = "_missing_weights"  # attribute of a loaded model: the weights that its files lack


def load_encoder(
    name_or_path: str | Path,
    revision: str | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    truncate_dim: int | None = None,
) -> Encoder:
    """Loads a fine-tuned encoder from a folder or the Hub, ready to encode queries and codes.

    Args:
        name_or_path: a folder or `USER/NAME` on the Hub: one of ours, of sentence-transformers, or a plain encoder.
            An adapter is loaded with its base and merged into it.
        revision: branch, tag or commit on the Hub.
        device: where to run; by default the accelerator if there is one, else the CPU.
        trust_remote_code: run the code that comes with the model. Read it first.
        truncate_dim: keep this many dimensions of every embedding, for an encoder that was trained for it. Default:
            the number in the sentence-transformers files, or all.

    Raises:
        UserError: there is no such folder or repository, no tokenizer or no safetensors weights in it, no profile can
            express its pooling, it needs `trust_remote_code`, its profile reads more tokens than it has positions, or
            it is an adapter whose base is missing.

    Example:
        >>> encoder = load_encoder("USER/NAME")
        >>> queries = encoder.encode_queries(["read a file line by line"])
        >>> codes = encoder.encode_codes(["def lines(path): return open(path).readlines()"])
        >>> encoder.score(queries, codes)  # Tensor[1, 1]
    """
    name_or_path = _own_snapshot(name_or_path, revision, trust_remote_code) or name_or_path
    profile = profiles.resolve_profile(name_or_path, revision=revision)
    tokenizer = load_tokenizer(name_or_path, profile, revision, trust_remote_code)
    model = load_model(name_or_path, profile, revision, trust_remote_code)
    if has_adapter(model):
        merge_adapter(model)
    check_model(model, profile)
    if truncate_dim is None:
        truncate_dim = saved_truncate_dim(name_or_path, revision)
    check_dims([truncate_dim] if truncate_dim is not None else [], model.config.hidden_size, "truncate_dim")
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return Encoder(model.to(device).eval(), tokenizer, profile, truncate_dim)


def saved_truncate_dim(name_or_path: str | Path, revision: str | None) -> int | None:
    """Returns the number of dimensions that sentence-transformers would keep; None for all."""
    path = repository.repository_file(name_or_path, profiles.SETTINGS_FILE, revision, expected=False)
    if path:
        return read_json(path).get("truncate_dim")
    return None


def _own_snapshot(name_or_path: str | Path, revision: str | None, with_code: bool) -> Path | None:
    """Returns the local folder of a repository with a profile, downloaded at one commit; None for anything else."""
    if Path(name_or_path).is_dir():
        return None
    path = repository.repository_file(name_or_path, profiles.PROFILE_FILE, revision)
    if path is None:
        return None
    files = ["*.json", "*.txt", "*.model", "*.safetensors"]
    if with_code:
        files.append("*.py")
    with reading(name_or_path, revision):
        options = {"revision": path.parent.name, "allow_patterns": files, "ignore_patterns": ["*/*"]}
        return Path(snapshot_download(str(name_or_path), **options))


def load_model(
    name_or_path: str | Path,
    profile: EncoderProfile,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    dtype: str | None = None,
) -> PreTrainedModel:
    """Loads the weights from safetensors, with a pooler only if `profile` pools with it.

    An adapter is loaded into its base, ready for further training.

    Args:
        trust_remote_code: run the code that comes with the model.
        attn_implementation: "eager", "sdpa", "flash_attention_2" ...; None lets `transformers` choose.
        dtype: "float32", "bfloat16" or "float16". None means float32, or higher if the weights are saved so.

    Raises:
        UserError: there is no such folder or repository, no safetensors weights in it, it needs `trust_remote_code`,
            the profile's lengths are above its positions, or the base of an adapter is missing.
    """
    if adapter := repository.saved_adapter(name_or_path, revision):
        import_peft()
        base, base_revision = adapter
        with repository.reading_base(name_or_path):
            model = load_model(base, profile, base_revision, trust_remote_code, attn_implementation, dtype)
        load_adapter(model, name_or_path, revision)
        return model
    with reading(name_or_path, revision), _without_report_on_spare_weights():
        config = load_config(name_or_path, revision, trust_remote_code)
        check_lengths(config.to_dict(), profile)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # keys and values of every layer, which only generation needs
        if dtype is None:
            number_format = torch.promote_types(config.dtype or torch.float32, torch.float32)
        else:
            number_format = getattr(torch, dtype)
        options = pooling_layer(_model_class(config, name_or_path, revision), profile)
        if attn_implementation:
            options = options | {"attn_implementation": attn_implementation}
        model, report = _auto_class(config).from_pretrained(
            name_or_path,
            config=config,
            revision=revision or "main",
            dtype=number_format,
            use_safetensors=True,
            trust_remote_code=bool(trust_remote_code),
            output_loading_info=True,
            **options,
        )
    setattr(model, MISSING_WEIGHTS, tuple(sorted(report["missing_keys"])))
    return model


def load_config(name_or_path: str | Path, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """Loads the configuration of a model."""
    # Without a choice, transformers would ask on the terminal.
    return transformers.AutoConfig.from_pretrained(
        name_or_path, revision=revision or "main", trust_remote_code=bool(trust_remote_code)
    )


@contextlib.contextmanager
def _without_report_on_spare_weights() -> Iterator[None]:
    """Suppresses transformers' table of weights that an encoder does not need, such as a pooler or an output layer."""

    def shown(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "LOAD REPORT" not in message or any(word in message for word in ("MISSING", "MISMATCH", "CONVERSION"))

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(shown)
    try:
        yield
    finally:
        logger.removeFilter(shown)


def _auto_class(config: PretrainedConfig) -> type:
    """Returns `AutoModel`, or a class that loads only what the encoder needs: no decoder, no attention."""
    if is_static(config):
        return StaticModel
    whole = MODEL_MAPPING.get(type(config), None)
    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    if whole and encoder and whole is not encoder:
        return AutoModelForTextEncoding
    return transformers.AutoModel


def _model_class(config: PretrainedConfig, name_or_path: str | Path, revision: str | None) -> type:
    """Returns the class that `AutoModel` would load; a model's own code is trusted once its configuration is."""
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    reference = getattr(config, "auto_map", {}).get("AutoModel")
    if reference is None:
        raise UserError(f"{name_or_path}: its code has no class for AutoModel, so it is not an encoder")
    return get_class_from_dynamic_module(reference, str(name_or_path), revision=revision or "main")


def pooling_layer(model_class: type[PreTrainedModel], profile: EncoderProfile) -> dict[str, bool]:
    """Returns the arguments that load `model_class` with a pooler only if `profile` pools with it.

    An unused pooler has no gradient, which distributed training refuses. Some models have no pooler to leave out.
    """
    name = "add_pooling_layer"
    if name in inspect.signature(model_class).parameters:
        return {name: profile.pooling == "pooler"}
    return {}


# ---- Models that do not fit their profile ----


def check_model(model: PreTrainedModel, profile: EncoderProfile) -> None:
    """Raises UserError for a model with a decoder, or one lacking positions, pooler or mask for `profile`."""
    config = model.config
    kind = type(model)
    check_lengths(config.to_dict(), profile)
    if kind is MODEL_MAPPING.get(type(config), None) and _auto_class(config) is AutoModelForTextEncoding:
        encoder = MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)].__name__
        raise UserError(f"model: {kind.__name__} also has a decoder; pass {encoder} instead")
    no_pooler = profile.pooling == "pooler" and getattr(model, "pooler", None) is None
    attention = str(getattr(config, "_attn_implementation", ""))
    no_mask = profile.data_flow_length and "flash" in attention
    if no_pooler:
        raise UserError(f"pooling=pooler: {kind.__name__} has no pooler; use cls, mean or last_token")
    if no_mask:
        raise UserError(f"attn_implementation={attention}: takes no mask for data flow; use sdpa or eager")


def profile_warnings(model: torch.nn.Module, profile: EncoderProfile) -> list[str]:
    """Returns warnings about settings that work with the model but probably not as intended."""
    warnings = []
    if profile.pooling == "cls" and any(getattr(module, "is_causal", False) for module in model.modules()):
        warnings.append(
            f"warning: pooling=cls: {type(model).__name__} is a decoder, whose first token sees no other, so all "
            "texts with the same first token have the same embedding; use --pooling last_token"
        )
    if not profile.include_prompt and profile.pooling == "last_token":
        warnings.append("warning: include_prompt=False has no effect: pooling=last_token reads no prompt's token")
    elif not (profile.include_prompt or profile.query_prefix or profile.code_prefix):
        warnings.append("warning: include_prompt=False has no effect without --query_prompt or --code_prompt")
    return warnings


# ---- Tokenizers ----


def load_tokenizer(
    name_or_path: str | Path, profile: EncoderProfile, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer and prepares it for the profile: special tokens of the prefixes, a padding token.

    UserError if there is no such folder or repository, if it has no tokenizer or no prefix token in its vocabulary, or
    if it needs `trust_remote_code`.
    """
    with reading(name_or_path, revision):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name_or_path, revision=revision or "main", trust_remote_code=bool(trust_remote_code)
        )
    # If the files are missing, transformers makes a tokenizer that only knows its special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"{name_or_path}: {repository.no_tokenizer(name_or_path)}")
    prepare_tokenizer(tokenizer, profile)
    return tokenizer


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, profile: EncoderProfile) -> None:
    """Adapts a tokenizer to `profile`: prefix tokens, padding token, side of padding and truncation; adds no id.

    Every `<token>` of the prefixes becomes a special token, with the id that the vocabulary gives it. One that the
    vocabulary lacks stays text; UserError if the named profile needs it, if there is no token to pad with, or if a
    prompt fills the length.
    """
    if profile.name in profiles.PROFILES:
        needed = profiles.PROFILES[profile.name].prefix_tokens
    else:
        needed = ()
    for token in (token for token in profile.prefix_tokens if token not in tokenizer.all_special_tokens):
        # `<encoder-only>` is an ordinary entry of UniXcoder's vocabulary: byte-level BPE never reaches it from text.
        if tokenizer.convert_tokens_to_ids(token) not in (None, tokenizer.unk_token_id):
            tokenizer.add_special_tokens({"extra_special_tokens": [token]}, replace_extra_special_tokens=False)
        elif token in needed:
            raise UserError(
                f"the prefix of profile {profile.name!r} has {token}, which the vocabulary of "
                f"{tokenizer.name_or_path or 'this tokenizer'} lacks: choose the profile that fits the encoder"
            )
    add_padding_token(tokenizer)
    # Absolute positions count the padding on the left too. The saved tokenizer pads on the right in every library.
    tokenizer.padding_side = "right"
    for side in ("query", "code"):
        prefix = getattr(profile, f"{side}_prefix")
        length = getattr(profile, f"{side}_length")
        if not prefix:
            continue
        # Truncation on the left would remove the prompt. The saved tokenizer also truncates on the right.
        tokenizer.truncation_side = "right"
        tokens = len(tokenizer(prefix, verbose=False)["input_ids"])
        if tokens >= length:
            raise UserError(
                f"{side}_prompt: its {tokens} tokens (special tokens included) leave no room for a {side} in "
                f"{side}_length={length}: shorten it, or set {side}_length higher"
            )


def add_padding_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer that lacks a padding token another one to pad with, usually the end token.

    Every model gets an attention mask, so padding has no effect on embeddings, and the vocabulary keeps its size.

    Raises:
        UserError: the tokenizer has no special tokens.
    """
    if tokenizer.pad_token_id is not None:
        return
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'}: no padding token, and no special token to take in its "
            "place; set tokenizer.pad_token to an entry of its vocabulary"
        )
