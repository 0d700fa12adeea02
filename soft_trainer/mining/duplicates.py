"""Which codes are there before, exactly or nearly, in little memory: of a list only the later ones go.

Near means an estimated Jaccard similarity of at least 0.8 between the sets of three successive tokens, by MinHash with
128 permutations and a fixed seed. Candidates are found by locality-sensitive hashing: two codes are compared where one
of their bands, 13 successive values, is equal. Kept of a code are eight bytes a band; its signature may lie on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import xxhash
from datasketch import MinHash

SIMILARITY = 0.8
PERMUTATIONS = 128
BANDS, BAND = 9, 13  # what makes false positives and negatives at 0.8 equally many
SHINGLE = 3
_READ_AT_ONCE = 1000  # signatures in memory
# 32-bit values of 32-bit hashes; copies share its permutations
_MINHASH = MinHash(num_perm=PERMUTATIONS, scheme="affine32", hashfunc=xxhash.xxh32_intdigest)
_FACTORS = np.random.default_rng(0).integers(0, 2**64, (BANDS, BAND), np.uint64) | np.uint64(1)


def fingerprint(tokens: Sequence[str]) -> int:
    """64 bits that are equal for equal tokens; unequal ones share them with a chance of 1 in 2^64."""
    return xxhash.xxh3_64_intdigest("\0".join(tokens).encode())


def minhash(tokens: Sequence[str]) -> np.ndarray:
    """The MinHash signature of a code's tokens, uint32[128]."""
    signature = _MINHASH.copy()
    signature.update_batch(_shingles(tokens))
    return signature.hashvalues


def _shingles(tokens: Sequence[str]) -> set[bytes]:
    """Every three successive tokens as one string."""
    return {" ".join(tokens[i : i + SHINGLE]).encode() for i in range(max(1, len(tokens) - SHINGLE + 1))}


def exact_duplicates(fingerprints: Iterable[int]) -> np.ndarray:
    """Whether the same fingerprint came before, bool[n]."""
    fingerprints = np.fromiter(fingerprints, np.uint64)
    later = np.ones(len(fingerprints), dtype=bool)
    later[np.unique(fingerprints, return_index=True)[1]] = False
    return later


def near_duplicates(rows: Sequence[int], signature: Callable[[int], np.ndarray]) -> np.ndarray:
    """Whether a code like it came before and was no near duplicate itself, bool[n].

    Args:
        rows: numbers of the codes, the first one first.
        signature: row -> what `minhash` gave; asked twice or more, so that a column on disk will do.
    """
    keys = _band_keys(rows, signature)
    near = np.zeros(len(keys), dtype=bool)
    kept: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in np.flatnonzero(_shared(keys).any(1)).tolist():
        own = signature(rows[place])
        buckets = [kept[key] for key in enumerate(keys[place].tolist())]
        candidates = set().union(*buckets)
        near[place] = any(np.mean(own == signature(other)) >= SIMILARITY for other in candidates)
        if not near[place]:
            for bucket in buckets:
                bucket.append(rows[place])
    return near


def _band_keys(rows: Sequence[int], signature: Callable[[int], np.ndarray]) -> np.ndarray:
    """A hash of every band of every signature, uint64[n, 9]."""
    keys = np.empty((len(rows), BANDS), np.uint64)
    for start in range(0, len(rows), _READ_AT_ONCE):
        values = np.stack([signature(row)[: BANDS * BAND] for row in rows[start : start + _READ_AT_ONCE]])
        keys[start : start + len(values)] = (values.reshape(-1, BANDS, BAND).astype(np.uint64) * _FACTORS).sum(2)
    return keys


def _shared(keys: np.ndarray) -> np.ndarray:
    """Whether another row has the same key in that band, bool[n, 9]."""
    shared = np.empty(keys.shape, dtype=bool)
    for band, column in enumerate(keys.T):
        _, number, count = np.unique(column, return_inverse=True, return_counts=True)
        shared[:, band] = count[number] > 1
    return shared
