"""Reads files of ranks, to compare runs. Needs no torch, so that a comparison starts at once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from soft_trainer.errors import UserError
from soft_trainer.system.fingerprints import encoder_files_fingerprint
from soft_trainer.system.terminal import print_on_main

# Titles of the systems that rank the corpus.
LABELS = {
    "untrained": "encoder before training",
    "lexical": "BM25",
    "trained": "encoder after training",
    "combined": "encoder + BM25",
}


class RankedQueries:
    """The contents of a file that `results.save_ranks` wrote: ranks and texts of all queries.

    Args:
        path: the path of the file.
        rows: the table in the file.
    """

    def __init__(self, path: Path, rows: pa.Table):
        self.path = path
        self.rows = rows
        self.ranks: np.ndarray = rows["rank"].to_numpy()  # int64[Q], 1 is best
        self.queries: list[str] = rows["key"].to_pylist()  # fingerprints of queries with their relevant functions
        self.pool_size = int(rows.schema.metadata[b"pool_size"])  # the number of functions in the corpus
        self.corpus: bytes = rows.schema.metadata[b"corpus"]  # the fingerprint of the corpus
        self.encoder: bytes | None = rows.schema.metadata.get(b"encoder")  # the fingerprint of the encoder's files

    def check_encoder(self) -> None:
        """Checks that the encoder has not changed since it produced these ranks. A missing encoder is fine.

        If the encoder is in another folder and has changed, this prints a warning instead of raising.

        Raises:
            UserError: the encoder in the folder of the ranks has changed.
        """
        folder = os.path.normpath(self.path.parent / self.rows.schema.metadata.get(b"encoder_folder", b".").decode())
        now = encoder_files_fingerprint(folder)
        if self.encoder is None or now is None or now.encode() == self.encoder:
            return
        problem = f"{self.path}: the encoder in {folder} has changed since these ranks were computed; evaluate again"
        if folder == os.path.normpath(self.path.parent):
            raise UserError(problem)
        print_on_main(f"warning: {problem}")

    def top(self, row: int) -> list[tuple[bool, str]]:
        """Returns a query's top three functions, best first, as (is relevant, text), from the query's row number."""
        relevant = self.rows["top_relevant"][row].as_py()
        codes = self.rows["top_codes"][row].as_py()
        return list(zip(relevant, codes, strict=True))


def load_ranks(path: str | Path) -> RankedQueries:
    """Reads a file written by `results.save_ranks`. Raises UserError if it is missing or has another format."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such folder or file")
    try:
        # pyarrow reads a relative path such as `model:v1/x` as a URI, so it gets an open file. A file of
        # Python's would abort the process if a thread of pyarrow still held it when the interpreter ends.
        with pa.OSFile(os.fsencode(path)) as file:
            rows = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    columns = {"url", "rank", "query", "top_codes", "top_relevant", "key"}
    if not columns <= {*rows.column_names} or not len(rows):
        raise UserError(f"{path}: not the ranks of a run, or written by another version; evaluate the encoder again")
    return RankedQueries(path, rows)
