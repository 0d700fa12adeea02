"""The differences between encoders: one profile each in a table, no subclasses."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.encoders.lora import base_of
from soft_trainer.encoders.positions import most_tokens
from soft_trainer.encoders.repository import published_name, read_json, reading, repository_file
from soft_trainer.errors import UserError
from soft_trainer.files import write_json

POOLINGS = ("mean", "cls", "last_token", "pooler")
SCORE_FUNCTIONS = ("dot", "cosine")
DTYPES = ("float32", "bfloat16", "float16")  # of the weights
PROFILE_FILE = "soft_trainer.json"
_SPECIAL_TOKEN = r"<[^<>\s]+>"
_HEAD = re.compile(f"(?:{_SPECIAL_TOKEN})*")


@dataclass(frozen=True)
class EncoderProfile:
    """Settings that turn a text into token ids, token vectors into an embedding, and two embeddings into a score.

    Args:
        name: a key of `PROFILES`, or "auto" for any other encoder.
        pooling: "mean" over the tokens, "cls" (first token), "last_token" or "pooler" (the model's `pooler_output`).
        normalize: scale embeddings to length one.
        query_prefix, code_prefix: text put before every query or code: special tokens, then the prompt.
        include_prompt: False leaves the tokens of the prefixes out of the pooling, as sentence-transformers does.
        query_length, code_length: tokens kept on each side, special tokens included.
        data_flow_length: data-flow nodes that follow the code tokens (GraphCodeBERT), 0 for none.
        score_function: "dot" or "cosine".
        score_scale: factor on every score (the inverse of a softmax temperature).
        query_columns, code_columns: columns to read the text from; the first one in the data set is read. A list
            of tokens is joined by single spaces.
        matryoshka_dims: the numbers of leading dimensions trained as embeddings, largest first; () for none.

    Raises:
        UserError: a value other than those named here.
    """

    name: str = "auto"
    pooling: str = "mean"
    normalize: bool = False
    query_prefix: str = ""
    code_prefix: str = ""
    include_prompt: bool = True
    query_length: int = 128
    code_length: int = 256
    data_flow_length: int = 0
    score_function: str = "dot"
    score_scale: float = 1.0
    query_columns: tuple[str, ...] = ("docstring_tokens", "docstring")
    code_columns: tuple[str, ...] = ("code_tokens", "code")
    matryoshka_dims: tuple[int, ...] = ()

    def __post_init__(self):
        for field, allowed in (("pooling", POOLINGS), ("score_function", SCORE_FUNCTIONS)):
            if getattr(self, field) not in allowed:
                raise UserError(f"{field}={getattr(self, field)!r}: use one of {', '.join(allowed)}")
        if min(self.query_length, self.code_length) < 3 or self.data_flow_length < 0:
            raise UserError(
                f"query_length={self.query_length}, code_length={self.code_length}, "
                f"data_flow_length={self.data_flow_length}: lengths are at least 3 tokens, data flow at least 0"
            )
        if not 0 < self.score_scale < math.inf:
            raise UserError(f"score_scale={self.score_scale}: must be above 0 and finite")
        if not self.include_prompt and (self.data_flow_length or self.pooling == "pooler"):
            reader = "data flow is" if self.data_flow_length else "the model's own pooler is"
            raise UserError(f"include_prompt=False: {reader} always read with the prompt; use pooling mean or cls")

    @property
    def prefix_tokens(self) -> list[str]:
        """The special tokens, such as `<encoder-only>`, at the beginning of the prefixes."""
        heads = [_HEAD.match(prefix)[0] for prefix in (self.query_prefix, self.code_prefix)]
        return list(dict.fromkeys(re.findall(_SPECIAL_TOKEN, "".join(heads))))

    def with_prompts(self, query: str | None = None, code: str | None = None) -> EncoderProfile:
        """Returns a copy with these prompts; the special tokens before them stay, and None changes nothing.

        Raises:
            UserError: a prompt for codes that are read with data flow, whose input has no place for it.
        """
        if code and self.data_flow_length:
            raise UserError(f"code_prompt={code!r}: codes that are read with their data flow take no prompt")
        prompts = {"query_prefix": query, "code_prefix": code}
        return self.replace(
            **{
                name: _HEAD.match(getattr(self, name))[0] + prompt
                for name, prompt in prompts.items()
                if prompt is not None
            }
        )

    def replace(self, **changes) -> EncoderProfile:
        """Returns a copy with the values in `changes`; a value of None changes nothing."""
        return dataclasses.replace(self, **{key: value for key, value in changes.items() if value is not None})

    def save(self, folder: str | Path) -> None:
        """Writes the profile to a model's folder, for `EncoderProfile.load`."""
        write_json(Path(folder) / PROFILE_FILE, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> EncoderProfile:
        """Reads the profile that `save` wrote at `path` (the file, not the folder).

        Keys of later versions are ignored.

        Raises:
            UserError: names the file and a wrong value, or a key that looks like a misspelt one.
        """
        values = read_json(path)
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for key in sorted(set(values) - set(defaults)):
            if near := difflib.get_close_matches(key, set(defaults) - set(values), n=1):
                raise UserError(f"{path}: unknown key {key!r}; did you mean {near[0]!r}?")
        known = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in defaults}
        for key, value in known.items():
            kind = type(defaults[key])
            if type(value) not in ((int, float) if kind is float else (kind,)):
                raise UserError(f"{path}: {key}={value!r}: must be of type {kind.__name__}")
        try:
            return cls(**known)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error


def check_profile(profile) -> None:
    """Refuses anything but a profile, or None for the one known from the model.

    Raises:
        UserError: shows an example of a profile.
    """
    if profile is not None and not isinstance(profile, EncoderProfile):
        raise UserError(f"encoder={profile!r}: must be a profile, such as EncoderProfile(pooling='mean')")


COSINE_SCALE = 20.0
# Today's encoders read thousands of tokens; most functions have fewer than 512.
_TODAY = EncoderProfile(query_length=128, code_length=512, score_function="cosine", score_scale=COSINE_SCALE)
PROFILES = {
    "codebert": EncoderProfile("codebert", pooling="pooler", query_length=200, code_length=200),
    "graphcodebert": EncoderProfile(
        "graphcodebert", pooling="pooler", data_flow_length=64, code_columns=("original_string", "code")
    ),
    "unixcoder": EncoderProfile(
        "unixcoder", pooling="mean", query_prefix="<encoder-only></s>", code_prefix="<encoder-only></s>"
    ),
    # https://huggingface.co/nomic-ai/CodeRankEmbed names the prompt. It pools on the first token, as its base
    # Arctic-Embed-M-Long does. No temperature is given there; 1/20 is within the usual 0.02 to 0.05.
    "coderankembed": _TODAY.replace(
        name="coderankembed", pooling="cls", query_prefix="Represent this query for searching relevant code: "
    ),
    # https://huggingface.co/Qwen/Qwen3-Embedding-0.6B: the instruction is its prompt "query". Its tokenizer ends every
    # text with <|endoftext|>, whose state is the embedding. arXiv:2506.05176 gives no temperature; 1/20 is that of
    # jina-code-embeddings (arXiv:2508.21290), which is trained in the same way.
    "qwen3-embedding": _TODAY.replace(
        name="qwen3-embedding",
        pooling="last_token",
        normalize=True,
        query_prefix="Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
    ),
    # https://huggingface.co/answerdotai/ModernBERT-base is a masked language model: pooling and scale are the defaults
    # of sentence-transformers, as for any model that it turns into an encoder.
    "modernbert": _TODAY.replace(name="modernbert", pooling="mean"),
    # https://huggingface.co/Alibaba-NLP/gte-modernbert-base: the first token, no prompt, cosines x 100.
    "gte-modernbert": _TODAY.replace(name="gte-modernbert", pooling="cls", score_scale=100.0),
    "auto": EncoderProfile(),
}
# A published name, or its last part -> the profile. Copies under another owner or in a folder keep the last part. A
# whole name takes precedence over the repository's sentence-transformers files, which give no temperature.
KNOWN_ENCODERS = {
    "nomic-ai/CodeRankEmbed": "coderankembed",
    "Qwen/Qwen3-Embedding-0.6B": "qwen3-embedding",
    "Alibaba-NLP/gte-modernbert-base": "gte-modernbert",
    "ModernBERT-base": "modernbert",
    "codebert-base": "codebert",
    "graphcodebert-base": "graphcodebert",
    "unixcoder-base": "unixcoder",
    "unixcoder-base-unimodal": "unixcoder",
    "unixcoder-base-nine": "unixcoder",
}
_NO_LENGTH = 1_000_000  # tokenizers without a length have a number far above
SETTINGS_FILE = "config_sentence_transformers.json"
# Names in sentence-transformers, including older releases -> ours.
_POOLING_NAMES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last_token",
    "lasttoken": "last_token",
}


def resolve_profile(name_or_path: str | Path, name: str | None = None, revision: str | None = None) -> EncoderProfile:
    """Returns the profile called `name`, or else the one that fits the encoder at `name_or_path`.

    Tried in turn: `soft_trainer.json`; the whole published name in `KNOWN_ENCODERS`; the files of
    sentence-transformers (pooling, normalisation, prompts, lengths, score function); the last part of the published
    name. The last resort is "auto".

    Raises:
        UserError: `name` is not in `PROFILES`, there is no such folder or repository, or it has
            sentence-transformers modules that no profile can express.
    """
    if name is not None:
        if name not in PROFILES:
            raise UserError(f"profile={name!r}: use one of {', '.join(PROFILES)}")
        return PROFILES[name]
    if path := repository_file(name_or_path, PROFILE_FILE, revision):
        return EncoderProfile.load(path)
    published = published_name(name_or_path)
    if "/" in published and published in KNOWN_ENCODERS:
        return PROFILES[KNOWN_ENCODERS[published]]
    if repository_file(name_or_path, "modules.json", revision):
        with reading(name_or_path, revision):
            return _sentence_transformers_profile(name_or_path, revision)
    base, base_revision = base_of(name_or_path, revision)
    if base != name_or_path:
        return resolve_profile(base, revision=base_revision)
    return PROFILES[KNOWN_ENCODERS.get(published.rsplit("/", 1)[-1], "auto")]


def _sentence_transformers_profile(name_or_path: str | Path, revision: str | None) -> EncoderProfile:
    """Translates sentence-transformers files into a profile."""

    def read(file: str) -> dict:
        path = repository_file(name_or_path, file, revision)
        return read_json(path) if path else {}

    entries = read_json(repository_file(name_or_path, "modules.json", revision), list)
    modules = {entry["type"].rsplit(".", 1)[-1]: entry["path"] for entry in entries}
    transformer, settings = read("sentence_bert_config.json"), read(SETTINGS_FILE)
    prompts = settings.get("prompts") or {}
    pooling_config = read(f"{modules['Pooling']}/config.json") if "Pooling" in modules else {}
    if "Pooling" in modules and not pooling_config:
        raise UserError(
            f"{name_or_path}: modules.json names a pooling module, but {modules['Pooling']}/config.json is missing or "
            "empty"
        )
    pooling = _pooling(pooling_config) if "Pooling" in modules else "pooler"
    output = (transformer.get("modality_config") or {}).get("text", {}).get("method_output_name", "last_hidden_state")
    similarity = settings.get("similarity_fn_name") or "cosine"
    expressible = (
        set(modules) <= {"Transformer", "Pooling", "Normalize"}
        and pooling in POOLINGS
        and (pooling == "pooler") == (output == "pooler_output")
        and similarity in ("cosine", "dot")
    )
    if not expressible:
        raise UserError(
            f"{name_or_path}: its sentence-transformers modules ({', '.join(modules)}; pooling {pooling}; "
            f"{similarity}) are more than a profile expresses (pooling {', '.join(POOLINGS)}; cosine or dot); to "
            f"ignore them, give --profile one of {', '.join(PROFILES)}"
        )
    length = transformer.get("max_seq_length") or read("tokenizer_config.json").get("model_max_length")
    length = int(length) if length and length < _NO_LENGTH else None
    if length and (most := most_tokens(read("config.json"))):
        length = min(length, most)
    code_prefix = next((prompts[key] for key in ("document", "passage", "corpus") if prompts.get(key)), "")
    # Cosines lie in [-1, 1], which is too flat for a softmax; such encoders are trained with a scale.
    bounded = similarity == "cosine" or "Normalize" in modules
    try:
        return PROFILES["auto"].replace(
            pooling=pooling,
            normalize="Normalize" in modules,
            query_prefix=prompts.get("query") or "",
            code_prefix=code_prefix,
            include_prompt=pooling_config.get("include_prompt", True),
            query_length=int(transformer.get("query_length") or 0) or length,
            code_length=int(transformer.get("document_length") or 0) or length,
            score_function=similarity,
            score_scale=COSINE_SCALE if bounded else 1.0,
        )
    except UserError as error:
        raise UserError(f"{name_or_path}: its files of sentence-transformers: {error}") from error


def _pooling(config: dict) -> str:
    """Reads the pooling from a module's configuration: one of `POOLINGS`, or any other name as written there."""
    modes = config.get("pooling_mode") or [
        key for key, used in config.items() if key.startswith("pooling_mode") and used
    ]
    modes = [modes] if isinstance(modes, str) else modes
    return "+".join(_POOLING_NAMES.get(mode, mode) for mode in modes) or "mean"
