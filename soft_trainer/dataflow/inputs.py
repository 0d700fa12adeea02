"""Builds GraphCodeBERT's input: code tokens, data-flow nodes, and an attention mask between them.

`graph_features` prepares a row once, as short lists of integers. `pad_graph_features` makes a batch and its mask. A
plain `RobertaModel` (attention implementation "sdpa", the default) is then called with

    model(
        inputs_embeds=graph_embeddings(model.get_input_embeddings(), batch),
        attention_mask=batch["attention_mask"][:, None],
        position_ids=batch["position_ids"],
    )

The mask needs four dimensions, because `transformers` treats a mask of three as a padding mask and fails. "eager"
attention adds the mask to the scores, so it needs 0 for True and the lowest number of its type for False.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from soft_trainer.dataflow.graph import extract_data_flow

# tokenizer -> text of a code token -> ids. Tokenizing takes the most time, and most tokens of a corpus are repeated.
_IDS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, list[int]]] = WeakKeyDictionary()
_MAX_IDS = 200_000


def graph_features(
    code: str, language: str, tokenizer: PreTrainedTokenizerBase, code_length: int = 256, data_flow_length: int = 64
) -> dict[str, list[int]]:
    """Returns one function as GraphCodeBERT reads it, truncated as published to `code_length + data_flow_length`.

    A function with fewer than `data_flow_length` nodes has room for more code, and vice versa. Every code token but
    the first is tokenized as if it followed a space. A node is the tokenizer's unknown token.

    Args:
        code: one function.
        language: one of `soft_trainer.dataflow.LANGUAGES`.
        tokenizer: a tokenizer of RoBERTa.
        code_length: code tokens, special tokens included.
        data_flow_length: nodes.

    Returns:
        `input_ids` and `position_ids` of `<s>`, code, `</s>` and nodes; `node_starts` and `node_ends`, the range of
        `input_ids` that identifies each node (empty if it is truncated); `edge_targets` and `edge_sources`, the
        numbers of two nodes, the first of which comes from the second.

    Raises:
        UserError: any other language.
    """
    tokens, edges = extract_data_flow(code, language)
    pieces = _pieces(tokens, tokenizer)
    length = code_length + data_flow_length
    starts = list(accumulate(map(len, pieces), initial=1))
    ids = list(chain.from_iterable(pieces))[: length - 2 - min(len(edges), data_flow_length)]
    ids = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
    positions = range(tokenizer.pad_token_id + 1, tokenizer.pad_token_id + 1 + len(ids))

    nodes = edges[: length - len(ids)]
    node_of = {edge.target: node for node, edge in enumerate(nodes)}
    node_starts = []
    node_ends = []
    edge_targets = []
    edge_sources = []
    for node, edge in enumerate(nodes):
        start = starts[edge.target]
        end = starts[edge.target + 1]
        if end >= len(ids):  # truncated
            start = end = 0
        node_starts.append(start)
        node_ends.append(end)
        for token in edge.sources:
            if token in node_of:
                edge_targets.append(node)
                edge_sources.append(node_of[token])
    return {
        "input_ids": ids + [tokenizer.unk_token_id] * len(nodes),
        "position_ids": [*positions, *([0] * len(nodes))],
        "node_starts": node_starts,
        "node_ends": node_ends,
        "edge_targets": edge_targets,
        "edge_sources": edge_sources,
    }


def pad_graph_features(features: Sequence[dict[str, list[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Returns a batch: rows of `graph_features` padded to the longest, and the graph-guided mask.

    Code tokens see each other. A node and the code tokens that identify it see each other. A node sees the nodes that
    it comes from. The first and the last code token see everything. A node that would see nothing, because its code is
    truncated, sees the whole row, as it does under the published additive mask.

    Args:
        features: B rows.
        pad_token_id: id and position of the padding.

    Returns:
        `input_ids` and `position_ids` LongTensor[B, L]; `attention_mask` BoolTensor[B, L, L], True where the row
        sees the column; `node_mask` BoolTensor[B, L], True on nodes; `node_starts` and `node_ends` LongTensor[B, L],
        the range of each node, 0 elsewhere.
    """
    lengths = _lengths(features, "input_ids")
    codes = lengths - _lengths(features, "node_starts")
    place = torch.arange(int(lengths.max()))
    valid = place < lengths[:, None]
    code = place < codes[:, None]
    node = valid & ~code
    start = _place(features, "node_starts", node)
    end = _place(features, "node_ends", node)
    mask = code[:, :, None] & code[:, None, :]
    _join_nodes_to_code(mask, node, start, end)

    batch = torch.arange(len(features)).repeat_interleave(_lengths(features, "edge_targets"))
    target = _flat(features, "edge_targets") + codes[batch]
    origin = _flat(features, "edge_sources") + codes[batch]
    mask[batch, target, origin] = True

    sees_all = ~mask.any(-1)
    sees_all.scatter_(1, torch.stack([torch.zeros_like(codes), codes - 1], 1), True)
    mask[sees_all] = valid[sees_all.nonzero(as_tuple=True)[0]]
    return {
        "input_ids": _place(features, "input_ids", valid, pad_token_id),
        "position_ids": _place(features, "position_ids", valid, pad_token_id),
        "attention_mask": mask,
        "node_mask": node,
        "node_starts": start,
        "node_ends": end,
    }


def graph_embeddings(word_embeddings: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the model's `inputs_embeds`. A node is the mean of the code tokens that identify it, 0 if truncated.

    Args:
        word_embeddings: the model's module, from ids to vectors of d numbers.
        batch: the result of `pad_graph_features`.

    Returns:
        Tensor[B, L, d].
    """
    vectors = word_embeddings(batch["input_ids"])
    place = torch.arange(vectors.shape[1], device=vectors.device)
    identified = (batch["node_starts"][:, :, None] <= place) & (place < batch["node_ends"][:, :, None])
    identified = identified.to(vectors.dtype)
    means = identified @ vectors / identified.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(batch["node_mask"][:, :, None], means, vectors)


def _join_nodes_to_code(mask: Tensor, node: Tensor, start: Tensor, end: Tensor) -> None:
    """Sets `mask`, BoolTensor[B, L, L], to True between each node and its code tokens from `start` to `end`."""
    # By index: comparing all places, as `graph_embeddings` does on the accelerator, takes 15 ms a batch instead of 6.
    batch, row = node.nonzero(as_tuple=True)
    width = (end - start)[node]
    before = width.cumsum(0) - width
    batch = batch.repeat_interleave(width)
    row = row.repeat_interleave(width)
    shift = (start[node] - before).repeat_interleave(width)
    column = torch.arange(len(shift)) + shift
    mask[batch, row, column] = mask[batch, column, row] = True


def _lengths(features: Sequence[dict[str, list[int]]], key: str) -> Tensor:
    """Returns how many numbers each row has in a column, LongTensor[B]."""
    return torch.tensor([len(row[key]) for row in features])


def _flat(features: Sequence[dict[str, list[int]]], key: str) -> Tensor:
    """Joins one column of all rows into one LongTensor."""
    return torch.from_numpy(np.concatenate([np.asarray(row[key], dtype=np.int64) for row in features]))


def _place(features: Sequence[dict[str, list[int]]], key: str, where: Tensor, fill: int = 0) -> Tensor:
    """Returns the numbers of one column where `where` is True, `fill` elsewhere, LongTensor[B, L]."""
    out = torch.full(where.shape, fill)
    out[where] = _flat(features, key)
    return out


def _pieces(tokens: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Returns the ids of each code token: the first as it is, the others as if after a space."""
    known = _IDS.setdefault(tokenizer, {})
    if len(known) > _MAX_IDS:
        known.clear()
    texts = tokens[:1] + [f"@ {token}" for token in tokens[1:]]
    new = list(set(texts) - known.keys())
    if new:
        known.update(zip(new, tokenizer(new, add_special_tokens=False, verbose=False)["input_ids"], strict=True))
    pieces = [known[text] for text in texts]
    lead = len(tokenizer("@", add_special_tokens=False)["input_ids"])
    return pieces[:1] + [piece[lead:] for piece in pieces[1:]]
