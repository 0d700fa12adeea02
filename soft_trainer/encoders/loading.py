"""Loads encoders (the model, its tokenizer and its profile) from a folder or the Hub."""

from __future__ import annotations

import contextlib
import inspect
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from tokenizers import normalizers
from transformers import AutoModelForTextEncoding, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from soft_trainer.encoders import profiles
from soft_trainer.encoders.adapters import (
    has_adapter,
    import_peft,
    load_adapter,
    merge_adapter,
    plain_encoder,
)
from soft_trainer.encoders.comparing import compare_encoders, compare_with_folder, is_comparable
from soft_trainer.encoders.encoding import Encoder
from soft_trainer.encoders.onnx import check_dimensions
from soft_trainer.encoders.profiles import EncoderProfile, check_encodes, check_lengths, resolve_profile
from soft_trainer.encoders.static_torch import StaticConfig
from soft_trainer.errors import UserError
from soft_trainer.hub import files as hub_files
from soft_trainer.hub.files import reading
from soft_trainer.system import distributed
from soft_trainer.system.packaged import located

logger = logging.getLogger(__name__)


def load_encoder(
    name_or_path: str | Path,
    revision: str | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    truncate_dim: int | None = None,
    compare: bool = True,
) -> Encoder:
    """Loads an encoder from a folder or the Hub, ready to encode queries and functions.

    Args:
        name_or_path: a folder, `USER/NAME` on the Hub, or `base`, which comes with the package. A folder or repository
            may contain an encoder trained with this package, a sentence-transformers encoder or a plain encoder. An
            adapter is merged into its base.
        revision: the branch, tag or commit on the Hub.
        device: the device to run on. By default, an accelerator if there is one, otherwise the CPU.
        trust_remote_code: whether to run code that comes with the model. Read this code first.
        truncate_dim: the number of leading dimensions to keep, for an encoder that was trained for this. By default,
            the number in the sentence-transformers files, or all dimensions.
        compare: whether to check that sentence-transformers gives the same embeddings; see `load_model`.

    Raises:
        UserError: the folder or repository does not exist, has no tokenizer or no safetensors weights, pools in a way
            that a profile cannot express, has other embeddings in sentence-transformers, needs `trust_remote_code`,
            has a profile whose lengths exceed the model's positions, or is an adapter whose base is missing.

    Example:
        >>> encoder = load_encoder("USER/NAME")
        >>> queries = encoder.encode_queries(["read a file line by line"])
        >>> codes = encoder.encode_codes(["def lines(path): return open(path).readlines()"])
        >>> encoder.score(queries, codes)  # Tensor[1, 1]
    """
    name_or_path = _own_snapshot(name_or_path, revision, trust_remote_code) or name_or_path
    profile = profiles.resolve_profile(name_or_path, revision=revision)
    tokenizer = load_tokenizer(name_or_path, profile, revision, trust_remote_code)
    model = load_model(name_or_path, profile, revision, trust_remote_code, compare=compare)
    if has_adapter(model):
        merge_adapter(model)
    check_model(model, profile)
    check_dimensions(truncate_dim, model.config.hidden_size)
    if truncate_dim is not None:
        profile = profile.replace(truncate_dim=0)
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return Encoder(model.to(device).eval(), tokenizer, profile, truncate_dim)


def _own_snapshot(name_or_path: str | Path, revision: str | None, with_code: bool) -> Path | None:
    """Downloads a commit of a Hub repository and returns the folder, or None if it has no `soft_trainer.json`."""
    path = hub_files.repository_file(name_or_path, profiles.PROFILE_FILE, revision)
    if path is None or Path(located(name_or_path)).is_dir():
        return None
    files = ["*.json", "*.txt", "*.model", "*.safetensors", *(["*.py"] if with_code else [])]
    with reading(name_or_path, revision):
        folder = snapshot_download(
            str(name_or_path), revision=path.parent.name, allow_patterns=files, ignore_patterns=["*/*"]
        )
    return Path(folder)


def load_model(
    name_or_path: str | Path,
    profile: EncoderProfile,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    dtype: str | None = None,
    compare: bool = False,
) -> PreTrainedModel:
    """Loads an encoder's weights from safetensors. A pooler is loaded only if `profile` uses the pooler.

    An adapter is loaded into its base, ready for more training.

    Args:
        trust_remote_code: whether to run code that comes with the model. Read this code first.
        attn_implementation: "eager", "sdpa", "flash_attention_2" and so on. By default, `transformers` chooses.
        dtype: "float32", "bfloat16" or "float16". By default, float32, or higher if the saved weights are.
        compare: whether to embed four texts with sentence-transformers too, on the CPU, if the encoder's profile is
            inferred from its sentence-transformers files, because these may contain settings that a profile does not
            know. This takes a few seconds.

    Raises:
        UserError: the folder or repository does not exist, has no safetensors weights or needs `trust_remote_code`,
            the files lack weights, the profile's lengths exceed the model's positions, an adapter's base is missing,
            or sentence-transformers gives other embeddings.
    """
    source = (revision, trust_remote_code)
    if adapter := hub_files.saved_adapter(name_or_path, revision):
        import_peft()
        base, base_revision = adapter
        with hub_files.reading_base(name_or_path):
            model = load_model(base, profile, base_revision, trust_remote_code, attn_implementation, dtype)
        load_adapter(model, name_or_path, revision)
    else:
        folder = located(name_or_path)
        with reading(folder, revision), _without_report_on_spare_weights():
            config = load_config(name_or_path, revision, trust_remote_code)
            check_encodes(config.to_dict(), name_or_path)
            check_lengths(config.to_dict(), profile)
            if hasattr(config, "use_cache"):
                config.use_cache = False  # only generation needs the keys and values of every layer
            number_format = dtype or torch.promote_types(config.dtype or torch.float32, torch.float32)
            options = pooling_layer(_model_class(config, name_or_path, revision), profile)
            if attn_implementation:
                options = options | {"attn_implementation": attn_implementation}
            model, report = _auto_class(config).from_pretrained(
                folder,
                config=config,
                revision=revision or "main",
                dtype=number_format,
                use_safetensors=True,
                trust_remote_code=bool(trust_remote_code),
                output_loading_info=True,
                **options,
            )
        model.config._name_or_path = str(name_or_path)  # not the folder of `base`
        for missing in sorted(report["missing_keys"]):
            if "position_ids" not in missing and (profile.pooling == "pooler" or "pooler." not in missing):
                raise UserError(
                    f"{name_or_path}: the files have no weights for {missing}, which would be random; check the "
                    "files, or use pooling=mean or cls if these are a pooler's weights"
                )
    if not compare or distributed.rank_and_world_size()[0] > 0 or not is_comparable(model, name_or_path, revision):
        return model
    inferred = resolve_profile(name_or_path, revision=revision)
    compared = model
    if dtype in ("bfloat16", "float16"):
        compared = load_model(name_or_path, inferred, *source)
    tokenizer = load_tokenizer(name_or_path, inferred, *source)
    compare_with_folder(Encoder(compared, tokenizer, inferred), name_or_path, *source)
    return model


def load_config(name_or_path: str | Path, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """Loads a model's configuration."""
    # If `trust_remote_code` were None, transformers would ask on the terminal.
    return transformers.AutoConfig.from_pretrained(
        located(name_or_path), revision=revision or "main", trust_remote_code=bool(trust_remote_code)
    )


@contextlib.contextmanager
def _without_report_on_spare_weights() -> Iterator[None]:
    """Suppresses transformers' table of weights that an encoder lacks, which is an error, or does not need."""

    def shown(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(shown)
    try:
        yield
    finally:
        logger.removeFilter(shown)


def _auto_class(config: PretrainedConfig) -> type:
    """Returns `AutoModel`, or a class that loads only an encoder from a model that also has a decoder."""
    whole = MODEL_MAPPING.get(type(config), None)
    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    if whole and encoder and whole is not encoder:
        return AutoModelForTextEncoding
    return transformers.AutoModel


def _model_class(config: PretrainedConfig, name_or_path: str | Path, revision: str | None) -> type:
    """Returns the class that `AutoModel` would load. Call this only if the user trusts the code in the repository."""
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    reference = getattr(config, "auto_map", {}).get("AutoModel")
    if reference is None:
        raise UserError(f"{name_or_path}: not an encoder, because its code has no class for AutoModel")
    return get_class_from_dynamic_module(reference, str(name_or_path), revision=revision or "main")


def pooling_layer(model_class: type[PreTrainedModel], profile: EncoderProfile) -> dict[str, bool]:
    """Returns the keyword argument that turns the model's pooler on or off, depending on `profile`.

    Returns {} if `model_class` has no such argument. An unused pooler must be off, because a pooler without gradients
    makes distributed training fail.
    """
    name = "add_pooling_layer"
    return {name: profile.pooling == "pooler"} if name in inspect.signature(model_class).parameters else {}


# ---- Models that do not fit their profile ----


def check_model(model: PreTrainedModel, profile: EncoderProfile) -> None:
    """Checks that `model` can be used with `profile`.

    Raises:
        UserError: the profile's lengths exceed the model's positions, the model is a cross-encoder, has a decoder or
            lacks the pooler that the profile uses, or its attention does not support the mask for data flow.
    """
    config = model.config
    kind = type(model)
    check_encodes(config.to_dict(), "model")
    check_lengths(config.to_dict(), profile)
    check_dimensions(profile.truncate_dim or None, config.hidden_size)
    if kind is MODEL_MAPPING.get(type(config), None) and _auto_class(config) is AutoModelForTextEncoding:
        encoder = MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)].__name__
        raise UserError(f"model: {kind.__name__} also has a decoder; pass {encoder} instead")
    pools = isinstance(config, StaticConfig)  # a static encoder pools itself
    if pools and profile.pooling != "pooler":
        raise UserError(f"pooling={profile.pooling}: a static encoder has its own weighted mean; use pooling=pooler")
    if profile.pooling == "pooler" and not pools and getattr(model, "pooler", None) is None:
        raise UserError(f"pooling=pooler: {kind.__name__} has no pooler; use cls, mean or last_token")
    attention = str(getattr(config, "_attn_implementation", ""))
    if profile.data_flow_length and "flash" in attention:
        raise UserError(f"attn_implementation={attention}: does not support the mask for data flow; use sdpa or eager")


def profile_warnings(model: torch.nn.Module, profile: EncoderProfile) -> list[str]:
    """Returns warnings about settings that probably do not work as expected with this model."""
    warnings = []
    if profile.pooling == "cls" and any(getattr(module, "is_causal", False) for module in model.modules()):
        warnings.append(
            f"warning: pooling=cls makes all texts with the same first token equal, because {type(model).__name__} is "
            "a decoder, whose first token attends to no other token; use pooling=last_token"
        )
    if not profile.include_prompt and profile.pooling == "last_token":
        warnings.append("warning: include_prompt=False has no effect, as pooling=last_token never pools the prompt")
    elif not (profile.include_prompt or profile.query_prefix or profile.code_prefix):
        warnings.append("warning: include_prompt=False has no effect without query_prompt or code_prompt")
    return warnings


# ---- Tokenizers ----


def load_tokenizer(
    name_or_path: str | Path, profile: EncoderProfile, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer and prepares it for the profile; see `prepare_tokenizer`.

    Raises:
        UserError: the folder or repository does not exist, has no tokenizer or needs `trust_remote_code`, or a token
            in the prefixes is not in the vocabulary.
    """
    name_or_path = located(name_or_path)
    with reading(name_or_path, revision):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name_or_path, revision=revision or "main", trust_remote_code=bool(trust_remote_code)
        )
    # If the files are missing, transformers makes a tokenizer with only special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"{name_or_path}: {hub_files.no_tokenizer(name_or_path)}")
    prepare_tokenizer(tokenizer, profile)
    return tokenizer


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, profile: EncoderProfile) -> None:
    """Adapts a tokenizer to `profile`: prefix tokens, padding token, and the sides of padding and truncation.

    Every `<token>` in the prefixes that is in the vocabulary becomes a special token. Any other text in the prefixes
    stays ordinary text. The vocabulary size does not change.

    Raises:
        UserError: a token that the profile needs is not in the vocabulary, the tokenizer has no token for
            padding, or a prompt leaves no room for a text.
    """
    needed = profiles.PROFILES.get(profile.name, profiles.PROFILES["auto"]).prefix_tokens
    for token in (token for token in profile.prefix_tokens if token not in tokenizer.all_special_tokens):
        # `<encoder-only>` is an ordinary entry of UniXcoder's vocabulary, but byte-level BPE never produces it.
        if tokenizer.convert_tokens_to_ids(token) not in (None, tokenizer.unk_token_id):
            tokenizer.add_special_tokens({"extra_special_tokens": [token]}, replace_extra_special_tokens=False)
        elif token in needed:
            raise UserError(
                f"the prefix of profile {profile.name!r} has {token}, which is not in the vocabulary of "
                f"{tokenizer.name_or_path or 'this tokenizer'}; choose a profile that fits the encoder"
            )
    add_padding_token(tokenizer)
    if profile.lower_case:
        convert_to_lower_case(tokenizer)
    # With padding on the left, absolute positions would include it. Every library reads this from the saved tokenizer.
    tokenizer.padding_side = "right"
    for side in ("query", "code"):
        prefix = getattr(profile, f"{side}_prefix")
        length = getattr(profile, f"{side}_length")
        if not prefix:
            continue
        # Truncation on the left would remove the prompt.
        tokenizer.truncation_side = "right"
        tokens = len(tokenizer(prefix, verbose=False)["input_ids"])
        if tokens >= length:
            raise UserError(
                f"{side}_prompt: {tokens} tokens, including special tokens, leave no room for a {side} in "
                f"{side}_length={length}; shorten the prompt or increase {side}_length"
            )


def convert_to_lower_case(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a tokenizer convert texts to lower case first, as sentence-transformers does for `do_lower_case`.

    The files of the saved tokenizer then do so in every library.

    Raises:
        UserError: the tokenizer has no tokenizer.json.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{tokenizer.name_or_path}: do_lower_case needs a tokenizer with a tokenizer.json")
    backend = tokenizer.backend_tokenizer
    following = list(filter(None, [backend.normalizer]))
    if isinstance(backend.normalizer, normalizers.Sequence):
        following = list(backend.normalizer)
    if not any(isinstance(each, normalizers.Lowercase) for each in following):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *following])


def add_padding_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes another special token, usually the end token, the padding token of a tokenizer that has none.

    Padding does not affect embeddings, because every model gets an attention mask. The vocabulary keeps its size.

    Raises:
        UserError: the tokenizer has no special tokens.
    """
    if tokenizer.pad_token_id is not None:
        return
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'}: no padding token and no special token to use "
            "instead; set tokenizer.pad_token to a token in its vocabulary"
        )


def given_encoder(
    model,
    tokenizer: PreTrainedTokenizerBase | None = None,
    profile: EncoderProfile | Mapping[str, object] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, EncoderProfile]:
    """Returns the encoder, tokenizer and profile for a model of any supported type, such as a `SentenceTransformer`.

    Args:
        model: a `PreTrainedModel`, a `PeftModel`, a `SentenceTransformer` or an `Encoder`.
        tokenizer, profile: the user's tokenizer and profile. By default, the model's. A mapping changes settings of
            the model's profile, such as `query_length`.

    Raises:
        UserError: the model has an unsupported type, cannot be loaded, or has modules that a profile cannot express.
    """
    changes = {}
    if isinstance(profile, Mapping):
        changes = profile
        profile = None
    if isinstance(model, Encoder):
        return model.model, tokenizer or model.tokenizer, (profile or model.profile).changed(changes)
    if hasattr(model, "modules") and hasattr(model, "encode_query"):  # without importing sentence-transformers
        if isinstance(getattr(model[0], "encoder", None), Encoder):
            return given_encoder(model[0].encoder, tokenizer, profile or changes)
        given = tokenizer
        tokenizer = tokenizer or model.tokenizer
        if profile is None:
            with tempfile.TemporaryDirectory() as folder:
                model.save(folder, create_model_card=False)
                profile = resolve_profile(folder)
            encoder = Encoder(model[0].auto_model, tokenizer, profile)
            if given is None and is_comparable(encoder.model):
                compare_encoders(encoder, model, "model")
        model = model[0].auto_model
    elif not (isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")):
        raise UserError(
            "model: expected a PreTrainedModel encoder, a SentenceTransformer, a folder or a name on the Hub, not "
            f"{type(model).__name__}"
        )
    model = plain_encoder(model)
    if profile is None:
        name = model.config._name_or_path
        profile = resolve_profile(name) if name else profiles.PROFILES["auto"]
    return model, tokenizer, profile.changed(changes)
