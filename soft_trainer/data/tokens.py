"""Tokenises all queries and functions once, and keeps the token ids in memory-mapped files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value

from soft_trainer.data.array_cache import cached_dataset, no_bar_for_few
from soft_trainer.data.columns import arrow_texts, check_language_column, row_texts, text_column, text_ids
from soft_trainer.dataflow.inputs import graph_features
from soft_trainer.encoders.encoding import tokenize_with_lengths
from soft_trainer.encoders.profiles import EncoderProfile
from soft_trainer.system.fingerprints import fingerprint, rows_fingerprint, tokenizer_fingerprint

SIDES = ("query", "code")
TOKENS = Features({"ids": List(Value("int32")), "length": Value("int32"), "text": Value("uint64")})
GRAPHS = Features(
    {
        name: List(Value("int32"))
        for name in ("input_ids", "position_ids", "node_starts", "node_ends", "edge_targets", "edge_sources")
    }
)
PARSED_AT_ONCE = 500  # functions
TOKENIZED_BY_PROCESS = 20_000  # the rows that make another process worthwhile; `tokenizers` uses threads as well


class TokenColumn:
    """The token ids of all rows, one array per row, read from a data set without copying.

    Sending a column to another process is cheap. If the data set is on disk, the pickle contains only the file's path.

    Args:
        dataset: rows without an index mapping.
        column: the name of a column with lists of integers.
    """

    def __init__(self, dataset: Dataset, column: str):
        self._origin = (dataset, column)
        self._lists = dataset.data.column(column)
        self.lengths = pc.list_value_length(self._lists).to_numpy()

    def __reduce__(self):
        return TokenColumn, self._origin

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self._lists[int(row)].values.to_numpy()

    def fingerprint(self) -> str:
        """Hashes the token ids of all rows."""
        dataset, column = self._origin
        return rows_fingerprint(dataset, [column])


class GraphColumn:
    """The token ids and data-flow graphs of all functions. A row has the format of `dataflow.graph_features`."""

    def __init__(self, columns: dict[str, TokenColumn]):
        self._columns = columns
        self.lengths = columns["input_ids"].lengths

    def __reduce__(self):
        return GraphColumn, (self._columns,)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {name: column[row] for name, column in self._columns.items()}

    def fingerprint(self) -> str:
        """Hashes the token ids and graphs of all rows."""
        return fingerprint({name: column.fingerprint() for name, column in self._columns.items()})


def encoder_texts(dataset: Dataset, side: str, profile: EncoderProfile) -> Iterator[str]:
    """Yields the text of each row that the encoder reads as "query" or as "code" (`side`).

    Raises:
        UserError: the rows lack the columns.
    """
    return row_texts(dataset, text_column(dataset, getattr(profile, f"{side}_columns"), side))


def token_column(dataset: Dataset, side: str, profile: EncoderProfile, tokenizer) -> TokenColumn | GraphColumn:
    """Tokenises all queries or all functions, and caches the result.

    Args:
        side: "query" or "code".

    Returns:
        A `GraphColumn` for functions if the encoder reads data flow, otherwise a `TokenColumn`.

    Raises:
        UserError: the rows lack the text columns, or lack `language` although the encoder reads data flow.
    """
    if side == "code" and profile.data_flow_length:
        graphs = _with_data_flow(dataset, profile, tokenizer)
        return GraphColumn({name: TokenColumn(graphs, name) for name in GRAPHS})
    return TokenColumn(tokenized(dataset, side, profile, tokenizer), "ids")


def _with_data_flow(dataset: Dataset, profile: EncoderProfile, tokenizer) -> Dataset:
    """Parses all functions on all CPU cores. Returns rows with token ids, positions, and data-flow nodes and edges."""
    check_language_column(dataset, "rows")
    column = text_column(dataset, profile.code_columns, "code")
    lengths = profile.code_length, profile.data_flow_length

    def run(table: pa.Table) -> pa.Table:
        """Extracts the data flow of each function in an Arrow table."""
        rows = zip(arrow_texts(table[column]), table["language"].to_pylist(), strict=True)
        features = [graph_features(code, language, tokenizer, *lengths) for code, language in rows]
        return pa.Table.from_pylist(features, schema=GRAPHS.arrow_schema)

    made_from = [column, lengths, tokenizer_fingerprint(tokenizer)]
    parallel = {"batch_size": PARSED_AT_ONCE, "num_proc": processes_for(len(dataset), PARSED_AT_ONCE)}
    return mapped(dataset, [column, "language"], run, GRAPHS, made_from, desc="Extracting data flow", **parallel)


def processes_for(rows: int, least: int) -> int | None:
    """Returns `num_proc` for `Dataset.map`: at most one process per core, each with at least `least` rows.

    The result is None if no process should be started.
    """
    processes = min(os.cpu_count() or 1, rows // least)
    if processes > 1:
        return processes
    return None


def mapped(dataset: Dataset, columns: list[str], run, features: Features, made_from: list, **options) -> Dataset:
    """Applies `run` to batches of some columns, as Arrow tables. If the data set is on disk, the result is cached.

    Args:
        columns: the columns that `run` reads.
        features: the columns of the result.
        made_from: everything else that the result depends on, such as settings.
        options: arguments for `Dataset.map`.
    """
    made = fingerprint(rows_fingerprint(dataset, columns), str(features), made_from)

    def build(_) -> Dataset:
        # The format selects the columns, because datasets 5.2 cannot send the result of `select_columns` to another
        # process if tables were concatenated side by side ("Added column's length must match table's length").
        rows = dataset.with_format("arrow", columns=columns)
        kept = {"new_fingerprint": made, "load_from_cache_file": False}
        return rows.map(run, batched=True, remove_columns=dataset.column_names, features=features, **kept, **options)

    return cached_dataset(made, build).with_format(None)


def tokenized(dataset: Dataset, side: str, profile: EncoderProfile, tokenizer) -> Dataset:
    """Tokenises all queries or all functions (`side`). If the data set is on disk, the result is cached.

    Returns:
        The columns `ids` (truncated), `length` (in tokens before truncation) and `text` (see `text_ids`).

    Raises:
        UserError: the rows lack the text columns.
    """
    settings = {name: getattr(profile, f"{side}_{name}") for name in ("columns", "prefix", "length")}
    column = text_column(dataset, settings["columns"], side)
    prefix = settings["prefix"]
    longest = settings["length"]

    def run(table: pa.Table) -> pa.Table:
        """Tokenises each text in an Arrow table."""
        texts = arrow_texts(table[column])
        ids, lengths = tokenize_with_lengths(tokenizer, texts, prefix, longest)
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        values = np.fromiter(chain.from_iterable(ids), np.int32, offsets[-1])
        # Made from nested lists, the Arrow array would take much longer, because Arrow checks every number.
        columns = [pa.ListArray.from_arrays(offsets, values), pa.array(lengths, pa.int32()), pa.array(text_ids(texts))]
        return pa.Table.from_arrays(columns, schema=TOKENS.arrow_schema)

    made_from = [column, settings, tokenizer_fingerprint(tokenizer)]
    processes = processes_for(len(dataset), TOKENIZED_BY_PROCESS)
    with no_bar_for_few(dataset):
        return mapped(dataset, [column], run, TOKENS, made_from, desc=f"Tokenising {side}", num_proc=processes)
