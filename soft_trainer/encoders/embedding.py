"""Embeddings of many texts: longest first, shared out over the processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from soft_trainer import distributed
from soft_trainer.encoders.encoding import encode
from soft_trainer.encoders.padding import TokenRows, pad, token_count
from soft_trainer.encoders.profiles import EncoderProfile


@torch.no_grad()
def embed(
    model: nn.Module,
    profile: EncoderProfile,
    token_ids: Sequence,
    pad_token_id: int,
    batch_size: int = 64,
    progress: str | None = None,
) -> Tensor:
    """Embeddings Tensor[n, d] of any number of texts, in float32 or higher on the model's device, in eval mode.

    Texts are encoded longest first, so that a batch has little padding and memory runs out at once or never, and are
    put back in order.

    Args:
        token_ids: the token ids of each text, or its features with data flow.
        progress: the label of a progress bar, None for no bar.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(token_ids)), key=lambda row: -token_count(token_ids[row]))
    was_training = model.training
    model.eval()
    kind = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    embeddings = torch.empty(len(order), model.config.hidden_size, device=device, dtype=kind)
    with tqdm(total=len(order), desc=progress, disable=progress is None, leave=False, unit="text") as bar:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            inputs = pad([token_ids[row] for row in rows], pad_token_id)
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            embeddings[rows] = encode(model, profile, inputs).to(embeddings.dtype)
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
) -> Tensor:
    """`embed` with each process encoding its share; every process gets all embeddings, Tensor[n, d]."""
    rank, processes = distributed.rank_and_world_size()
    # Dealt out by length, every process has as many tokens to encode as the others.
    order = np.argsort(-tokens.lengths, kind="stable")
    rows = order[rank::processes]
    # A collective inside a forward pass waits for all processes, so all encode as many texts: some one text too many.
    added = order[-1:] if len(rows) < -(-len(order) // processes) else order[:0]
    local = [tokens[int(row)] for row in (*rows, *added)]
    label = progress if rank == 0 else None
    joined = distributed.gather(embed(model, profile, local, pad_token_id, batch_size, label)[: len(rows)])
    embeddings = torch.empty_like(joined)
    dealt = np.concatenate([order[process::processes] for process in range(processes)])
    embeddings[torch.from_numpy(dealt).to(joined.device)] = joined
    return embeddings
