"""
SplitMix64's hash (Steele et al. 2014) of whole numbers, and the permutation of rows made of it.

Without torch, which a process that packs need not load.
"""

import hashlib

import numpy as np

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB


def finalise(z):
    """The shifts and products of mix64."""
    z = ((z ^ (z >> 30)) * FACTOR_1) & MASK
    z = ((z ^ (z >> 27)) * FACTOR_2) & MASK
    return z ^ (z >> 31)


def mix64(z):
    """SplitMix64's finaliser, of a number or a uint64 array: a bijection of 64-bit numbers whose
    output bits look random.
    """
    return finalise((z + GOLDEN) & MASK)


def round_function(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A keyed hash of every element of a uint64 array, for `permute`."""
    return finalise((x + key) * GOLDEN)


def permute(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """Where a keyed permutation of 0 … n-1 sends the given indices.

    A Feistel network on the next power of two (each half is altered by a function of the other, so
    it is one-to-one), repeated until the image is below n.
    """
    bits = (n - 1).bit_length()
    shift = (bits + 1) // 2
    low_mask = (1 << shift) - 1
    high_mask = (1 << bits // 2) - 1
    keys = np.frombuffer(hashlib.blake2b(key.encode()).digest(), "<u8")  # 8 rounds
    out = np.array(index, np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        high = out[walking] >> shift
        low = out[walking] & low_mask
        for k1, k2 in keys.reshape(-1, 2):
            high ^= round_function(low, k1) & high_mask
            low ^= round_function(high, k2) & low_mask
        out[walking] = high << shift | low
        walking = walking[out[walking] >= n]
    return out.astype(np.int64)
