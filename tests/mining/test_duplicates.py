import numpy as np
from datasketch import LeanMinHash, MinHashLSH

from soft_trainer.mining import duplicates
from soft_trainer.mining.duplicates import exact_duplicates, hash_tokens, minhash, near_duplicates

WORDS = [f"w{number}" for number in range(60)]


def test_exact_duplicates_are_all_but_the_first():
    codes = [WORDS, [*WORDS[:59], "other"], list(WORDS), ["w0w1", *WORDS[2:]], [], list(WORDS)]
    assert exact_duplicates(map(hash_tokens, codes)).tolist() == [False, False, True, False, False, True]
    assert exact_duplicates([]).tolist() == []


def test_near_duplicates_are_all_but_the_first():
    near, far = [*WORDS[:59], "other"], [*WORDS[:30], *(f"v{number}" for number in range(30))]
    signatures = [minhash(tokens) for tokens in (WORDS, near, far, WORDS[:1], [], far)]
    assert all(values.shape == (128,) and values.dtype == np.uint32 for values in signatures)
    found = near_duplicates(range(6), signatures.__getitem__)
    assert found.tolist() == [False, True, False, False, False, True]
    assert near_duplicates([5, 1], signatures.__getitem__).tolist() == [False, False]
    assert near_duplicates([], signatures.__getitem__).tolist() == []


def test_the_same_as_datasketch():
    """An index of datasketch finds the same duplicates. Each code is compared only with the codes that are kept."""
    rng, codes = np.random.default_rng(0), []
    for _ in range(40):
        code = rng.integers(0, 50, 80)
        for changes in rng.integers(0, 4, 5):
            changed = code.copy()
            changed[rng.integers(0, 80, changes)] = rng.integers(0, 50, changes)
            codes.append([f"w{number}" for number in changed])
    signatures = [minhash(tokens) for tokens in codes]
    index, expected = MinHashLSH(threshold=0.8, num_perm=128), []
    assert (index.b, index.r) == (duplicates.BANDS, duplicates.BAND)
    hashes = [LeanMinHash(seed=1, hashvalues=values, scheme="affine32") for values in signatures]
    for row, own in enumerate(hashes):
        expected.append(any(hashes[other].jaccard(own) >= 0.8 for other in index.query(own)))
        if not expected[-1]:
            index.insert(row, own)
    assert 40 < sum(expected) < 160
    assert near_duplicates(range(len(codes)), signatures.__getitem__).tolist() == expected
