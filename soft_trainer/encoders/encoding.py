"""Turns texts into token ids, token ids into padded batches, batches into embeddings, and embeddings into scores."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F

from soft_trainer.dataflow import DATA_FLOW_LANGUAGES
from soft_trainer.dataflow.inputs import graph_embeddings, graph_features, pad_graph_features
from soft_trainer.encoders.attention import running
from soft_trainer.encoders.onnx import check_dimensions
from soft_trainer.encoders.packing import PACKED, Passes, encode_packed, pack, token_ids
from soft_trainer.encoders.pooling import POOLINGS
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError
from soft_trainer.system import distributed
from soft_trainer.system.fingerprints import encoder_fingerprint
from soft_trainer.system.terminal import progress_bar

if TYPE_CHECKING:  # slow to import, and not needed for token ids
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GPU_STEP = 64  # tokens
GPU_TOKENS = 512  # tokens in a text; a batch of texts without a maximum length is sized for this many
# Models without causal or local attention, which would need more than the mask of the padding.
BROADCAST_MASKS = ("roberta", "bert", "xlm-roberta", "camembert", "electra", "albert", "distilbert")

# ---- Texts to token ids ----


def tokenize(tokenizer, texts: Sequence[str], prefix: str = "", max_length: int = 256) -> list[list[int]]:
    """Returns the token ids of `prefix + text`, including special tokens, truncated to `max_length`."""
    return tokenize_with_lengths(tokenizer, texts, prefix, max_length)[0]


def tokenize_with_lengths(
    tokenizer, texts: Sequence[str], prefix: str = "", max_length: int = 256
) -> tuple[list[list[int]], list[int]]:
    """Returns the same token ids as `tokenize`, and the length of each text in tokens before truncation."""
    if isinstance(texts, str):
        raise UserError(f"{texts!r:.40}: expected a list of texts, not a single text")
    if not len(texts):
        return [], []
    texts = [prefix + text for text in texts]
    if not tokenizer.is_fast:  # a slow tokenizer does not report how much it truncates
        lengths = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
        return tokenizer(texts, truncation=True, max_length=max_length)["input_ids"], lengths
    unread = {"return_attention_mask": False, "return_token_type_ids": False}
    encodings = tokenizer(texts, truncation=True, max_length=max_length, **unread).encodings
    special = tokenizer.num_special_tokens_to_add()
    ids = []
    lengths = []
    for encoding in encodings:
        cut = sum(len(rest) - special for rest in encoding.overflowing)
        ids.append(encoding.ids)
        lengths.append(len(encoding) + cut)
    return ids, lengths


def prompt_length(tokenizer, profile: EncoderProfile, side: str) -> int:
    """Returns how many leading tokens (the prompt) pooling skips in each text of a `side`, "query" or "code".

    The number is 0 if `profile.include_prompt` is set. Otherwise it is computed as in sentence-transformers, so that
    embeddings are equal: the prompt is tokenized without a text, and a special token at the end is not counted. If the
    prompt ends with a space, many tokenizers join the space to the text's first word, and pooling skips that word.
    """
    prefix = getattr(profile, f"{side}_prefix")
    if profile.include_prompt or not prefix:
        return 0
    ids = tokenizer(prefix)["input_ids"]
    if ids:
        return len(ids) - (ids[-1] in tokenizer.all_special_ids)
    return 0


# ---- Token ids to padded batches ----


def token_count(item: Sequence[int] | dict) -> int:
    """Returns the number of tokens in a row, including data-flow nodes."""
    return len(token_ids(item))


def pad(
    items: Sequence[Sequence[int] | dict], pad_token_id: int, prompt_length: int | np.ndarray = 0, width: int = 1
) -> dict[str, Tensor]:
    """Pads rows on the right to the length of the longest row.

    Args:
        prompt_length: the number of leading tokens that pooling skips, for all rows or for each, int64[B].
        width: the minimum length; see `padded_width`.

    Returns:
        `input_ids` and `attention_mask`, each LongTensor[B, L]. If `prompt_length` is not 0, also `pooling_mask`,
        which is 0 on the prompt and the padding. For rows with data flow, see `pad_graph_features`.
    """
    if isinstance(items[0], dict):
        return pad_graph_features(items, pad_token_id, width)
    lengths = np.fromiter(map(len, items), dtype=np.int64, count=len(items))
    positions = np.arange(lengths.max(initial=width))
    mask = positions < lengths[:, None]
    input_ids = np.full(mask.shape, pad_token_id)
    input_ids[mask] = np.concatenate(items)
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if np.any(prompt_length):
        inputs["pooling_mask"] = mask & (positions >= np.reshape(prompt_length, (-1, 1)))
    return {name: torch.from_numpy(values.astype(np.int64, copy=False)) for name, values in inputs.items()}


def padded_width(longest: int, limit: int) -> int:
    """Rounds the length of a batch on a GPU up to a multiple of 64, at most `limit`, so that few shapes occur.

    A text without tokens, which static encoders know, counts as one token.
    """
    longest = max(longest, 1)
    return max(min(-(-longest // GPU_STEP) * GPU_STEP, limit), longest)


@dataclass(frozen=True)
class Collator:
    """Turns the tokens of texts into the model inputs of one forward pass. Data workers get a pickled copy.

    Args:
        packs: True to join texts without padding (`pack`), so that a pass may hold queries together with functions. If
            a text has no token, texts are padded, as the model would need one. False to pad to the longest text.
        first_position: the position of each text's first token in a packed pass.
        few_lengths: True to pad to one of a few lengths (`padded_width`), which suits a GPU.
        weigh: how a static encoder weighs tokens (`Weighing`), or None for any other encoder.
    """

    pad_token_id: int = 0
    packs: bool = False
    first_position: int = 0
    few_lengths: bool = False
    weigh: Callable | None = None

    def __call__(self, items: Sequence, prompt_lengths: int | np.ndarray, limit: int, side: str = "query") -> dict:
        """Collates texts.

        Args:
            items: each text's token ids, or its features with data flow.
            prompt_lengths: the number of leading tokens that pooling skips; for each text, int64[n], if this collator
                packs.
            limit: the maximum number of tokens in a text.
            side: "query" or "code", which a static encoder weighs differently.
        """
        if self.weigh is not None:
            return self.weigh(items, side)
        lengths = list(map(token_count, items))
        if self.packs and all(lengths):
            return pack(items, prompt_lengths, self.first_position)
        width = padded_width(max(lengths), limit) if self.few_lengths else 1
        return pad(items, self.pad_token_id, prompt_lengths, width)


def collator_of(encoder: Encoder, device: torch.device) -> Collator:
    """Returns the collator for an encoder's passes on a device."""
    passes = encoder.passes
    few_lengths = not passes.packed and device.type != "cpu"
    weigh = getattr(getattr(encoder.model, "module", encoder.model), "weigh", None)
    if weigh:
        weigh = weigh.after(encoder.tokenizer, encoder.profile.code_prefix)
    return Collator(encoder.tokenizer.pad_token_id, passes.packed, passes.first_position, few_lengths, weigh)


# ---- Batches to embeddings ----


def pool(profile: EncoderProfile, outputs, attention_mask: Tensor) -> Tensor:
    """Computes one embedding per text, Tensor[B, d] in float32 or higher. Padding may be on either side.

    Args:
        outputs: the model's outputs, with `pooler_output` for "pooler", otherwise `last_hidden_state`, Tensor[B, L,
            d].
        attention_mask: Tensor[B, L], 1 on the tokens to pool.
    """
    pooling = POOLINGS[profile.pooling]
    embeddings = pooling.padded(getattr(outputs, pooling.output), attention_mask)
    return _normalized(profile, embeddings)


def _normalized(profile: EncoderProfile, embeddings: Tensor) -> Tensor:
    """Converts pooled vectors to float32 or higher, and scales them to unit length if the profile does."""
    embeddings = at_least_float32(embeddings)
    if profile.normalize:
        return F.normalize(embeddings, dim=-1)
    return embeddings


def score(profile: EncoderProfile, queries: Tensor, codes: Tensor, dim: int | None = None) -> Tensor:
    """Scores queries against functions with the profile's score function.

    Args:
        queries, codes: the embeddings, Tensor[B, d] and Tensor[N, d].
        dim: the number of leading dimensions to use. By default, all.

    Returns:
        Dot products or cosines, times the profile's scale, Tensor[B, N].
    """
    queries = comparable(profile, shorten(profile, queries, dim))
    codes = comparable(profile, shorten(profile, codes, dim))
    with torch.autocast(queries.device.type, enabled=False):
        return queries @ codes.T * profile.score_scale


def comparable(profile: EncoderProfile, embeddings: Tensor) -> Tensor:
    """Converts embeddings to float32 or higher, so that their dot products are the profile's unscaled scores."""
    embeddings = at_least_float32(embeddings)
    if profile.score_function == "cosine":
        return F.normalize(embeddings, dim=-1)
    return embeddings


def at_least_float32(tensor: Tensor) -> Tensor:
    """Converts a half-precision tensor to float32. Returns a float32 or float64 tensor unchanged."""
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.float()


def where_float64_exists(tensor: Tensor) -> Tensor:
    """Moves a tensor to the CPU if its device has no float64, as on a Mac. Returns other tensors unchanged."""
    if tensor.device.type == "mps":
        return tensor.cpu()
    return tensor


@contextlib.contextmanager
def placed(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Moves a model to `device` for the `with` block if it is on the CPU.

    With FSDP or DeepSpeed, `Trainer` moves the model only when training begins.
    """
    moves = model.device.type == "cpu" and device.type != "cpu"
    if moves:
        model.to(device)
    try:
        yield
    finally:
        if moves:
            model.to("cpu")


def encode(model: nn.Module, profile: EncoderProfile, inputs: Mapping[str, Tensor]) -> Tensor:
    """Embeds a batch made by `pad` or `pack`. Returns Tensor[B, d] in float32 or higher."""
    embeddings = _encode(model, profile, inputs)
    if profile.truncate_dim:
        return embeddings[:, : profile.truncate_dim]
    return embeddings


def _encode(model: nn.Module, profile: EncoderProfile, inputs: Mapping[str, Tensor]) -> Tensor:
    """Embeds a batch with all dimensions; see `encode`."""
    plain = getattr(model, "module", model)  # DDP and DeepSpeed wrap the encoder
    if "borders" in inputs:
        return _normalized(profile, encode_packed(model, plain, profile, inputs))
    if "node_mask" in inputs:
        # A plain RoBERTa, given the vectors of nodes and a mask of which token attends to which.
        vectors = graph_embeddings(plain.get_input_embeddings(), inputs)
        mask = inputs["attention_mask"]
        outputs = model(inputs_embeds=vectors, attention_mask=mask[:, None], position_ids=inputs["position_ids"])
        return pool(profile, outputs, mask[:, 0])  # the first token attends to every token in the row
    if "weights" in inputs:
        return _normalized(profile, model(**inputs).pooler_output)
    inputs = dict(inputs)
    padding_mask = inputs["attention_mask"]
    pooling_mask = inputs.pop("pooling_mask", padding_mask)
    if padding_mask.device.type != "cpu" and reads_broadcast_masks(plain.config):
        # From a mask with two dimensions, `transformers` would compute whether anything is padded, and the host would
        # wait for the result.
        inputs["attention_mask"] = padding_mask.bool()[:, None, None, :]
    outputs = model(**inputs)
    if POOLINGS[profile.pooling].skips_prompt:
        return pool(profile, outputs, pooling_mask)
    return pool(profile, outputs, padding_mask)


def reads_broadcast_masks(config) -> bool:
    """Returns True for models in which a mask with four dimensions gives the same result to the last bit."""
    return config.model_type in BROADCAST_MASKS and config._attn_implementation in ("sdpa", PACKED)


# ---- Matryoshka embeddings: the first dimensions of an embedding are a shorter embedding ----


def parse_dims(value: str | Sequence[int] | None) -> tuple[int, ...]:
    """Parses embedding sizes, which are numbers or a string such as "768,256,64". Returns the largest size first.

    Raises:
        UserError: the sizes are not distinct whole numbers above 0.
    """
    if value is None:
        words = []
    elif isinstance(value, str):
        words = value.split(",")
    else:
        words = value
    try:
        dims = [int(word) if isinstance(word, str) else operator.index(word) for word in words]
    except (TypeError, ValueError):
        dims = [0]
    if min(dims, default=1) < 1 or len(set(dims)) < len(dims):
        raise UserError(
            f"matryoshka_dims={value}: expected distinct, comma-separated whole numbers above 0, such as 768,256,64"
        )
    return tuple(sorted(dims, reverse=True))


def dimensions(model: PreTrainedModel, profile: EncoderProfile) -> int:
    """Returns the number of dimensions of an embedding."""
    return profile.truncate_dim or model.config.hidden_size


def check_dims(dims: Sequence[int], hidden_size: int, option: str = "matryoshka_dims") -> None:
    """Raises UserError unless each number in `dims` is from 1 to `hidden_size`. The message starts with `option`."""
    for dim in dims:
        check_dimensions(dim, hidden_size, option)


def shorten(profile: EncoderProfile, embeddings: Tensor, dim: int | None) -> Tensor:
    """Keeps the first `dim` dimensions of embeddings, Tensor[n, d], or all dimensions if `dim` is None.

    If the profile normalises embeddings, shortened embeddings are normalised again.
    """
    if dim is None or dim >= embeddings.shape[-1]:
        return embeddings
    embeddings = embeddings[..., :dim]
    if profile.normalize:
        return F.normalize(embeddings, dim=-1)
    return embeddings


# ---- Any number of texts ----


@dataclass(frozen=True)
class Encoder:
    """A model with its tokenizer and profile, ready to embed queries and functions; see `load_encoder`.

    It is a `TextEncoder` that runs in torch.

    Args:
        passes: how forward passes run.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    profile: EncoderProfile
    truncate_dim: int | None = None
    passes: Passes = Passes()
    runtime: ClassVar[str] = "torch"

    def encode_queries(self, queries: Sequence[str], batch_size: int = 64, progress: bool = False) -> Tensor:
        """Embeds queries. Returns Tensor[n, d] in float32 on the model's device."""
        ids = tokenize(self.tokenizer, queries, self.profile.query_prefix, self.profile.query_length)
        return self._embed(ids, "query", batch_size, progress)

    def encode_codes(
        self,
        codes: Sequence[str],
        language: str | Sequence[str] | None = None,
        batch_size: int = 64,
        progress: bool = False,
    ) -> Tensor:
        """Embeds functions. Returns Tensor[n, d] in float32 on the model's device.

        Args:
            language: one language for all functions, or one for each function. Only encoders with data flow need
                languages.

        Raises:
            UserError: the encoder reads data flow, and `language` is missing or unknown.
        """
        profile = self.profile
        tokenizer = self.tokenizer
        if not profile.data_flow_length:
            items = tokenize(tokenizer, codes, profile.code_prefix, profile.code_length)
        elif language is None:
            raise UserError(f"this encoder reads data flow; pass language, one of {', '.join(DATA_FLOW_LANGUAGES)}")
        else:
            languages = [language] * len(codes) if isinstance(language, str) else language
            lengths = profile.code_length, profile.data_flow_length
            pairs = zip(codes, languages, strict=True)
            items = [graph_features(code, of_code, tokenizer, *lengths) for code, of_code in pairs]
        return self._embed(items, "code", batch_size, progress)

    def score(self, queries: Tensor, codes: Tensor) -> Tensor:
        """Scores query embeddings, Tensor[B, d], against code embeddings, Tensor[N, d]. Returns Tensor[B, N]."""
        return score(self.profile, queries, codes)

    @property
    def dimensions(self) -> int:
        """The number of dimensions of an embedding."""
        return self.truncate_dim or dimensions(self.model, self.profile)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokenizer, the profile and the weights, computed on first access."""
        return encoder_fingerprint(self.model, self.tokenizer, self.profile)

    @cached_property
    def _of_codes(self) -> Encoder:
        """The same encoder with a copy of the tokenizer, for encoding functions.

        A tokenizer has one maximum length at a time. If a thread that searches and a thread that encodes functions
        shared a tokenizer, they would truncate each other's texts.
        """
        return replace(self, tokenizer=copy.deepcopy(self.tokenizer))

    def encode(self, texts: Sequence[str], side: str, languages: Sequence[str] | None = None) -> np.ndarray:
        """Embeds texts; see `TextEncoder`. Functions in a language without data-flow rules are parsed as Python."""
        if side == "query":
            embeddings = self.encode_queries(texts)
        else:
            parsed = languages and [name if name in DATA_FLOW_LANGUAGES else "python" for name in languages]
            embeddings = self._of_codes.encode_codes(texts, parsed)
        return comparable(self.profile, embeddings).float().cpu().numpy()

    def _embed(self, items: Sequence, side: str, batch_size: int, progress: bool) -> Tensor:
        with running(self.model, self.passes.packed):
            embeddings = embed(self, items, side, batch_size, "Encoding" if progress else None)
        return shorten(self.profile, embeddings, self.truncate_dim)


def embed(encoder: Encoder, items: Sequence, side: str, batch_size: int = 64, progress: str | None = None) -> Tensor:
    """Embeds tokenized texts, with the model in eval mode.

    The longest texts are encoded first, so batches have little padding, and if memory is too small, the first batch
    fails. On a CPU, a batch has `batch_size` texts. On a GPU, it has as many tokens as `batch_size` texts of the
    profile's maximum length, and therefore more texts if they are short.

    Args:
        items: each text's token ids, or its features with data flow.
        side: "query" or "code", which determines how many leading tokens pooling skips.
        progress: the label of the progress bar, or None for no bar.

    Returns:
        Tensor[n, d] in the order of `items`, float32 or higher, on the model's device.
    """
    lengths = np.fromiter(map(token_count, items), dtype=np.int64, count=len(items))
    order = np.argsort(-lengths, kind="stable")
    batches = [order[part] for part in batch_slices(encoder, lengths[order], side, batch_size)]
    embeddings = _embed_batches(encoder, items, batches, side, progress)
    return embeddings[torch.from_numpy(np.argsort(order)).to(embeddings.device)]


def batch_slices(
    encoder: Encoder, lengths: np.ndarray, side: str, batch_size: int, processes: int = 1
) -> Iterator[slice]:
    """Divides texts into batches for all processes together. See `embed` for the size of one process's share.

    Args:
        lengths: int64[n], the number of tokens in each text, in decreasing order.
    """
    limit = encoder.profile.max_tokens(side)
    # A static encoder has no limit.
    budget = batch_size * min(limit, max(GPU_TOKENS, int(lengths.max(initial=0))))
    ends = lengths.cumsum()
    start = 0
    while start < len(lengths):
        if encoder.model.device.type == "cpu":
            share = batch_size
        elif encoder.passes.packed:
            end = ends[start] - lengths[start] + processes * budget
            share = (int(np.searchsorted(ends, end, side="right")) - start) // processes
        else:
            share = budget // padded_width(int(lengths[start]), limit)
        yield slice(start, start + max(share, 1) * processes)
        start += max(share, 1) * processes


@torch.no_grad()
def _embed_batches(
    encoder: Encoder, items: Sequence, batches: Sequence[np.ndarray], side: str, progress: str | None
) -> Tensor:
    """Embeds batches of texts, each given by the texts' numbers in `items`. Returns Tensor[n, d] in this order.

    An empty batch runs a forward pass too, because other processes may wait for it.
    """
    model = encoder.model
    profile = encoder.profile
    prompt = prompt_length(encoder.tokenizer, profile, side)
    limit = profile.max_tokens(side)
    device = model.device
    collate = collator_of(encoder, device)
    number = sum(map(len, batches))
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    embeddings = torch.empty(number, dimensions(model, profile), device=device, dtype=dtype)
    was_training = model.training
    model.eval()
    done = 0
    with progress_bar(progress, number, "text") as bar:
        for rows in batches:
            texts = [items[int(row)] for row in rows] or [items[0]]
            encoded = encode(model, profile, moved(collate(texts, prompt, limit, side), device))
            embeddings[done : done + len(rows)] = encoded[: len(rows)].to(dtype)
            done += len(rows)
            bar.update(len(rows))
    model.train(was_training)
    return embeddings


def moved(inputs: Mapping[str, object], device: torch.device) -> dict:
    """Returns model inputs whose tensors are on `device`. The host does not wait for the copies."""
    if device.type == "cuda":
        inputs = mapped_inputs(inputs, Tensor.pin_memory)
    return mapped_inputs(inputs, lambda tensor: tensor.to(device, non_blocking=True))


def mapped_inputs(inputs: Mapping[str, object], change: Callable[[Tensor], Tensor]) -> dict:
    """Returns a copy of model inputs with `change` applied to every tensor."""
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def embed_sharded(encoder: Encoder, tokens, side: str, batch_size: int = 64, progress: str | None = None) -> Tensor:
    """Embeds rows like `embed`, but divides the work among processes. Returns all rows' embeddings, Tensor[n, d].

    Args:
        tokens: each row's token ids, or its features with data flow. The attribute `lengths`, int64[n], has the number
            of tokens in each row.
    """
    rank, processes = distributed.rank_and_world_size()
    # Equal texts are encoded once. In different batches, rounding would make their embeddings differ and break ties.
    firsts, groups = distinct_rows(tokens)
    # Each batch is dealt out by length, so that all processes encode about the same number of tokens.
    order = np.argsort(-tokens.lengths[firsts], kind="stable")
    parts = batch_slices(encoder, tokens.lengths[firsts][order], side, batch_size, processes)
    batches = [firsts[order[part]][rank::processes] for part in parts]
    gathered = distributed.gather(_embed_batches(encoder, tokens, batches, side, progress))
    numbers = np.concatenate([order[process::processes] for process in range(processes)])
    rows = np.argsort(numbers)[groups]  # `numbers` is a permutation, so sorting inverts it
    return gathered[torch.from_numpy(rows).to(gathered.device)]


def distinct_rows(tokens) -> tuple[np.ndarray, np.ndarray]:
    """Groups rows with equal token ids, or with equal features.

    Returns:
        The first row of each group, int64[D], and each row's group, int64[n].
    """
    known: dict[bytes, int] = {}
    firsts = []
    groups = np.empty(len(tokens), dtype=np.int64)
    for row in range(len(tokens)):
        item = tokens[row]
        digest = xxhash.xxh3_128()
        for part in item.values() if isinstance(item, dict) else [item]:
            values = np.asarray(part)
            digest.update(f"{values.shape} ".encode())
            digest.update(values.tobytes())
        group = known.setdefault(digest.digest(), len(firsts))
        if group == len(firsts):
            firsts.append(row)
        groups[row] = group
    return np.array(firsts, dtype=np.int64), groups
