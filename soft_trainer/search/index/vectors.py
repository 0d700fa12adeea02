"""Stores embeddings as float16 with the digests of their texts.

A chunk finds its embedding by the digest of its text, so the embeddings of texts that are gone, as after a change of
branch, are used again when the texts come back. If most embeddings are unused, the others are deleted.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice

import numpy as np

from soft_trainer.encoders.text_encoder import TextEncoder
from soft_trainer.search.index.store import Segments, get_meta, set_meta, transaction
from soft_trainer.system.terminal import progress_bar

# If the process is killed, the work since the last transaction is lost, which is a few seconds of work.
FIRST_TEXTS = 16
COMMIT_TEXTS = 512
COMMIT_SECONDS = 5.0
SPARE_ROWS = 16  # unused rows that a file may have in any case
ROWS_AT_ONCE = 1 << 14  # rows to convert to float64 at once, so that they stay in a processor's cache


def embedded_text(path: str, name: str, lines: list[bytes]) -> bytes:
    """Returns the text to embed for a chunk with these lines.

    The text starts with the path and the name, because a method means little without its class.
    """
    title = f"{path} {name}" if name else path
    return b"\n".join([title.encode(), *lines])


def digest(embedded: bytes) -> int:
    """Returns a text's digest, from -2^63 to 2^63 - 1."""
    return int.from_bytes(blake2b(embedded, digest_size=8).digest(), "little", signed=True)


def embed_chunks(database: sqlite3.Connection, encoder: TextEncoder, progress: bool, seconds: float) -> None:
    """Encodes every text that has no embedding yet, for about so many seconds. The next call continues.

    Call `start_encoding` first. Other processes and threads may change the index at the same time, but only one
    process or thread may encode.
    """
    state = get_meta(database, "vectors")
    pending = _pending(database)
    size = min(FIRST_TEXTS, COMMIT_TEXTS)
    deadline = time.perf_counter() + seconds
    with progress_bar("Encoding" if progress else None, unencoded(database), "chunk") as bar:
        while group := list(islice(pending, size)):
            started = time.perf_counter()
            digests, texts, languages = zip(*group, strict=True)
            rows = (state["scale"] * encoder.encode(texts, "chunk", languages)).astype("<f2")
            with transaction(database):
                _insert(database, np.array(digests, "<i8"), rows)
            ended = time.perf_counter()
            rate = len(group) / max(ended - started, 1e-3)
            bar.update(len(group))
            if ended > deadline:
                break
            size = min(max(1, round(min(COMMIT_SECONDS, deadline - ended) * rate)), COMMIT_TEXTS)
    _compact(database)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _insert(database: sqlite3.Connection, digests: np.ndarray, rows: np.ndarray) -> None:
    database.execute("INSERT INTO vectors (digests, rows) VALUES (?, ?)", (digests.tobytes(), rows.tobytes()))


def _digests(database: sqlite3.Connection) -> np.ndarray:
    """Returns the digest of each row's text, int64[rows]."""
    rows = database.execute("SELECT digests FROM vectors ORDER BY id")
    return np.frombuffer(b"".join(blob for (blob,) in rows), "<i8")


def read_vectors(database: sqlite3.Connection) -> np.ndarray:
    """Returns the embeddings, float16[rows, d]."""
    rows = database.execute("SELECT rows FROM vectors ORDER BY id")
    dimension = get_meta(database, "vectors")["dimension"]
    return np.frombuffer(b"".join(blob for (blob,) in rows), "<f2").reshape(-1, dimension)


def rows_of(database: sqlite3.Connection, digests: np.ndarray) -> np.ndarray:
    """Returns the row of each text's embedding, int64[n], or -1 for a text without one."""
    known = _digests(database)
    if not len(known):
        return np.full(len(digests), -1)
    order = np.argsort(known)
    ranks = np.searchsorted(known, digests, sorter=order)
    rows = order[np.minimum(ranks, len(known) - 1)]
    return np.where(known[rows] == digests, rows, -1)


def unencoded(database: sqlite3.Connection) -> int:
    """Counts the chunks without an embedding."""
    return int((rows_of(database, Segments(database).digests) < 0).sum())


def start_encoding(database: sqlite3.Connection, name: str, truncate_dim: int | None, encoder: TextEncoder) -> None:
    """Records which encoder computes the embeddings, and deletes embeddings that came from a different encoder.

    Args:
        name: the folder or Hub name of the encoder.
        truncate_dim: the number of leading dimensions to keep, or None for the encoder's default.
    """
    state = get_meta(database, "vectors", {})
    kept = {"model": name, "truncate_dim": truncate_dim, "fingerprint": encoder.fingerprint}
    if {key: state.get(key) for key in kept} == kept:
        state["runtime"] = encoder.runtime
        with transaction(database):
            set_meta(database, "vectors", state)
        return
    example = encoder.encode(["def example(): pass"], "chunk", ["python"])
    # A power of two scales embeddings to about length one, because half precision ends at 65,504.
    length = float(np.linalg.norm(example))
    scale = 1.0
    if 0 < length < math.inf:
        scale = 2.0 ** -round(math.log2(length))
    kept |= {"runtime": encoder.runtime, "dimension": example.shape[1], "scale": scale}
    with transaction(database):
        database.execute("DELETE FROM vectors")
        set_meta(database, "vectors", kept)


def _embedded_texts(path: str, spans: str, text: bytes) -> Iterator[bytes]:
    """Yields the text to embed for each chunk of a file, given the file's row in the index."""
    lines = zlib.decompress(text).split(b"\n")
    for start, end, name in json.loads(spans):
        yield embedded_text(path, name, lines[start - 1 : end])


def _pending(database: sqlite3.Connection) -> Iterator[tuple[int, str, str]]:
    """Yields (digest, text, language) for each text without an embedding."""
    query = "SELECT path, chunks, text, language FROM files JOIN contents ON file = id WHERE path = ?"
    known = set(_digests(database).tolist())
    before = -1
    while len(known) > before:  # files may change in the meantime
        before = len(known)
        segments = Segments(database)
        waiting = segments.owners[rows_of(database, segments.digests) < 0]
        paths = segments.paths
        for number in dict.fromkeys(waiting.tolist()):
            for *row, language in database.execute(query, (paths[number],)):
                for text in _embedded_texts(*row):
                    key = digest(text)
                    if key not in known:
                        known.add(key)
                        yield key, text.decode(errors="replace"), language


def _compact(database: sqlite3.Connection) -> None:
    """Deletes the embeddings of texts that are gone, if they are most of the embeddings."""
    digests = _digests(database)
    wanted = Segments(database).digests
    if len(digests) <= 2 * len(wanted) + SPARE_ROWS:
        return
    used = np.flatnonzero(np.isin(digests, wanted))
    rows = read_vectors(database)[used]
    with transaction(database):
        database.execute("DELETE FROM vectors")
        for start in range(0, len(used), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            _insert(database, digests[used[some]], rows[some])
    database.executescript("PRAGMA incremental_vacuum")


def similarities(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Computes the dot product of every row with a query's normalised embedding, float32[rows].

    NumPy sums in float64, which is twice as fast as float32 here, so that a product does not depend on the row's
    position in the file.
    """
    query = query.astype(np.float64) / max(float(np.linalg.norm(query)), 1e-9)
    scores = np.zeros(len(vectors), np.float32)
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        scores[rows] = vectors[rows].astype(np.float64) @ query
    return scores
