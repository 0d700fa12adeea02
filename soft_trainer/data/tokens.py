"""Token ids of a column, memory-mapped, and their padding into batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from torch import Tensor

from soft_trainer.encoders.encoding import tokenize_with_lengths
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import SetupError

SIDES = ("query", "code")
TOKENS = Features({"ids": List(Value("int32")), "length": Value("int32")})


class TokenColumn:
    """Ragged token ids by row, without a copy of the Arrow file behind them.

    Args:
        chunks: for each Arrow chunk its flat values and the offsets of its rows (one more than rows).
    """

    def __init__(self, chunks: Sequence[tuple[np.ndarray, np.ndarray]]):
        self._chunks = list(chunks)
        self._starts = np.cumsum([0, *(len(offsets) - 1 for _, offsets in self._chunks)])
        self.lengths = np.concatenate([np.diff(offsets) for _, offsets in self._chunks] or [np.zeros(0, np.int64)])

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> TokenColumn:
        """A column held in memory."""
        offsets = np.cumsum([0, *map(len, lists)])
        values = np.fromiter((token for tokens in lists for token in tokens), dtype=np.int32, count=offsets[-1])
        return cls([(values, offsets)])

    @classmethod
    def from_dataset(cls, dataset: Dataset, column: str) -> TokenColumn:
        """A column of lists of int of a data set, which must not be a view with an index mapping."""
        arrays = dataset.data.column(column).chunks
        # `values` ignores the slice that `offsets` counts in, which is what makes the two fit.
        return cls([(array.values.to_numpy(), array.offsets.to_numpy()) for array in arrays])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        values, offsets = self._chunks[chunk]
        row = row - self._starts[chunk]
        return values[offsets[row] : offsets[row + 1]]


def pad(token_ids: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, both LongTensor[B, L], padded on the right to the longest of the batch."""
    lengths = np.fromiter(map(len, token_ids), dtype=np.int64, count=len(token_ids))
    input_ids = np.full((len(token_ids), lengths.max(initial=1)), pad_token_id, dtype=np.int64)
    for row, ids in enumerate(token_ids):
        input_ids[row, : len(ids)] = ids
    mask = np.arange(input_ids.shape[1]) < lengths[:, None]
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}


def side_settings(profile: EncoderProfile, side: str) -> dict:
    """What turns one side's rows into token ids: columns, prefix and length."""
    return {name: getattr(profile, f"{side}_{name}") for name in ("columns", "prefix", "length")}


def text_column(dataset: Dataset, columns: Sequence[str], side: str) -> str:
    """The first of `columns` that the data set has.

    Raises:
        SetupError: it has none of them.
    """
    for column in columns:
        if column in dataset.column_names:
            return column
    raise SetupError(
        f"no column for the {side}: the rows have {', '.join(dataset.column_names)}; expected {' or '.join(columns)} "
        f"(--{side}_columns names others)"
    )


def texts(values: Sequence) -> list[str]:
    """Texts of a column; a list of tokens is joined by one space."""
    return [value if isinstance(value, str) else " ".join(value or ()) for value in values]


def tokenized(dataset: Dataset, side: str, profile: EncoderProfile, tokenizer) -> Dataset:
    """Token ids of one side of every row: columns `ids` (cut) and `length` (tokens before the cut).

    Runs once on all cores; a data set on disk keeps the result in the `datasets` cache under a key of rows, tokenizer
    and settings.

    Raises:
        SetupError: the side's columns are missing.
    """
    settings = side_settings(profile, side)
    column = text_column(dataset, settings["columns"], side)

    def run(batch):
        ids, lengths = tokenize_with_lengths(tokenizer, texts(batch[column]), settings["prefix"], settings["length"])
        return {"ids": ids, "length": lengths}

    # The tokenizer itself does not hash the same before and after its first use: its serialised vocabulary does.
    key = Hasher.hash([dataset._fingerprint, column, settings, _vocabulary(tokenizer)])
    rows = dataset.select_columns(column).flatten_indices() if dataset._indices is not None else dataset
    return rows.map(
        run,
        batched=True,
        remove_columns=rows.column_names,
        features=TOKENS,
        new_fingerprint=key,
        desc=f"Tokenising {side}",
    )


def _vocabulary(tokenizer) -> str:
    """The tokenizer's serialised form without the truncation and padding that its last call left behind."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend.to_str()
