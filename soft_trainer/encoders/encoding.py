"""Turns texts into token ids, token ids into padded batches, and any number of texts into embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from soft_trainer import distributed
from soft_trainer.dataflow.inputs import graph_embeddings, pad_graph_features
from soft_trainer.encoders.pooling import pool
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.terminal import Progress

# ---- Texts to token ids ----


def tokenize(tokenizer, texts: Sequence[str], prefix: str = "", max_length: int = 256) -> list[list[int]]:
    """Returns the token ids of `prefix + text` with special tokens, truncated to `max_length`, without padding."""
    return tokenize_with_lengths(tokenizer, texts, prefix, max_length)[0]


def tokenize_with_lengths(
    tokenizer, texts: Sequence[str], prefix: str = "", max_length: int = 256
) -> tuple[list[list[int]], list[int]]:
    """Returns the token ids as `tokenize` does, and each text's number of tokens before truncation."""
    texts = [prefix + text for text in texts]
    if not tokenizer.is_fast:  # written in Python: it does not say how much it cuts
        lengths = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
        return tokenizer(texts, truncation=True, max_length=max_length)["input_ids"], lengths
    unread = {"return_attention_mask": False, "return_token_type_ids": False}
    encodings = tokenizer(texts, truncation=True, max_length=max_length, **unread).encodings
    special = tokenizer.num_special_tokens_to_add()
    lengths = [len(e) + sum(len(rest) - special for rest in e.overflowing) for e in encodings]
    return [e.ids for e in encodings], lengths


def prompt_length(tokenizer, profile: EncoderProfile, side: str) -> int:
    """Counts the tokens before each text of a side ("query" or "code") that are left out of the pooling.

    It is 0 if `profile.include_prompt`. It counts as sentence-transformers does, so that embeddings are equal: the
    tokens of the prompt alone, without a special token at their end. If the prompt ends with a space, many tokenizers
    join that space to the text's first word, which is then left out too.
    """
    prefix = getattr(profile, f"{side}_prefix")
    if profile.include_prompt or not prefix:
        return 0
    ids = tokenizer(prefix)["input_ids"]
    return len(ids) - (ids[-1] in tokenizer.all_special_ids) if ids else 0


# ---- Token ids to padded batches ----


class TokenRows(Protocol):
    """Token ids (or features with data flow) by row, and `lengths`, int64[rows], each row's number of tokens."""

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Sequence[int] | dict: ...


def token_count(item: Sequence[int] | dict) -> int:
    """Counts the tokens of one row, its data-flow nodes included."""
    return len(item["input_ids"] if isinstance(item, dict) else item)


def pad(items: Sequence[Sequence[int] | dict], pad_token_id: int, prompt_length: int = 0) -> dict[str, Tensor]:
    """Pads rows on the right to the longest of the batch.

    Args:
        prompt_length: how many tokens at the start of every row are left out of the pooling.

    Returns:
        `input_ids` and `attention_mask`, both LongTensor[B, L]; with a prompt length also `pooling_mask`, which is 0
        on the prompt too. For rows with data flow, see `pad_graph_features`.
    """
    if isinstance(items[0], dict):
        return pad_graph_features(items, pad_token_id)
    lengths = np.fromiter(map(len, items), dtype=np.int64, count=len(items))
    input_ids = np.full((len(items), lengths.max(initial=1)), pad_token_id, dtype=np.int64)
    for row, ids in enumerate(items):
        input_ids[row, : len(ids)] = ids
    places = np.arange(input_ids.shape[1])
    mask = places < lengths[:, None]
    masks = {"attention_mask": mask} | ({"pooling_mask": mask & (places >= prompt_length)} if prompt_length else {})
    masks = {name: torch.from_numpy(values.astype(np.int64)) for name, values in masks.items()}
    return {"input_ids": torch.from_numpy(input_ids), **masks}


# ---- Batches to embeddings ----


def encode(model: nn.Module, profile: EncoderProfile, inputs: Mapping[str, Tensor]) -> Tensor:
    """Computes the embeddings Tensor[B, d] of one padded batch, in float32 or higher whatever the model's precision.

    Args:
        inputs: the output of `pad`. `pooling_mask` is not passed to the model.
    """
    if "node_mask" in inputs:
        return _encode_graphs(model, profile, inputs)
    inputs = dict(inputs)
    pooling_mask = inputs.pop("pooling_mask", inputs["attention_mask"])
    outputs = model(**inputs)
    # The last token is part of the prompt only if there is no other token.
    return pool(profile, outputs, inputs["attention_mask"] if profile.pooling == "last_token" else pooling_mask)


def _encode_graphs(model: nn.Module, profile: EncoderProfile, inputs: Mapping[str, Tensor]) -> Tensor:
    """Encodes codes with data flow: gives a plain RoBERTa the nodes' vectors and a mask of which token sees which."""
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    outputs = model(
        inputs_embeds=graph_embeddings(plain.get_input_embeddings(), inputs),
        attention_mask=inputs["attention_mask"][:, None],
        position_ids=inputs["position_ids"],
    )
    # The first token sees every token of the row, so its line of the mask is 0 on padding only.
    return pool(profile, outputs, inputs["attention_mask"][:, 0])


@torch.no_grad()
def embed(
    model: nn.Module,
    profile: EncoderProfile,
    token_ids: Sequence,
    pad_token_id: int,
    batch_size: int = 64,
    progress: str | None = None,
    prompt_length: int = 0,
) -> Tensor:
    """Computes the embeddings Tensor[n, d] of any number of texts, in eval mode and in the order given.

    They are in float32 or higher and on the model's device. The longest texts are encoded first, so that batches have
    little padding and a lack of memory shows in the first batch.

    Args:
        token_ids: the token ids of each text, or its features with data flow.
        progress: the label of a progress bar; None shows no bar.
        prompt_length: how many tokens at the start of each text are left out of the pooling (see `prompt_length`).
    """
    weights = next(model.parameters())
    order = sorted(range(len(token_ids)), key=lambda row: -token_count(token_ids[row]))
    was_training = model.training
    model.eval()
    dtype = torch.promote_types(weights.dtype, torch.float32)
    embeddings = torch.empty(len(order), model.config.hidden_size, device=weights.device, dtype=dtype)
    with Progress(progress, len(order), "text") as bar:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            inputs = pad([token_ids[row] for row in rows], pad_token_id, prompt_length)
            inputs = {name: tensor.to(weights.device) for name, tensor in inputs.items()}
            embeddings[rows] = encode(model, profile, inputs).to(dtype)
            bar.update(len(rows))
    model.train(was_training)
    return embeddings


def embed_sharded(
    model: nn.Module,
    profile: EncoderProfile,
    tokens: TokenRows,
    pad_token_id: int,
    batch_size: int = 64,
    progress: str | None = None,
    prompt_length: int = 0,
) -> Tensor:
    """Like `embed`, but each process encodes its shard, and every process gets the whole Tensor[n, d]."""
    rank, processes = distributed.rank_and_world_size()
    # Rows are dealt out by length, so that every process has about as many tokens to encode.
    order = np.argsort(-tokens.lengths, kind="stable")
    own = order[rank::processes]
    # A collective inside a forward pass waits for every process, so all of them encode equally many texts.
    spare = order[-1:] if len(own) < -(-len(order) // processes) else order[:0]
    local = [tokens[int(row)] for row in (*own, *spare)]
    embeddings = embed(model, profile, local, pad_token_id, batch_size, progress, prompt_length)
    gathered = distributed.gather(embeddings[: len(own)])
    embeddings = torch.empty_like(gathered)
    rows = np.concatenate([order[process::processes] for process in range(processes)])
    embeddings[torch.from_numpy(rows).to(gathered.device)] = gathered
    return embeddings
