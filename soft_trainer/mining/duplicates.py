"""Finds exact and near duplicates in little memory. The first of its kind is kept.

Two codes are near duplicates if the sets of their three-token sequences have a Jaccard similarity of at least 0.8, as
MinHash estimates it with 128 permutations and a fixed seed. Locality-sensitive hashing finds the pairs to compare: two
codes with an equal band (13 successive values of the signature). The signatures may stay on disk. A code takes 0.3 kB
at the peak; in the index of datasketch it takes 3.2 kB (10,000 codes of 60 tokens).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
import xxhash
from datasketch import MinHash

SIMILARITY = 0.8
PERMUTATIONS = 128
# at 0.8 these give as many false positives as false negatives
BANDS = 9
BAND = 13
SHINGLE = 3
# 32-bit values of 32-bit hashes. Copies of this object share its permutations.
_MINHASH = MinHash(num_perm=PERMUTATIONS, scheme="affine32", hashfunc=xxhash.xxh32_intdigest)
_FACTORS = np.random.default_rng(0).integers(0, 2**64, (BANDS, BAND), np.uint64) | np.uint64(1)


def hash_tokens(tokens: Sequence[str]) -> int:
    """Returns a 64-bit hash of the tokens."""
    return xxhash.xxh3_64_intdigest("\0".join(tokens).encode())


def minhash(tokens: Sequence[str]) -> np.ndarray:
    """Returns the MinHash signature of a code's tokens, uint32[128]: of all its sequences of three tokens."""
    starts = range(max(1, len(tokens) - SHINGLE + 1))
    signature = _MINHASH.copy()
    signature.update_batch({" ".join(tokens[start : start + SHINGLE]).encode() for start in starts})
    return signature.hashvalues


def exact_duplicates(fingerprints: Iterable[int]) -> np.ndarray:
    """Returns True where an earlier fingerprint is the same, bool[n]."""
    return pd.Series(np.fromiter(fingerprints, np.uint64)).duplicated().to_numpy()


def near_duplicates(rows: Sequence[int], signature: Callable[[int], np.ndarray]) -> np.ndarray:
    """Returns True for near duplicates of an earlier code that was kept, bool[n].

    Args:
        rows: the numbers of the codes, in order.
        signature: a function from a number to the result of `minhash`. It is called at least twice for each code that
            may have a duplicate, so it may read a column on disk.
    """
    keys = np.empty((len(rows), BANDS), np.uint64)  # a hash of every band of every signature
    for index, row in enumerate(rows):
        bands = signature(row)[: BANDS * BAND].reshape(BANDS, BAND)
        keys[index] = (bands * _FACTORS).sum(axis=1)
    shared = np.zeros(len(keys), dtype=bool)  # with another row, in any band
    for column in keys.T:
        shared |= pd.Series(column).duplicated(keep=False).to_numpy()
    near = np.zeros(len(keys), dtype=bool)
    kept: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in np.flatnonzero(shared):
        own = signature(rows[index])
        buckets = [kept[key] for key in enumerate(keys[index].tolist())]
        near[index] = any(np.mean(own == signature(other)) >= SIMILARITY for other in set().union(*buckets))
        if not near[index]:
            for bucket in buckets:
                bucket.append(rows[index])
    return near
