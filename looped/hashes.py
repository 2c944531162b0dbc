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


def permute(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """Where a keyed permutation of 0 … n-1 sends the given indices.

    A Feistel network on the next power of two (each half is altered by a hash of the other, so it
    is one-to-one), repeated until the image is below n.
    """
    bits = (n - 1).bit_length()
    low_bits = (bits + 1) // 2
    low_mask = (1 << low_bits) - 1
    high_mask = (1 << bits // 2) - 1
    keys = np.frombuffer(hashlib.blake2b(key.encode()).digest(), "<u8").reshape(-1, 2)
    image = np.array(index, np.uint64)
    again = np.arange(len(image))
    while len(again):
        high = image[again] >> low_bits
        low = image[again] & low_mask
        for key_1, key_2 in keys:
            high ^= finalise((low + key_1) * GOLDEN) & high_mask
            low ^= finalise((high + key_2) * GOLDEN) & low_mask
        image[again] = high << low_bits | low
        again = again[image[again] >= n]
    return image.astype(np.int64)
