"""Joins the texts of a batch into one row without padding ("packed"), and embeds them with one forward pass.

The model gets the tokens of all texts as one row, positions that restart in each text, and the borders between texts.
Its attention must be a function that reads the borders, so that each token attends to its own text only; see
`attention.py`. `passes.py` decides which encoders are packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from soft_trainer.encoders.pooling import POOLINGS, PackedStates
from soft_trainer.encoders.profiles import EncoderProfile

PACKED = "soft_trainer_packed"  # the name of the attention function in `transformers`


@dataclass(frozen=True)
class Passes:
    """Describes how an encoder's forward passes run. `decide_passes` in `passes.py` makes this value.

    Args:
        why_padded: why texts are padded, or None if the texts of a pass are joined without padding ("packed").
        precision: the number format of the passes, such as "bf16".
        first_position: the position of each text's first token in a packed pass; see `first_position`.
    """

    why_padded: str | None = "outside a run"
    precision: str = "float32"
    first_position: int = 0

    @property
    def packed(self) -> bool:
        """True if the texts of a pass are joined without padding."""
        return self.why_padded is None

    def __str__(self) -> str:
        if self.packed:
            return "packed"
        return f"padded ({self.why_padded})"


def token_ids(item: Sequence[int] | Mapping) -> Sequence[int]:
    """Returns the token ids of a text, including its data-flow nodes."""
    if isinstance(item, Mapping):
        return item["input_ids"]
    return item


def pack(texts: Sequence[Sequence[int]], prompt_lengths: int | np.ndarray = 0, first: int = 0) -> dict:
    """Joins n texts into one row of T tokens.

    Args:
        texts: the token ids of each text.
        prompt_lengths: the number of leading tokens that pooling skips, for all texts or for each, int64[n].
        first: the position of each text's first token; see `first_position`. RoBERTa counts no position for the
            padding token, whose id is one less, and gives it this id as its position.

    Returns:
        `input_ids` and `position_ids`, LongTensor[1, T]; `borders`, IntTensor[n + 1], where each text starts and the
        last one ends; `pooled_from`, LongTensor[n], where pooling starts in each text; and `longest`, the number of
        tokens in the longest text, which stays on the host.
    """
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    borders = np.concatenate([[0], lengths.cumsum()])
    ids = np.concatenate(texts).astype(np.int64)
    counted = ids != first - 1
    before = np.cumsum(np.append(0, counted))
    positions = (before[1:] - np.repeat(before[borders[:-1]], lengths)) * counted + first - 1
    return {
        "input_ids": torch.from_numpy(ids)[None],
        "position_ids": torch.from_numpy(positions)[None],
        "borders": torch.from_numpy(borders.astype(np.int32)),
        "pooled_from": torch.from_numpy(borders[:-1] + np.minimum(prompt_lengths, lengths)),
        "longest": int(lengths.max()),
    }


def first_position(model: nn.Module) -> int:
    """Returns the position of a text's first token: `padding_idx + 1` in RoBERTa and its relatives, otherwise 0."""
    for module in model.modules():
        if hasattr(module, "position_embeddings") and hasattr(module, "padding_idx"):
            return module.padding_idx + 1
    return 0


def encode_packed(model: nn.Module, plain: nn.Module, profile: EncoderProfile, inputs: Mapping) -> Tensor:
    """Pools the n texts that `pack` joined, without normalisation. Returns Tensor[n, d].

    Args:
        model: the encoder, perhaps wrapped by DDP.
        plain: the encoder itself.

    Raises:
        RuntimeError: the encoder's attention does not read the borders, so texts would attend to each other.
    """
    attention = str(plain.config._attn_implementation)
    if attention != PACKED and "flash" not in attention:
        raise RuntimeError(f"texts are packed, but attn_implementation={attention} does not keep them apart")
    borders = inputs["borders"]
    longest = inputs["longest"]
    mask = None
    if attention == PACKED:
        # Our attention ignores the mask. A mask with four dimensions is passed on as it is, whereas without a mask,
        # decoders look for borders among the positions, and the host would wait for the result.
        mask = inputs["input_ids"].new_zeros(1, 1, 1, 1)
    outputs = model(
        input_ids=inputs["input_ids"],
        position_ids=inputs["position_ids"],
        attention_mask=mask,
        cu_seq_lens_q=borders,
        cu_seq_lens_k=borders,
        max_length_q=longest,
        max_length_k=longest,
    )
    states = PackedStates(outputs.last_hidden_state.squeeze(0), borders, inputs["pooled_from"])
    return POOLINGS[profile.pooling].packed(plain, states)
