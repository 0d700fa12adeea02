"""Token ids of a column, memory-mapped, and their padding into batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher

from soft_trainer.dataflow.inputs import graph_features
from soft_trainer.encoders.encoding import tokenize_with_lengths
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.errors import UserError

SIDES = ("query", "code")
TOKENS = Features({"ids": List(Value("int32")), "length": Value("int32")})
GRAPHS = Features(
    {
        name: List(Value("int32"))
        for name in ("input_ids", "position_ids", "node_starts", "node_ends", "edge_targets", "edge_sources")
    }
)
PARSED_AT_ONCE = 500  # functions that a process parses at a time
READ_AT_ONCE = 1000  # rows of a column that are in memory as text


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


class GraphColumn:
    """Codes with the nodes of their data flow, by row: what `dataflow.graph_features` gives for each."""

    def __init__(self, columns: dict[str, TokenColumn]):
        self._columns = columns
        self.lengths = columns["input_ids"].lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: column[row] for name, column in self._columns.items()}


def side_settings(profile: EncoderProfile, side: str) -> dict:
    """What turns one side's rows into token ids: columns, prefix and length."""
    return {name: getattr(profile, f"{side}_{name}") for name in ("columns", "prefix", "length")}


def text_column(dataset: Dataset, columns: Sequence[str], side: str) -> str:
    """The first of `columns` that the data set has.

    Raises:
        UserError: it has none of them.
    """
    for column in columns:
        if column in dataset.column_names:
            return column
    raise UserError(
        f"no column for the {side}: the rows have {', '.join(dataset.column_names)}; expected {' or '.join(columns)} "
        f"(--{side}_columns names others)"
    )


def texts(values: Sequence) -> list[str]:
    """Texts of a column; a list of tokens is joined by one space."""
    return [value if isinstance(value, str) else " ".join(value or ()) for value in values]


def column_texts(dataset: Dataset, column: str) -> Iterator[str]:
    """The texts of a column, one after the other, without the whole of it in memory."""
    for batch in dataset.select_columns(column).iter(READ_AT_ONCE):
        yield from texts(batch[column])


def column_of(dataset: Dataset, side: str, profile: EncoderProfile, tokenizer) -> TokenColumn | GraphColumn:
    """What the encoder reads of one side of every row; prepared once, then taken from the `datasets` cache.

    Raises:
        UserError: the side's columns are missing.
    """
    if side == "code" and profile.data_flow_length:
        graphs = _with_data_flow(dataset, profile, tokenizer)
        return GraphColumn({name: TokenColumn.from_dataset(graphs, name) for name in GRAPHS})
    return TokenColumn.from_dataset(tokenized(dataset, side, profile, tokenizer), "ids")


def _with_data_flow(dataset: Dataset, profile: EncoderProfile, tokenizer) -> Dataset:
    """The codes of every row as token ids, positions, nodes and edges, extracted on all cores."""
    column = text_column(dataset, profile.code_columns, "code")
    lengths = profile.code_length, profile.data_flow_length

    def run(batch):
        rows = zip(texts(batch[column]), batch["language"], strict=True)
        features = [graph_features(code, language, tokenizer, *lengths) for code, language in rows]
        return {name: [row[name] for row in features] for name in GRAPHS}

    key = Hasher.hash([dataset._fingerprint, column, lengths, _vocabulary(tokenizer), "data flow"])
    rows = dataset.select_columns([column, "language"])
    return _as_table(rows).map(
        run,
        batched=True,
        batch_size=PARSED_AT_ONCE,
        num_proc=processes_for(len(rows)),
        remove_columns=rows.column_names,
        features=GRAPHS,
        new_fingerprint=key,
        desc="Extracting data flow",
    )


def processes_for(rows: int) -> int | None:
    """Processes of `datasets.map` for so many rows to parse: one a CPU core, as far as there is work, or None."""
    return min(os.cpu_count() or 1, rows // PARSED_AT_ONCE) or None


def _as_table(dataset: Dataset) -> Dataset:
    """The rows without an index mapping, so that what is made of them has none either."""
    return dataset.flatten_indices() if dataset._indices is not None else dataset


def tokenized(dataset: Dataset, side: str, profile: EncoderProfile, tokenizer) -> Dataset:
    """Token ids of one side of every row: columns `ids` (cut) and `length` (tokens before the cut).

    Runs once on all cores; a data set on disk keeps the result in the `datasets` cache under a key of rows, tokenizer
    and settings.

    Raises:
        UserError: the side's columns are missing.
    """
    settings = side_settings(profile, side)
    column = text_column(dataset, settings["columns"], side)

    def run(batch):
        ids, lengths = tokenize_with_lengths(tokenizer, texts(batch[column]), settings["prefix"], settings["length"])
        return {"ids": ids, "length": lengths}

    # The tokenizer itself does not hash the same before and after its first use: its serialised vocabulary does.
    key = Hasher.hash([dataset._fingerprint, column, settings, _vocabulary(tokenizer)])
    rows = _as_table(dataset.select_columns(column))
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
