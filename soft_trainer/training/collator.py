"""Collates the queries and functions of a batch into the model inputs of one or more forward passes.

A packed batch is one pass. A padded batch has passes of queries and passes of functions, each padded to one length.
Gradient caching divides both kinds into more passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from soft_trainer.data.tokens import SIDES
from soft_trainer.encoders.encoding import Collator, token_count
from soft_trainer.encoders.packing import Passes

# On a CPU, a side that was padded in a single pass would have 1.8 to 2.6 times the tokens of its texts. Four passes of
# similar length have 1.2 to 1.3 times as many (Ruby, up to 160 and 256 tokens, batches of 32 and 128).
PIECES = 4


@dataclass
class Inputs:
    """The model inputs of B queries and C functions.

    Args:
        passes: the inputs of each forward pass, made by `pack` or `pad`. Together, the passes give embeddings,
            Tensor[n, d], in their order.
        queries: LongTensor[B], the index of each query among the embeddings.
        codes: LongTensor[C], the index of each function. Other embeddings are not used.
    """

    passes: list[dict]
    queries: Tensor
    codes: Tensor


@dataclass
class PairCollator:
    """Makes the model inputs of a batch.

    Args:
        collate: makes the inputs of one pass.
        limits: the maximum number of tokens, keyed by "query" and "code".
        prompt_lengths: the number of leading tokens that pooling skips, keyed by "query" and "code".
        largest: the maximum number of texts in a pass, for gradient caching, or None.
        pieces: the minimum number of padded passes for the queries, and for the functions.
    """

    collate: Collator
    limits: Mapping[str, int]
    prompt_lengths: Mapping[str, int]
    largest: int | None = None
    pieces: int = 1

    def count(self, texts: int) -> int:
        """Returns the number of passes for the queries or the functions of a batch."""
        passes = min(self.pieces, texts)
        if self.largest is not None:
            passes = max(passes, -(-texts // self.largest))
        return max(passes, 1)

    def __call__(
        self,
        texts: Mapping[str, Sequence],
        spare: Mapping[str, object],
        counts: Mapping[str, int],
    ) -> Inputs:
        """Collates a batch.

        Args:
            texts: the tokens of each text, keyed by "query" and "code".
            spare: a text for a pass that has none, keyed in the same way. Its embedding is not used.
            counts: the number of passes for each side, if each has its own.
        """
        if self.collate.packs and self.largest is None:
            return self._joined(texts, spare)
        inputs = []
        positions = []
        done = 0
        for side in SIDES:
            items = texts[side]
            found = np.empty(len(items), dtype=np.int64)
            for rows in divide([token_count(item) for item in items], counts[side]):
                found[rows] = np.arange(done, done + len(rows))
                done += max(len(rows), 1)
                of_pass = [items[row] for row in rows] or [spare[side]]
                inputs.append(self.collate(of_pass, self.prompt_lengths[side], self.limits[side], side))
            positions.append(torch.from_numpy(found))
        return Inputs(inputs, *positions)

    def _joined(self, texts: Mapping[str, Sequence], spare: Mapping[str, object]) -> Inputs:
        """Collates a batch into one pass, queries first."""
        sizes = [len(texts[side]) for side in SIDES]
        items = [*texts["query"], *texts["code"]] or [spare["query"]]
        prompts = np.repeat([self.prompt_lengths[side] for side in SIDES], sizes if any(sizes) else (1, 0))
        inputs = self.collate(items, prompts, max(self.limits.values()))
        return Inputs([inputs], *torch.arange(sum(sizes)).split(sizes))


def pieces_of(passes: Passes, device: torch.device, model) -> int:
    """Returns the minimum number of passes into which the queries, and the functions, of a batch are divided.

    On a GPU, each pass costs thousands of kernel launches. A static encoder's gradient has a row for each token of the
    vocabulary, and every pass would compute all of them.
    """
    if passes.packed or device.type != "cpu" or hasattr(model, "weigh"):
        return 1
    return PIECES


def divide(lengths: Sequence[int], number: int) -> list[np.ndarray]:
    """Divides texts into passes of equal size, the longest texts first, so that little is padded.

    Args:
        lengths: the number of tokens in each text.
        number: the number of passes. If there are fewer texts, some passes are empty.

    Returns:
        The indices of the texts in each pass, in the order given if there is only one pass.
    """
    if number == 1:
        return [np.arange(len(lengths))]
    return np.array_split(np.argsort(-np.array(lengths, dtype=np.int64), kind="stable"), number)
