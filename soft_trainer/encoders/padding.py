"""Token ids of several texts as one padded batch of model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from soft_trainer.dataflow.inputs import pad_graph_features


class TokenRows(Protocol):
    """Token ids (or features with data flow) by row, and `lengths`, int64[rows], the tokens of each row."""

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Sequence[int] | dict: ...


def token_count(item: Sequence[int] | dict) -> int:
    """Tokens of one row, nodes of its data flow included."""
    return len(item["input_ids"] if isinstance(item, dict) else item)


def pad(items: Sequence[Sequence[int] | dict], pad_token_id: int) -> dict[str, Tensor]:
    """Model inputs of rows of a column, padded on the right to the longest of the batch.

    `input_ids` and `attention_mask`, both LongTensor[B, L]; for rows with data flow those of `pad_graph_features`.
    """
    if isinstance(items[0], dict):
        return pad_graph_features(items, pad_token_id)
    return _pad_ids(items, pad_token_id)


def _pad_ids(token_ids: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    lengths = np.fromiter(map(len, token_ids), dtype=np.int64, count=len(token_ids))
    input_ids = np.full((len(token_ids), lengths.max(initial=1)), pad_token_id, dtype=np.int64)
    for row, ids in enumerate(token_ids):
        input_ids[row, : len(ids)] = ids
    mask = np.arange(input_ids.shape[1]) < lengths[:, None]
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
