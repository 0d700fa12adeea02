"""Loads encoders from a folder or the Hub: model, tokenizer and profile, ready to encode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from soft_trainer.dataflow import LANGUAGES
from soft_trainer.dataflow.inputs import graph_features
from soft_trainer.encoders.adapters import has_adapter, load_adapter, merge_adapter
from soft_trainer.encoders.encoding import embed, prompt_length, tokenize
from soft_trainer.encoders.lora import import_peft, reading_base, saved_adapter
from soft_trainer.encoders.matryoshka import check_dims, shorten
from soft_trainer.encoders.pooling import score
from soft_trainer.encoders.profiles import PROFILE_FILE, SETTINGS_FILE, EncoderProfile, resolve_profile
from soft_trainer.encoders.repository import no_tokenizer, read_json, reading, repository_file
from soft_trainer.encoders.tokenizers import prepare_tokenizer
from soft_trainer.encoders.transformer import check_model, load_transformer
from soft_trainer.errors import UserError


@dataclass(frozen=True)
class Encoder:
    """A fine-tuned encoder in eval mode, with everything that its embeddings depend on; see `load_encoder`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    profile: EncoderProfile
    truncate_dim: int | None = None

    def encode_queries(self, queries: Sequence[str], batch_size: int = 64, progress: bool = False) -> Tensor:
        """Computes the embeddings of natural-language queries.

        Returns:
            Tensor[n, d] in float32, on the model's device, in the order given.
        """
        profile = self.profile
        ids = tokenize(self.tokenizer, queries, profile.query_prefix, profile.query_length) if len(queries) else []
        return self._embed(ids, "query", batch_size, progress)

    def encode_codes(
        self, codes: Sequence[str], language: str | None = None, batch_size: int = 64, progress: bool = False
    ) -> Tensor:
        """Computes the embeddings of functions.

        Args:
            language: the language of the codes, for an encoder that reads their data flow; others ignore it.

        Returns:
            Tensor[n, d] in float32, on the model's device, in the order given.

        Raises:
            UserError: the encoder reads data flow, and `language` is missing or unknown.
        """
        profile = self.profile
        if not profile.data_flow_length:
            ids = tokenize(self.tokenizer, codes, profile.code_prefix, profile.code_length) if len(codes) else []
            return self._embed(ids, "code", batch_size, progress)
        if language is None:
            raise UserError(f"this encoder reads data flow: pass language, one of {', '.join(LANGUAGES)}")
        lengths = profile.code_length, profile.data_flow_length
        graphs = [graph_features(code, language, self.tokenizer, *lengths) for code in codes]
        return self._embed(graphs, "code", batch_size, progress)

    def score(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Computes the scores Tensor[B, N] of query embeddings Tensor[B, d] against code embeddings Tensor[N, d]."""
        return score(self.profile, queries, codes)

    def _embed(self, token_ids: Sequence, side: str, batch_size: int, progress: bool) -> Tensor:
        label, prompt = "Encoding" if progress else None, prompt_length(self.tokenizer, self.profile, side)
        padding = self.tokenizer.pad_token_id
        embeddings = embed(self.model, self.profile, token_ids, padding, batch_size, label, prompt)
        return shorten(self.profile, embeddings, self.truncate_dim)


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
    profile = resolve_profile(name_or_path, revision=revision)
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
    path = repository_file(name_or_path, SETTINGS_FILE, revision, expected=False)
    return read_json(path).get("truncate_dim") if path else None


def _own_snapshot(name_or_path: str | Path, revision: str | None, with_code: bool) -> Path | None:
    """Returns the local folder of a repository with a profile, downloaded at one commit; None for anything else."""
    if Path(name_or_path).is_dir():
        return None
    path = repository_file(name_or_path, PROFILE_FILE, revision)
    if path is None:
        return None
    with reading(name_or_path, revision):
        commit = path.parent.name
        patterns = ["*.json", "*.txt", "*.model", "*.safetensors", *(["*.py"] if with_code else [])]
        files = {"allow_patterns": patterns, "ignore_patterns": ["*/*"]}
        return Path(snapshot_download(str(name_or_path), revision=commit, **files))


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
    adapter = saved_adapter(name_or_path, revision)
    if adapter is not None:
        import_peft()
        options = trust_remote_code, attn_implementation, dtype
        with reading_base(name_or_path):
            model = load_model(adapter.base, profile, adapter.revision, *options)
        load_adapter(model, name_or_path, revision)
        return model
    with reading(name_or_path, revision):
        return load_transformer(name_or_path, profile, revision, trust_remote_code, attn_implementation, dtype)


def load_tokenizer(
    name_or_path: str | Path, profile: EncoderProfile, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer and prepares it for the profile: special tokens of the prefixes, a padding token.

    Raises:
        UserError: there is no such folder or repository, no tokenizer in it, no prefix token in its vocabulary, or it
            needs `trust_remote_code`.
    """
    with reading(name_or_path, revision):
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path, revision=revision or "main", trust_remote_code=bool(trust_remote_code)
        )
        # If the files are missing, transformers makes a tokenizer that only knows its special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"{name_or_path}: {no_tokenizer(name_or_path)}")
    prepare_tokenizer(tokenizer, profile)
    return tokenizer
