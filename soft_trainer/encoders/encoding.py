"""Texts to token ids, token vectors to embeddings, embeddings to scores: for training, evaluation and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soft_trainer.dataflow.inputs import graph_embeddings
from soft_trainer.encoders.profiles import EncoderProfile


def tokenize(tokenizer, texts: Sequence[str], prefix: str = "", max_length: int = 256) -> list[list[int]]:
    """Token ids of `prefix + text` with the tokenizer's special tokens, cut to `max_length`, not padded."""
    return tokenize_with_lengths(tokenizer, texts, prefix, max_length)[0]


def tokenize_with_lengths(
    tokenizer, texts: Sequence[str], prefix: str = "", max_length: int = 256
) -> tuple[list[list[int]], list[int]]:
    """`tokenize`, and how many tokens each text has before the cut."""
    encodings = tokenizer([prefix + text for text in texts], truncation=True, max_length=max_length).encodings
    special = tokenizer.num_special_tokens_to_add()
    lengths = [len(e) + sum(len(rest) - special for rest in e.overflowing) for e in encodings]
    return [e.ids for e in encodings], lengths


def pool(profile: EncoderProfile, outputs, attention_mask: Tensor) -> Tensor:
    """One embedding a text, Tensor[B, d] in float32 or higher, from a model's outputs.

    Args:
        outputs: what the model returned, `last_hidden_state` Tensor[B, L, d] and, for "pooler", `pooler_output`.
        attention_mask: Tensor[B, L], 1 on the tokens to average.
    """
    if profile.pooling == "pooler":
        embeddings = _widened(outputs.pooler_output)
    elif profile.pooling == "cls":
        embeddings = _widened(outputs.last_hidden_state[:, 0])
    else:
        states = _widened(outputs.last_hidden_state)
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        embeddings = (states * mask).sum(1) / mask.sum(1)
    return F.normalize(embeddings, dim=-1) if profile.normalize else embeddings


def encode(model: nn.Module, profile: EncoderProfile, inputs: Mapping[str, Tensor]) -> Tensor:
    """Embeddings Tensor[B, d] of one padded batch, in float32 or higher whatever precision the model runs in."""
    if "node_mask" in inputs:
        return _encode_graphs(model, profile, inputs)
    return pool(profile, model(**inputs), inputs["attention_mask"])


def _encode_graphs(model: nn.Module, profile: EncoderProfile, inputs: Mapping[str, Tensor]) -> Tensor:
    """Embeddings of codes with data flow: a plain RoBERTa, given the vectors of nodes and who sees whom."""
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    outputs = model(
        inputs_embeds=graph_embeddings(plain.get_input_embeddings(), inputs),
        attention_mask=inputs["attention_mask"][:, None],
        position_ids=inputs["position_ids"],
    )
    # The first token sees the whole row: its line of the mask says what is not padding.
    return pool(profile, outputs, inputs["attention_mask"][:, 0])


def score(profile: EncoderProfile, queries: Tensor, codes: Tensor) -> Tensor:
    """Scores Tensor[B, N] of queries Tensor[B, d] against codes Tensor[N, d]: dot or cosine, times the scale."""
    queries, codes = comparable(profile, queries), comparable(profile, codes)
    with torch.autocast(queries.device.type, enabled=False):
        return queries @ codes.T * profile.score_scale


def comparable(profile: EncoderProfile, embeddings: Tensor) -> Tensor:
    """Embeddings whose dot products are the profile's scores, before the scale; in float32 or higher."""
    embeddings = _widened(embeddings)
    return F.normalize(embeddings, dim=-1) if profile.score_function == "cosine" else embeddings


def _widened(tensor: Tensor) -> Tensor:
    """In float32, float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
