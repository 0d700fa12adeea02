"""Stores embeddings as rows of an append-only float16 file. SQLite records how many rows are valid.

A row is written before the transaction that refers to the row, and never changes afterwards. A killed process may
leave rows that are never read, but no reader ever sees part of a row. Rows that no chunk uses are dropped the next
time the file is rewritten under a new name.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import sys
import time
import zlib
from hashlib import blake2b
from pathlib import Path

import numpy as np

from soft_trainer.encoders.onnx import has_onnxruntime, lighter
from soft_trainer.encoders.text_encoder import TextEncoder
from soft_trainer.errors import UserError
from soft_trainer.search.index.store import get_meta, set_meta, transaction
from soft_trainer.terminal import LINE_SECONDS, Progress, duration, print_on_main

# If the process is killed, the work since the last transaction is lost, which is a few seconds of work.
FIRST_TEXTS = 32
COMMIT_TEXTS = 512
COMMIT_SECONDS = 5.0
SLOW_RATE = 20.0  # chunks per second, until the rate has been measured
MAX_DEAD_SHARE = 0.05
SAMPLE = 64  # the number of chunks on which `lightest` compares weights
_DIGEST = 8
ROWS_AT_ONCE = 1 << 14  # rows to convert to float32 at once, so that they stay in a processor's cache


def embedded_text(path: str, name: str, text: str) -> str:
    """Returns the text to embed for a chunk.

    The text starts with the path and the name, because a method means little without its class.
    """
    if name:
        return f"{path} {name}\n{text}"
    return f"{path}\n{text}"


def embed_chunks(database: sqlite3.Connection, index_dir: Path, encoder: TextEncoder, progress: bool) -> None:
    """Encodes every chunk that has no embedding yet. After an interruption, the next call continues.

    Call `start_encoding` first. Other processes and threads may change the index at the same time, but only one
    process or thread may encode.
    """
    state = get_meta(database, "vectors")
    # The rows of all encoded texts, keyed by digest, including texts from files that have changed or disappeared.
    slots: dict[bytes, int] = {}
    for digests, rows in database.execute("SELECT digests, slots FROM vectors"):
        for place, row in enumerate(np.frombuffer(rows, "<i4").tolist()):
            slots[digests[_DIGEST * place : _DIGEST * (place + 1)]] = row
    size = FIRST_TEXTS
    total = unencoded(database)
    with Progress("Encoding" if progress else None, total, "chunk") as bar:
        while group := _pending(database, min(size, COMMIT_TEXTS)):
            started = time.perf_counter()
            count = _commit(database, index_dir, encoder, state, slots, group)
            if count:
                state["rate"] = count / max(time.perf_counter() - started, 1e-3)
                size = max(FIRST_TEXTS, round(COMMIT_SECONDS * state["rate"]))
            first = bar.done == 0
            bar.update(sum(len(chunks) for _, _, chunks in group))
            left = (total - bar.done) / state.get("rate", SLOW_RATE)
            if progress and first and left > LINE_SECONDS:
                faster = ""
                if encoder.runtime == "torch" and not has_onnxruntime():
                    faster = ", or a third of that with the extra: pip install -c constraints.txt -e '.[onnx]'"
                print_on_main(f"encoding {total:,} chunks takes about {duration(left)}{faster}")
    with transaction(database):
        database.execute("DELETE FROM vectors WHERE file NOT IN (SELECT id FROM files)")
        state = _compacted(database, index_dir, state)
        set_meta(database, "vectors", state)
    for path in index_dir.glob("vectors-*.f16"):  # a reader keeps its file until the end
        if path != vector_file(index_dir, state["number"]):
            path.unlink(missing_ok=True)


_WITHOUT_VECTORS = "WHERE id NOT IN (SELECT file FROM vectors)"


def unencoded(database: sqlite3.Connection) -> int:
    """Counts the chunks without an embedding."""
    return database.execute(f"SELECT coalesce(sum(count), 0) FROM files {_WITHOUT_VECTORS}").fetchone()[0]


def lightest(database: sqlite3.Connection, encoder: TextEncoder) -> TextEncoder:
    """Returns the int8 version of an ONNX encoder if its embeddings are close to float32, otherwise the encoder."""
    texts = _sample(database)
    if encoder.runtime != "onnx" or not texts:
        return encoder
    chosen, cosine = lighter(encoder, texts)
    weights = "int8" if chosen.runtime == "int8" else "float32"
    print_on_main(f"weights: {weights} (mean cosine of int8 with float32: {cosine:.3f} on {len(texts)} chunks)")
    return chosen


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
    example = encoder.encode(["def example(): pass"], "code", ["python"])
    # A power of two scales embeddings to about length one, because half precision ends at 65,504.
    length = float(np.linalg.norm(example))
    scale = 1.0
    if 0 < length < math.inf:
        scale = 2.0 ** -round(math.log2(length))
    number = state.get("number", 0) + 1
    kept |= {"runtime": encoder.runtime, "dimension": example.shape[1], "scale": scale, "rows": 0, "number": number}
    with transaction(database):
        database.execute("DELETE FROM vectors")
        set_meta(database, "vectors", kept)


def _sample(database: sqlite3.Connection) -> list[str]:
    """Returns the texts of up to `SAMPLE` chunks from all over the index."""
    (files,) = database.execute("SELECT count(*) FROM files").fetchone()
    step = max(1, files // SAMPLE)
    texts = []
    for path, places, blob in database.execute("SELECT path, chunks, text FROM files JOIN contents ON file = id"):
        step -= 1
        if step:
            continue
        step = max(1, files // SAMPLE)
        lines = zlib.decompress(blob).decode(errors="replace").split("\n")
        for start, end, name in json.loads(places)[: 1 + SAMPLE // max(files, 1)]:
            texts.append(embedded_text(path, name, "\n".join(lines[start - 1 : end])))
    return texts[:SAMPLE]


def vector_file(index_dir: Path, number: int) -> Path:
    """Returns the path of an embedding file. Each rewrite uses the next number."""
    return index_dir / f"vectors-{number:06d}.f16"


def _pending(database: sqlite3.Connection, count: int) -> list[tuple[str, bytes, list[tuple[bytes, str, str]]]]:
    """Returns the next files without embeddings, with about `count` chunks in total.

    Returns:
        For each file, the path, a digest of the content, and (digest, text, language) for each chunk.
    """
    query = f"SELECT path, digest, language, chunks, text FROM files JOIN contents ON file = id {_WITHOUT_VECTORS}"
    group = []
    for path, content, language, places, blob in database.execute(f"{query} ORDER BY id"):
        lines = zlib.decompress(blob).decode(errors="replace").split("\n")
        chunks = []
        for start, end, name in json.loads(places):
            text = embedded_text(path, name, "\n".join(lines[start - 1 : end]))
            digest = blake2b(text.encode(errors="replace"), digest_size=_DIGEST).digest()
            chunks.append((digest, text, language))
        group.append((path, content, chunks))
        count -= len(chunks)
        if count <= 0:
            break
    return group


def _commit(
    database: sqlite3.Connection, index_dir: Path, encoder: TextEncoder, state: dict, slots: dict, group: list
) -> int:
    """Encodes a group of files' new chunks and records them in one transaction. Returns the number of new chunks."""
    new = {}
    for _, _, chunks in group:
        for digest, text, language in chunks:
            if digest not in slots:
                new[digest] = (text, language)
    if new:
        texts, languages = zip(*new.values(), strict=True)
        vectors = (state["scale"] * encoder.encode(texts, "code", languages)).astype("<f2")
        slots |= {digest: state["rows"] + place for place, digest in enumerate(new)}
        _append(vector_file(index_dir, state["number"]), state["rows"], vectors)
        state["rows"] += len(vectors)
    rows = []
    for path, content, own in group:
        digests = [digest for digest, _, _ in own]
        numbers = np.array([slots[digest] for digest in digests], "<i4")
        rows.append((b"".join(digests), numbers.tobytes(), path, content))
    with transaction(database):
        # If a file has changed or disappeared in the meantime, the index no longer has this digest.
        query = "INSERT OR REPLACE INTO vectors SELECT id, ?, ? FROM files WHERE path = ? AND digest = ?"
        database.executemany(query, rows)
        set_meta(database, "vectors", state)
    return len(new)


def _append(path: Path, row: int, vectors: np.ndarray) -> None:
    """Writes rows to a file, starting at `row`. Overwrites any rows that a killed process left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.seek(row * vectors.shape[1] * 2)
        file.write(vectors.tobytes())
        file.flush()
        os.fsync(file.fileno())


def _compacted(database: sqlite3.Connection, index_dir: Path, state: dict) -> dict:
    """Copies the embeddings in use to a new file if enough of the old file is unused. Returns the new state."""
    rows = database.execute("SELECT file, slots FROM vectors ORDER BY file").fetchall()
    used = np.unique(np.frombuffer(b"".join(slots for _, slots in rows), "<i4"))
    if len(used) >= state["rows"] * (1 - MAX_DEAD_SHARE) - 16:
        return state
    old = open_vectors(index_dir, state)
    state = state | {"number": state["number"] + 1, "rows": len(used)}
    path = vector_file(index_dir, state["number"])
    path.unlink(missing_ok=True)
    for start in range(0, len(used), 65_536):
        _append(path, start, np.asarray(old[used[start : start + 65_536]]))
    for file, slots in rows:
        moved = np.searchsorted(used, np.frombuffer(slots, "<i4")).astype("<i4")
        database.execute("UPDATE vectors SET slots = ? WHERE file = ?", (moved.tobytes(), file))
    return state


def open_vectors(index_dir: Path, state: dict) -> np.ndarray:
    """Returns the memory-mapped embeddings, float16[rows, d]. Raises UserError if the file is too short."""
    path = vector_file(index_dir, state["number"])
    shape = (state["rows"], state["dimension"])
    if not state["rows"]:
        return np.zeros(shape, np.float16)
    try:
        return np.memmap(path, "<f2", "c", shape=shape)
    except (OSError, ValueError) as error:
        why = f"incomplete embeddings ({error})"
        raise UserError(f"{path}: {why}; delete {index_dir} and index again") from error


def similarities(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Computes the dot product of every row with a query's normalised embedding, float32[rows].

    If torch is already loaded, torch multiplies in float16, which NumPy cannot do and which is five times as fast. To
    order near ties correctly, the best thousand products are computed again. NumPy sums in float64, which is as fast
    as float32 here, so that a product does not depend on the row's position in the file.
    """
    query = query.astype(np.float64) / max(float(np.linalg.norm(query)), 1e-9)
    torch = sys.modules.get("torch")
    if torch is None:
        scores = np.zeros(len(vectors), np.float32)
        for start in range(0, len(vectors), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            scores[rows] = vectors[rows].astype(np.float64) @ query
        return scores
    half = torch.from_numpy(vectors) @ torch.from_numpy(query).to(torch.float16)[:, None]
    scores = half[:, 0].float().numpy()
    if len(scores) > 1000:
        best = np.argpartition(-scores, 1000)[:1000]
    else:
        best = np.arange(len(scores))
    scores[best] = vectors[best].astype(np.float64) @ query
    return scores
