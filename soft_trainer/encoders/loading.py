"""Encoders by folder or Hub name: which profile they want, and how to encode with them."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from soft_trainer.dataflow.grammars import LANGUAGES
from soft_trainer.dataflow.inputs import graph_features
from soft_trainer.encoders.embedding import embed
from soft_trainer.encoders.encoding import score, tokenize
from soft_trainer.encoders.profiles import PROFILE_FILE, PROFILES, EncoderProfile
from soft_trainer.errors import UserError

logger = logging.getLogger(__name__)

# Last part of a published name -> profile; copies under another owner or in a folder keep that part.
KNOWN_ENCODERS = {
    "codebert-base": "codebert",
    "graphcodebert-base": "graphcodebert",
    "unixcoder-base": "unixcoder",
    "unixcoder-base-unimodal": "unixcoder",
    "unixcoder-base-nine": "unixcoder",
}
COSINE_SCALE = 20.0
_NO_LENGTH = 1_000_000  # tokenizers without a length have a number far above
_POOLING_KEYS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


@dataclass(frozen=True)
class Encoder:
    """A fine-tuned encoder in eval mode, with everything that its embeddings depend on; see `load_encoder`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    profile: EncoderProfile

    def encode_queries(self, queries: Sequence[str], batch_size: int = 64, progress: bool = False) -> Tensor:
        """Embeddings Tensor[n, d] of natural-language queries, float32, on the model's device, in the order given."""
        profile = self.profile
        return self._embed(queries, profile.query_prefix, profile.query_length, batch_size, progress)

    def encode_codes(
        self, codes: Sequence[str], language: str | None = None, batch_size: int = 64, progress: bool = False
    ) -> Tensor:
        """Embeddings Tensor[n, d] of functions, float32, on the model's device, in the order given.

        Args:
            language: the language of the codes, for an encoder that reads their data flow; others ignore it.

        Raises:
            UserError: the encoder reads data flow and `language` is missing or unknown.
        """
        profile = self.profile
        if profile.data_flow_length:
            return self._embed_graphs(codes, language, batch_size, progress)
        return self._embed(codes, profile.code_prefix, profile.code_length, batch_size, progress)

    def score(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Scores Tensor[B, N] of query embeddings Tensor[B, d] against code embeddings Tensor[N, d]."""
        return score(self.profile, queries, codes)

    def _embed(self, texts: Sequence[str], prefix: str, length: int, batch_size: int, progress: bool) -> Tensor:
        """Embeddings Tensor[n, d] of texts without data flow."""
        ids = tokenize(self.tokenizer, texts, prefix, length) if len(texts) else []
        label = "Encoding" if progress else None
        return embed(self.model, self.profile, ids, self.tokenizer.pad_token_id, batch_size, label)

    def _embed_graphs(self, codes: Sequence[str], language: str | None, batch_size: int, progress: bool) -> Tensor:
        """Embeddings Tensor[n, d] of codes with the nodes of their data flow."""
        if language is None:
            raise UserError(f"this encoder reads data flow: pass language, one of {', '.join(LANGUAGES)}")
        lengths = self.profile.code_length, self.profile.data_flow_length
        graphs = [graph_features(code, language, self.tokenizer, *lengths) for code in codes]
        label = "Encoding" if progress else None
        return embed(self.model, self.profile, graphs, self.tokenizer.pad_token_id, batch_size, label)


def load_encoder(
    name_or_path: str | Path, revision: str | None = None, device: str | torch.device | None = None
) -> Encoder:
    """Load a fine-tuned encoder from a folder or the Hub, ready to encode queries and codes.

    Args:
        name_or_path: a folder or `USER/NAME` on the Hub: one of ours, of sentence-transformers, or a plain encoder.
        revision: branch, tag or commit on the Hub.
        device: where to run; the accelerator when there is one, else the CPU.

    Raises:
        UserError: no such folder or repository, no safetensors weights, or pooling that has no profile.

    Example:
        >>> encoder = load_encoder("USER/NAME")
        >>> queries = encoder.encode_queries(["read a file line by line"])
        >>> codes = encoder.encode_codes(["def lines(path): return open(path).readlines()"])
        >>> encoder.score(queries, codes)  # Tensor[1, 1]
    """
    name_or_path = _own_snapshot(name_or_path, revision) or name_or_path
    profile = resolve_profile(name_or_path, revision=revision)
    tokenizer = load_tokenizer(name_or_path, profile, revision)
    model = load_model(name_or_path, profile, revision)
    device = device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return Encoder(model.to(device).eval(), tokenizer, profile)


def _own_snapshot(name_or_path: str | Path, revision: str | None) -> Path | None:
    """The local folder of a repository with a profile: all files of one commit, looked for once, not one by one."""
    if Path(name_or_path).is_dir():
        return None
    path = repository_file(name_or_path, PROFILE_FILE, revision)
    if path is None:
        return None
    with reading(name_or_path, revision):
        commit = path.parent.name
        files = {"allow_patterns": ["*.json", "*.txt", "*.model", "*.safetensors"], "ignore_patterns": ["*/*"]}
        return Path(snapshot_download(str(name_or_path), revision=commit, **files))


def load_model(name_or_path: str | Path, profile: EncoderProfile, revision: str | None = None) -> PreTrainedModel:
    """The encoder's weights in float32 or higher, from safetensors, with a pooler only where `profile` pools with it.

    Raises:
        UserError: no such folder or repository, or no safetensors weights in it.
    """
    with reading(name_or_path, revision):
        config = AutoConfig.from_pretrained(name_or_path, revision=revision or "main")
        return AutoModel.from_pretrained(
            name_or_path,
            config=config,
            revision=revision or "main",
            dtype=torch.promote_types(config.dtype or torch.float32, torch.float32),
            use_safetensors=True,
            **pooling_layer(MODEL_MAPPING[type(config)], profile),
        )


def pooling_layer(model_class: type[PreTrainedModel], profile: EncoderProfile) -> dict[str, bool]:
    """Arguments that load `model_class` with a pooler only where `profile` pools with it.

    An unused pooler has no gradient, which distributed training refuses. Not every model has one to leave out.
    """
    name = "add_pooling_layer"
    return {name: profile.pooling == "pooler"} if name in inspect.signature(model_class).parameters else {}


def load_tokenizer(
    name_or_path: str | Path, profile: EncoderProfile, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer, with the special tokens of the profile's prefixes registered.

    Raises:
        UserError: no such folder or repository, or a prefix token that its vocabulary lacks.
    """
    with reading(name_or_path, revision):
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision or "main")
    register_prefix_tokens(tokenizer, profile)
    return tokenizer


def register_prefix_tokens(tokenizer: PreTrainedTokenizerBase, profile: EncoderProfile) -> None:
    """Make every `<token>` of the profile's prefixes a special token with the id that it has in the vocabulary.

    UniXcoder's `<encoder-only>` is an ordinary entry of its vocabulary that byte-level BPE never reaches from text.
    No id is added, so the model keeps its size.

    Raises:
        UserError: the vocabulary has no such entry.
    """
    for token in dict.fromkeys(re.findall(r"<[^<>\s]+>", profile.query_prefix + profile.code_prefix)):
        if token in tokenizer.all_special_tokens:
            continue
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise UserError(
                f"the prefix of profile {profile.name!r} has {token}, which the vocabulary of "
                f"{tokenizer.name_or_path or 'this tokenizer'} lacks: choose the profile that fits the encoder"
            )
        tokenizer.add_special_tokens({"extra_special_tokens": [token]}, replace_extra_special_tokens=False)


def resolve_profile(name_or_path: str | Path, name: str | None = None, revision: str | None = None) -> EncoderProfile:
    """The profile of an encoder: `name` when given, else what its files or its name say, else "auto".

    In this order: `soft_trainer.json`; the files of sentence-transformers (pooling, normalisation, prompts, lengths,
    score function); the names in `KNOWN_ENCODERS`.

    Raises:
        UserError: `name` is not in `PROFILES`, there is no such folder or repository, or sentence-transformers
            modules that no profile expresses.
    """
    if name is not None:
        if name not in PROFILES:
            raise UserError(f"profile={name!r}: use one of {', '.join(PROFILES)}")
        return PROFILES[name]
    if path := repository_file(name_or_path, PROFILE_FILE, revision):
        return EncoderProfile.load(path)
    if repository_file(name_or_path, "modules.json", revision):
        return _sentence_transformers_profile(name_or_path, revision)
    return PROFILES[KNOWN_ENCODERS.get(Path(name_or_path).name, "auto")]


def _sentence_transformers_profile(name_or_path: str | Path, revision: str | None) -> EncoderProfile:
    """The profile that equals a folder of sentence-transformers."""

    def read(file: str) -> dict:
        path = repository_file(name_or_path, file, revision)
        return json.loads(path.read_text()) if path else {}

    modules = {module["type"].rsplit(".", 1)[-1]: module["path"] for module in read("modules.json")}
    transformer, settings = read("sentence_bert_config.json"), read("config_sentence_transformers.json")
    prompts = settings.get("prompts") or {}
    pooling = _pooling(read(f"{modules['Pooling']}/config.json")) if "Pooling" in modules else "pooler"
    output = transformer.get("modality_config", {}).get("text", {}).get("method_output_name", "last_hidden_state")
    similarity = settings.get("similarity_fn_name") or "cosine"
    expressible = (
        set(modules) <= {"Transformer", "Pooling", "Normalize"}
        and pooling is not None
        and (pooling == "pooler") == (output == "pooler_output")
        and similarity in ("cosine", "dot")
    )
    if not expressible:
        raise UserError(
            f"{name_or_path}: its sentence-transformers modules ({', '.join(modules)}; pooling {pooling}; "
            f"{similarity}) are more than a profile expresses: a --profile of {', '.join(PROFILES)} ignores them"
        )
    length = transformer.get("max_seq_length") or read("tokenizer_config.json").get("model_max_length")
    length = length if length and length < _NO_LENGTH else None
    code_prefix = next((prompts[key] for key in ("document", "passage", "corpus") if prompts.get(key)), "")
    # Cosines lie in [-1, 1]: too flat for a softmax without the scale that such encoders are trained with.
    bounded = similarity == "cosine" or "Normalize" in modules
    return PROFILES["auto"].replace(
        pooling=pooling,
        normalize="Normalize" in modules,
        query_prefix=prompts.get("query") or "",
        code_prefix=code_prefix,
        query_length=transformer.get("query_length") or length,
        code_length=transformer.get("document_length") or length,
        score_function=similarity,
        score_scale=COSINE_SCALE if bounded else 1.0,
    )


def _pooling(config: dict) -> str | None:
    """What a pooling module's configuration says, None for anything but "mean" or "cls"."""
    modes = config.get("pooling_mode") or [
        key for key, used in config.items() if key.startswith("pooling_mode") and used
    ]
    modes = [modes] if isinstance(modes, str) else list(modes)
    mode = _POOLING_KEYS.get(modes[0], modes[0]) if len(modes) == 1 else None
    return mode if mode in _POOLING_KEYS.values() and config.get("include_prompt", True) else None


def repository_file(name_or_path: str | Path, file: str, revision: str | None = None) -> Path | None:
    """The local path of one file of a folder or of a repository on the Hub, None where it has no such file.

    Raises:
        UserError: no such folder, repository or revision.
    """
    if Path(name_or_path).is_dir():
        path = Path(name_or_path, file)
        return path if path.is_file() else None
    with reading(name_or_path, revision):
        try:
            return Path(hf_hub_download(str(name_or_path), file, revision=revision))
        except LocalEntryNotFoundError:
            if try_to_load_from_cache(str(name_or_path), file, revision=revision) is not _CACHED_NO_EXIST:
                logger.warning("The Hub cannot be reached: taking it that %s has no %s.", name_or_path, file)
        except EntryNotFoundError:
            pass
    return None


@contextmanager
def reading(name_or_path: str | Path, revision: str | None = None) -> Iterator[None]:
    """Turn what goes wrong while reading a folder or repository into one line for a person."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        causes = (error, error.__cause__)
        if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
            raise UserError(f"{name_or_path}: no revision {revision!r} on the Hub") from error
        if any(isinstance(cause, (RepositoryNotFoundError, HFValidationError)) for cause in causes):
            raise UserError(
                f"{name_or_path}: neither a folder here nor a repository on the Hub that may be read; "
                "check the name, and for a private or gated one set HF_TOKEN"
            ) from error
        if "safetensors" in str(error):
            raise UserError(
                f"{name_or_path}: no safetensors weights; load it once with transformers and save_pretrained it"
            ) from error
        raise UserError(f"{name_or_path}: {str(error).strip().splitlines()[0]}") from error
