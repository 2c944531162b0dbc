"""
Counter-based randomness: every number is a hash of what it is for, (seed, purpose, step, sequence,
position).

So what a step sees does not depend on ranks, micro-batches or history, a run resumes by arithmetic,
and two runs that differ in one flag see the same rows, depths and initial states. The hash is
SplitMix64's (Steele et al. 2014). Without torch, which a process that packs need not load.
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


# What a key is for: streams of different purposes never coincide.
FOR_INIT = 1
FOR_DEPTH = 2
FOR_STATE = 3
FOR_EVAL = 4
FOR_SAMPLE = 6


def hash_key(*parts: int) -> int:
    """A signed 64-bit key made from integers, e.g. (seed, purpose, step, sequence)."""
    key = len(parts)
    for part in parts:
        key = mix64(key ^ mix64(part & MASK))
    return key - (1 << 64) if key >> 63 else key


def uniforms(key: int, index: np.ndarray) -> np.ndarray:
    """One float64 in (0, 1) for each index, a function of (key, index) alone."""
    z = mix64(index.astype(np.uint64) ^ mix64(key & MASK))
    u = ((z >> 11) + 0.5) * 2.0**-53
    return np.minimum(u, 1 - 2.0**-53)  # the largest would be rounded to 1
