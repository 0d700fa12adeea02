"""Builds GraphCodeBERT's input: code tokens, data-flow nodes, and an attention mask between them.

`graph_features` prepares a row once, as short lists of integers. `pad_graph_features` makes a batch and a mask. Call a
plain `RobertaModel` (attention implementation "sdpa", the default) with the batch like this:

    model(
        inputs_embeds=graph_embeddings(model.get_input_embeddings(), batch),
        attention_mask=batch["attention_mask"][:, None],
        position_ids=batch["position_ids"],
    )

The mask needs four dimensions, because `transformers` treats a three-dimensional mask as a padding mask and fails.
"eager" attention adds the mask to the scores, so replace True with 0, and False with the lowest number of the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from soft_trainer.dataflow.graph import extract_data_flow


def graph_features(
    code: str, language: str, tokenizer: PreTrainedTokenizerBase, code_length: int = 256, data_flow_length: int = 64
) -> dict[str, list[int]]:
    """Converts a function to GraphCodeBERT's input, truncated to `code_length + data_flow_length` as in the paper.

    If a function has fewer than `data_flow_length` nodes, code tokens use the remaining positions, and vice versa. All
    code tokens except the first are tokenized as if they followed a space. Each node is the tokenizer's unknown token.

    Args:
        code: the source code of the function.
        language: one of `soft_trainer.dataflow.DATA_FLOW_LANGUAGES`.
        tokenizer: a RoBERTa tokenizer.
        code_length: the number of code tokens, including special tokens.
        data_flow_length: the number of nodes.

    Returns:
        A dictionary of lists:
        - `input_ids` and `position_ids` for `<s>`, the code, `</s>` and the nodes;
        - `node_starts` and `node_ends`: the range of `input_ids` that each node stands for, empty if truncated;
        - `edge_targets` and `edge_sources`: the two nodes of each edge. The target's value comes from the source.

    Raises:
        UserError: data flow is not available for this language.
    """
    tokens, edges = extract_data_flow(code, language)
    lead = len(_ids("@", tokenizer))
    pieces = [_ids(f"@ {token}", tokenizer)[lead:] for token in tokens]
    if tokens:
        pieces[0] = _ids(tokens[0], tokenizer)
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


def pad_graph_features(
    features: Sequence[dict[str, list[int]]], pad_token_id: int, width: int = 1
) -> dict[str, Tensor]:
    """Pads rows of `graph_features` to the longest row, at least to `width`, and adds the graph-guided mask.

    Code tokens attend to each other. A node and its code tokens attend to each other. A node attends to the nodes that
    its value comes from. The first and last code tokens attend to everything. A node whose code is truncated would
    attend to nothing, so it attends to the whole row, as with the published additive mask.

    Args:
        features: B rows.
        pad_token_id: the id and the position of the padding.

    Returns:
        A dictionary of tensors:
        - `input_ids` and `position_ids`, LongTensor[B, L];
        - `attention_mask`, BoolTensor[B, L, L]: True where the row attends to the column;
        - `node_mask`, BoolTensor[B, L]: True on nodes;
        - `node_starts` and `node_ends`, LongTensor[B, L]: each node's range of code tokens, and 0 elsewhere.
    """
    longest = max(width, *(len(row["input_ids"]) for row in features))
    shape = (len(features), longest)
    batch = {
        "input_ids": np.full(shape, pad_token_id),
        "position_ids": np.full(shape, pad_token_id),
        "attention_mask": np.zeros((*shape, longest), bool),
        "node_mask": np.zeros(shape, bool),
        "node_starts": np.zeros(shape, int),
        "node_ends": np.zeros(shape, int),
    }
    for number, row in enumerate(features):
        length = len(row["input_ids"])
        codes = length - len(row["node_starts"])
        for name in ("input_ids", "position_ids"):
            batch[name][number, :length] = row[name]
        for name in ("node_starts", "node_ends"):
            batch[name][number, codes:length] = row[name]
        batch["node_mask"][number, codes:length] = True
        _fill_mask(batch["attention_mask"][number, :, :length], codes, row)
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def _fill_mask(mask: np.ndarray, codes: int, row: dict[str, list[int]]) -> None:
    """Fills one row's mask with True where a token or node attends to another.

    Args:
        mask: bool[L, N], all False. It has a row for each of L positions, including padding, and a column for each of
            the N tokens and nodes.
        codes: the number of code tokens. The nodes come after the code tokens.
        row: the result of `graph_features`.
    """
    mask[:codes, :codes] = True
    for node, (start, end) in enumerate(zip(row["node_starts"], row["node_ends"], strict=True), codes):
        mask[node, start:end] = True
        mask[start:end, node] = True
    targets = np.asarray(row["edge_targets"], int)
    sources = np.asarray(row["edge_sources"], int)
    mask[codes + targets, codes + sources] = True
    mask[[0, codes - 1]] = True
    mask[~mask.any(axis=1)] = True  # Padding is included, because a softmax over no entries is NaN.


def graph_embeddings(word_embeddings: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the model's `inputs_embeds`. A node's vector is the mean of its code tokens' vectors.

    If these tokens are truncated, the vector is 0.

    Args:
        word_embeddings: the model's embedding layer, which maps ids to vectors of size d.
        batch: the result of `pad_graph_features`.

    Returns:
        Tensor[B, L, d].
    """
    vectors = word_embeddings(batch["input_ids"])
    token = torch.arange(vectors.shape[1], device=vectors.device)
    identified = (batch["node_starts"][:, :, None] <= token) & (token < batch["node_ends"][:, :, None])
    identified = identified.to(vectors.dtype)
    means = identified @ vectors / identified.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(batch["node_mask"][:, :, None], means, vectors)


# Tokenizing takes the most time, and most tokens of a corpus are repeated.
@lru_cache(200_000)
def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns a text's ids, without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
