"""Defines encoder profiles (pooling, prompts, lengths, scores), and finds an encoder's profile."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.encoders.static_numpy import NO_LENGTH
from soft_trainer.errors import UserError
from soft_trainer.hub.files import base_of, published_name, reading, repository_file
from soft_trainer.system.files import PROFILE_FILE, SETTINGS_FILE, read_json, write_json
from soft_trainer.system.terminal import nearest

logger = logging.getLogger(__name__)
SCORE_FUNCTIONS = ("dot", "cosine")
DTYPES = ("float32", "bfloat16", "float16")  # the dtypes of weights
_SPECIAL_TOKEN = r"<[^<>\s]+>"
_HEAD = re.compile(f"(?:{_SPECIAL_TOKEN})*")


@dataclass(frozen=True)
class EncoderProfile:
    """Settings that turn a text into token ids, token vectors into an embedding, and two embeddings into a score.

    Args:
        name: a key of `PROFILES`, or "auto" for any other encoder.
        pooling: "mean" over the tokens, "cls" (the first token), "last_token" or "pooler" (the model's
            `pooler_output`).
        normalize: whether to scale embeddings to unit length.
        query_prefix, code_prefix: the text before each query or code: special tokens, followed by the prompt.
        include_prompt: False if pooling should skip the prefixes' tokens, as in sentence-transformers.
        lower_case: whether the tokenizer converts texts to lower case, in addition to what its files say.
        query_length, code_length: the maximum number of tokens, including special tokens.
        truncate_dim: the number of leading dimensions of an embedding to keep, or 0 for all. As in
            sentence-transformers, the rest is dropped after normalisation.
        data_flow_length: the maximum number of data-flow nodes after the code tokens (GraphCodeBERT), or 0 for none.
        score_function: "dot" or "cosine".
        score_scale: the factor by which scores are multiplied, which is the inverse of a softmax temperature.
        query_columns, code_columns: the columns that may contain the text. The first column that exists is read. Lists
            of tokens are joined with single spaces.
        matryoshka_dims: the numbers of leading dimensions that are trained as embeddings, largest first, or ().
        teacher: the Hub name or folder of the encoder that this encoder was distilled from, or "".
        teacher_identity: the teacher's fingerprint.

    Raises:
        UserError: a value is invalid.
    """

    name: str = "auto"
    pooling: str = "mean"
    normalize: bool = False
    query_prefix: str = ""
    code_prefix: str = ""
    include_prompt: bool = True
    lower_case: bool = False
    query_length: int = 128
    code_length: int = 256
    data_flow_length: int = 0
    truncate_dim: int = 0
    score_function: str = "dot"
    score_scale: float = 1.0
    query_columns: tuple[str, ...] = ("docstring_tokens", "docstring")
    code_columns: tuple[str, ...] = ("code_tokens", "code")
    matryoshka_dims: tuple[int, ...] = ()
    teacher: str = ""
    teacher_identity: str = ""

    def __post_init__(self):
        choices = {"pooling": POOLINGS, "score_function": SCORE_FUNCTIONS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r}: use one of {', '.join(allowed)}")
        for name, least in (("query_length", 3), ("code_length", 3), ("data_flow_length", 0), ("truncate_dim", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not 0 < self.score_scale < math.inf:
            raise UserError(f"score_scale={self.score_scale}: must be above 0 and finite")
        if not self.include_prompt and (self.data_flow_length or self.pooling == "pooler"):
            raise UserError(
                "include_prompt=False: data flow and the model's pooler always include the prompt; use pooling mean "
                "or cls without data flow"
            )

    @property
    def prefix_tokens(self) -> list[str]:
        """The special tokens at the start of the prefixes, such as `<encoder-only>`."""
        heads = _HEAD.match(self.query_prefix)[0] + _HEAD.match(self.code_prefix)[0]
        return list(dict.fromkeys(re.findall(_SPECIAL_TOKEN, heads)))

    def max_tokens(self, side: str) -> int:
        """Returns the maximum number of tokens in a query or code, including data-flow nodes."""
        if side == "query":
            return self.query_length
        return self.code_length + self.data_flow_length

    def with_prompts(self, query: str | None = None, code: str | None = None) -> EncoderProfile:
        """Returns a copy with different prompts, after the same special tokens. None leaves a prompt unchanged.

        Raises:
            UserError: `code` is set, but the encoder reads data flow, which does not allow a prompt for functions.
        """
        if code and self.data_flow_length:
            raise UserError(f"code_prompt={code!r}: an encoder that reads data flow cannot use a prompt for functions")
        changes = {}
        for name, prompt in (("query_prefix", query), ("code_prefix", code)):
            if prompt is not None:
                changes[name] = _HEAD.match(getattr(self, name))[0] + prompt
        return self.replace(**changes)

    def replace(self, **changes) -> EncoderProfile:
        """Returns a copy with `changes` applied. Values that are None are ignored."""
        return dataclasses.replace(self, **{key: value for key, value in changes.items() if value is not None})

    def save(self, folder: str | Path) -> None:
        """Writes the profile to a model's folder."""
        write_json(Path(folder) / PROFILE_FILE, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> EncoderProfile:
        """Reads a profile from the file `path`. Unknown keys, for example from a later version, are ignored.

        Raises:
            UserError: a value is invalid. The message starts with the path.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in read_json(path).items() if name in names}
        try:
            return cls(**_typed(known))
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    def changed(self, changes: Mapping[str, object]) -> EncoderProfile:
        """Returns a copy with a user's changes to fields of the profile, `query_prompt` or `code_prompt`.

        Raises:
            UserError: a name is unknown, or a value is invalid.
        """
        fields = dict(changes)
        prompts = [fields.pop(f"{side}_prompt", None) for side in ("query", "code")]
        names = [field.name for field in dataclasses.fields(self)]
        for name in fields:
            if name not in names:
                near = nearest(name, names) or "; use fields of EncoderProfile, query_prompt or code_prompt"
                raise UserError(f"encoder: no setting {name!r}{near}")
        return self.replace(**_typed(fields)).with_prompts(*prompts)


def _typed(values: Mapping[str, object]) -> dict[str, object]:
    """Checks the types of a profile's values. Lists become tuples.

    Raises:
        UserError: a value has the wrong type.
    """
    kinds = {field.name: type(field.default) for field in dataclasses.fields(EncoderProfile)}
    typed = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = tuple(value)
        kind = kinds[name]
        if type(value) is not kind and (kind, type(value)) != (float, int):
            raise UserError(f"{name}={value!r}: must be of type {kind.__name__}")
        typed[name] = value
    return typed


COSINE_SCALE = 20.0
# Today's encoders read thousands of tokens, but most functions have fewer than 512.
_TODAY = EncoderProfile(query_length=128, code_length=512, score_function="cosine", score_scale=COSINE_SCALE)
_ENCODER_ONLY = "<encoder-only></s>"
_PROFILES = (
    EncoderProfile("codebert", pooling="pooler", query_length=200, code_length=200),
    EncoderProfile("graphcodebert", pooling="pooler", data_flow_length=64, code_columns=("original_string", "code")),
    EncoderProfile("unixcoder", query_prefix=_ENCODER_ONLY, code_prefix=_ENCODER_ONLY),
    # https://huggingface.co/nomic-ai/CodeRankEmbed gives the prompt. The model pools on the first token, like its base
    # Arctic-Embed-M-Long. No temperature is given; 1/20 is within the usual 0.02 to 0.05.
    _TODAY.replace(
        name="coderankembed", pooling="cls", query_prefix="Represent this query for searching relevant code: "
    ),
    # https://huggingface.co/Qwen/Qwen3-Embedding-0.6B: the instruction is its prompt "query". Its tokenizer ends every
    # text with <|endoftext|>, whose state is the embedding. arXiv:2506.05176 gives no temperature;
    # jina-code-embeddings (arXiv:2508.21290), which is trained in the same way, uses 1/20.
    _TODAY.replace(
        name="qwen3-embedding",
        pooling="last_token",
        normalize=True,
        query_prefix="Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
    ),
    # https://huggingface.co/answerdotai/ModernBERT-base is a masked language model. Pooling and scale are the defaults
    # of sentence-transformers for a model that it turns into an encoder.
    _TODAY.replace(name="modernbert", pooling="mean"),
    # https://huggingface.co/Alibaba-NLP/gte-modernbert-base: the first token, no prompt, cosines x 100.
    _TODAY.replace(name="gte-modernbert", pooling="cls", score_scale=100.0),
    # A static encoder only looks up vectors, so long texts cost little. It weighs and pools them itself.
    _TODAY.replace(name="static", pooling="pooler", normalize=True, query_length=NO_LENGTH, code_length=NO_LENGTH),
    EncoderProfile(),
)
PROFILES = {profile.name: profile for profile in _PROFILES}
IGNORE_FILES = f". To ignore the sentence-transformers files, set profile to one of {', '.join(PROFILES)}"
MODULES_FILE = "modules.json"
# Earlier releases of sentence-transformers named the file after the model.
_TRANSFORMER_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_TRANSFORMER_FILES = [f"sentence_{kind}_config.json" for kind in _TRANSFORMER_KINDS]
# Profiles keyed by full published name or by its last part, which a copy usually keeps under another owner or in a
# folder. A full name takes precedence over the repository's sentence-transformers files, which give no temperature.
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
# Our names for sentence-transformers' pooling modes, including those of older releases.
_POOLING_NAMES = {pooling.mode: name for name, pooling in POOLINGS.items() if pooling.mode}
_POOLING_NAMES |= {pooling.key: name for name, pooling in POOLINGS.items() if pooling.key}


def resolve_profile(name_or_path: str | Path, name: str | None = None, revision: str | None = None) -> EncoderProfile:
    """Returns the profile called `name` or, by default, the profile of the encoder at `name_or_path`.

    The profile comes from the first of these sources that exists: `soft_trainer.json`, the full published name in
    `KNOWN_ENCODERS`, the sentence-transformers files (pooling, normalisation, prompts, lengths, score function), or
    the last part of the published name. Otherwise, the profile is "auto".

    Raises:
        UserError: `name` is not in `PROFILES`, or the folder or repository does not exist, is a cross-encoder or has
            sentence-transformers modules that a profile cannot express.
    """
    if name is not None:
        if name not in PROFILES:
            raise UserError(f"profile={name!r}: use one of {', '.join(PROFILES)}")
        return PROFILES[name]
    if path := repository_file(name_or_path, PROFILE_FILE, revision):
        return EncoderProfile.load(path).replace(truncate_dim=saved_truncate_dim(name_or_path, revision))
    published = published_name(name_or_path)
    if "/" in published and published in KNOWN_ENCODERS:
        return PROFILES[KNOWN_ENCODERS[published]]
    if repository_file(name_or_path, MODULES_FILE, revision):
        if path := repository_file(name_or_path, "config.json", revision):
            check_encodes(read_json(path), name_or_path)
        with reading(name_or_path, revision):
            return _sentence_transformers_profile(name_or_path, revision)
    base, base_revision = base_of(name_or_path, revision)
    if base != name_or_path:
        return resolve_profile(base, revision=base_revision)
    return PROFILES[KNOWN_ENCODERS.get(published.rsplit("/", 1)[-1], "auto")]


def is_inferred_from_modules(name_or_path: str | Path, revision: str | None = None) -> bool:
    """Returns True if `resolve_profile` infers an encoder's profile from the sentence-transformers files."""
    published = published_name(name_or_path)
    if repository_file(name_or_path, PROFILE_FILE, revision) or ("/" in published and published in KNOWN_ENCODERS):
        return False
    return repository_file(name_or_path, MODULES_FILE, revision) is not None


def saved_truncate_dim(name_or_path: str | Path, revision: str | None = None) -> int | None:
    """Returns `truncate_dim` from an encoder's sentence-transformers files, or None if it is not set.

    Raises:
        UserError: the value is not a positive whole number.
    """
    path = repository_file(name_or_path, SETTINGS_FILE, revision, expected=False)
    if path is None:
        return None
    value = read_json(path).get("truncate_dim")
    if value is not None and (type(value) is not int or value < 1):
        raise UserError(f"{path}: truncate_dim={value!r}: must be a whole number from 1 to the encoder's dimensions")
    return value


def module_paths(name_or_path: str | Path, revision: str | None) -> dict[str, str]:
    """Returns the folder of each sentence-transformers module, keyed by its kind, such as "Pooling"."""
    modules = read_json(repository_file(name_or_path, MODULES_FILE, revision), list)
    paths = {entry["type"].rsplit(".", 1)[-1]: entry["path"] for entry in modules}
    paths.pop("Dropout", None)  # only sentence-transformers' training uses it
    return paths


def _sentence_transformers_profile(name_or_path: str | Path, revision: str | None) -> EncoderProfile:
    """Converts an encoder's sentence-transformers files to a profile."""

    def read(file: str):
        path = repository_file(name_or_path, file, revision)
        return read_json(path) if path else {}

    modules = module_paths(name_or_path, revision)
    transformer = next(filter(None, map(read, _TRANSFORMER_FILES)), {})
    settings = read(SETTINGS_FILE)
    prompts = settings.get("prompts") or {}
    pooling = "pooler"
    pooling_config = {}
    if "Pooling" in modules:
        file = f"{modules['Pooling']}/config.json"
        pooling_config = read(file)
        if not pooling_config:
            raise UserError(f"{name_or_path}: modules.json lists a pooling module, but {file} is missing or empty")
        used = [key for key, value in pooling_config.items() if key.startswith("pooling_mode") and value]
        modes = pooling_config.get("pooling_mode") or used
        modes = [modes] if isinstance(modes, str) else modes
        pooling = "+".join(_POOLING_NAMES.get(mode, mode) for mode in modes) or "mean"  # "cls+mean" for two modes
    output = (transformer.get("modality_config") or {}).get("text", {}).get("method_output_name", "last_hidden_state")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if (
        modules.keys() - {"Transformer", "Pooling", "Normalize"}
        or pooling not in POOLINGS
        or similarity not in SCORE_FUNCTIONS
        or (pooling == "pooler") != (output == "pooler_output")
    ):
        raise UserError(
            f"{name_or_path}: a profile cannot express these sentence-transformers modules ({', '.join(modules)}; "
            f"pooling {pooling}; {similarity}), only pooling {', '.join(POOLINGS)} with cosine or dot{IGNORE_FILES}"
        )
    if modules["Transformer"]:
        raise UserError(
            f"{name_or_path}: modules.json: the transformer lies in {modules['Transformer']}, but AutoModel reads the "
            "folder itself; save the encoder again with SentenceTransformer.save"
        )
    tokenizer = transformer.get("processor_kwargs") or transformer.get("tokenizer_args") or {}
    length = tokenizer.get("model_max_length") or transformer.get("max_seq_length")
    length = length or read("tokenizer_config.json").get("model_max_length")
    if length and length < NO_LENGTH:
        length = min(int(length), most_tokens(read("config.json")) or math.inf)
    else:
        length = None
    normalize = "Normalize" in modules
    scale = 1.0
    if similarity == "cosine" or normalize:
        scale = COSINE_SCALE  # cosines in [-1, 1] are too flat for a softmax, so encoders are trained with a scale
    # `encode_document` has the prompt "document", if only "", and never falls back to another one.
    code_prompt = prompts.get("document") or ""
    for unread in ("passage", "corpus"):
        if prompts.get(unread) and not code_prompt:
            logger.warning(
                "%s: functions get no prompt, because sentence-transformers applies only the prompt `document`; "
                "to use the prompt `%s`, set code_prompt=%r",
                name_or_path,
                unread,
                prompts[unread],
            )
    try:
        return PROFILES["auto"].replace(
            pooling=pooling,
            normalize=normalize,
            query_prefix=prompts.get("query") or "",
            code_prefix=code_prompt,
            include_prompt=pooling_config.get("include_prompt", True),
            query_length=int(transformer.get("query_length") or 0) or length,
            code_length=int(transformer.get("document_length") or 0) or length,
            lower_case=bool(transformer.get("do_lower_case")),
            truncate_dim=saved_truncate_dim(name_or_path, revision),
            score_function=similarity,
            score_scale=scale,
        )
    except UserError as error:
        raise UserError(f"{name_or_path}: in its sentence-transformers files, {error}") from error


# ---- The number of tokens that a model reads ----

# Models like RoBERTa, whose positions start after the id of the padding token. MPNet's positions always start at 2.
_AFTER_PADDING = ("roberta", "camembert", "data2vec-text", "ibert", "longformer", "luke", "xmod")


def most_tokens(config: Mapping) -> int | None:
    """Returns the maximum number of tokens that a model with this `config.json` can read, or None if unlimited."""
    positions = config.get("max_position_embeddings")
    kind = config.get("model_type") or ""
    if not positions or positions < 0:
        return None
    if kind == "mpnet":
        return int(positions) - 2
    if any(name in kind for name in _AFTER_PADDING):
        return int(positions) - (config.get("pad_token_id") or 0) - 1
    return int(positions)


def check_lengths(config: Mapping, profile: EncoderProfile) -> None:
    """Raises UserError, with the model's maximum length, if a profile's lengths exceed the model's positions."""
    most = most_tokens(config) or math.inf
    lengths = {"query_length": profile.query_length, "code_length": profile.code_length + profile.data_flow_length}
    for name, length in lengths.items():
        if length > most:
            raise UserError(f"{name}={length}: the model reads at most {most} tokens")


# ---- Cross-encoders ----


def is_cross_encoder(name_or_path: str | Path, revision: str | None = None) -> bool:
    """Returns True if a folder or repository has a model that scores a pair of texts instead of embedding a text."""
    path = repository_file(name_or_path, "config.json", revision)
    return path is not None and _scores_pairs(read_json(path))


def _scores_pairs(config: Mapping) -> bool:
    """Returns True for the configuration of a sequence classifier with one label, as `CrossEncoder` saves it."""
    classes = config.get("architectures") or ()
    classifies = any(name.endswith("ForSequenceClassification") for name in classes)
    return classifies and len(config.get("id2label") or ()) == 1


def check_encodes(config: Mapping, name: str | Path) -> None:
    """Raises UserError for a cross-encoder, whose hidden states are not trained to be embeddings.

    Also for a static encoder stored as an XLNet without layers, whose weights `AutoModel` does not know.
    """
    if config.get("model_type") == "xlnet" and config.get("n_layer") == 0:
        raise UserError(f"{name}: a static encoder stored as an XLNet without layers; distil or train it again")
    if _scores_pairs(config):
        raise UserError(
            f"{name}: a cross-encoder, which scores pairs of texts and has no embeddings; use an encoder here. In "
            "training, a cross-encoder can be the teacher"
        )
