"""
Counter-based randomness: every number is a hash of what it is for, (seed, purpose, step, sequence,
position).

So what a step sees does not depend on ranks, micro-batches or history, a run resumes by arithmetic,
and two runs that differ in one flag see the same rows, depths and initial states. The hash is
SplitMix64's (Steele et al. 2014).
"""

import hashlib
import math

import numpy as np
import torch

# Purposes: streams of different purposes never coincide.
SEED_INIT = 1
SEED_DEPTH = 2
SEED_STATE = 3
SEED_EVAL = 4
SEED_SAMPLE = 6

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB


def mix64(z: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit numbers whose output bits look random."""
    z = (z + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * FACTOR_1) & MASK
    z = ((z ^ (z >> 27)) * FACTOR_2) & MASK
    return z ^ (z >> 31)


def mix64_array(z: np.ndarray) -> np.ndarray:
    """mix64 of every element of a uint64 array."""
    return finalise(z + np.uint64(GOLDEN))


def finalise(z: np.ndarray) -> np.ndarray:
    """The shifts and products of mix64, on a uint64 array."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FACTOR_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(FACTOR_2)
    return z ^ (z >> np.uint64(31))


def sequence_key(*parts: int) -> int:
    """A signed 64-bit key made from integers, e.g. (seed, purpose, step, sequence)."""
    key = len(parts)
    for part in parts:
        key = mix64(key ^ mix64(part & MASK))
    return key - (1 << 64) if key >> 63 else key


def uniforms(key: int, index: np.ndarray) -> np.ndarray:
    """One float64 in (0, 1) for each index, a function of (key, index) alone."""
    mixed = np.uint64(mix64(key & MASK))
    z = mix64_array(index.astype(np.uint64) ^ mixed)
    high = (z >> np.uint64(11)).astype(np.float64)
    return (high + 0.5) * 2.0**-53


def hashed_normal(
    key: torch.Tensor, tokens: int, width: int, std: float, cut: float = 3.0, positions=None
) -> torch.Tensor:
    """Truncated normal of standard deviation `std` before the cut at ±cut·std, by inverse CDF.

    key (B,) int64 -> (B, tokens, width) float32; a value depends on (key, position, channel) only.
    positions (B, tokens) int64: the tokens' positions, if they are not 0, 1, …
    Made on the CPU for Apple's GPUs, which do not multiply 64-bit integers.
    """
    if key.device.type == "mps":
        if positions is not None:
            positions = positions.cpu()
        return hashed_normal(key.cpu(), tokens, width, std, cut, positions).to(key.device)
    index = torch.arange(tokens * width, device=key.device, dtype=torch.int64)
    if positions is not None:
        index = (positions[..., None] * width + index[:width]).flatten(1)
    # key + index · GOLDEN modulo 2^64. As a signed number GOLDEN is -c, and c + ~index · c is index
    # · -c: of the plain product Inductor makes one of 32-bit integers, which Triton refuses.
    c = (1 << 64) - GOLDEN
    z = key[:, None] + c + ~index * c
    z = (z ^ logical_shift(z, 30)) * signed(FACTOR_1)
    z = (z ^ logical_shift(z, 27)) * signed(FACTOR_2)
    low = (z ^ (z >> 31)) & 0xFFFFFF
    u = (low.to(torch.float32) + 0.5) * (2.0**-23) - 1.0  # (-1, 1)
    root = math.sqrt(2)
    inside = u * math.erf(cut / root)
    x = torch.erfinv(inside) * (std * root)
    return x.view(key.shape[0], tokens, width)


def signed(factor: int) -> int:
    """A factor of at least 2^63 as the signed 64-bit number of the same bits."""
    return factor - (1 << 64)


def logical_shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z >> bits with zeros coming in from the left, as of unsigned numbers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def round_function(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A keyed hash of every element of a uint64 array, for `permute`."""
    return finalise((x + key) * np.uint64(GOLDEN))


def permute(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """Where a keyed permutation of 0 … n-1 sends the given indices.

    A Feistel network on the next power of two (each half is altered by a function of the other, so
    it is one-to-one), repeated until the image is below n.
    """
    bits = (n - 1).bit_length()
    shift = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << (bits + 1) // 2) - 1)
    high_mask = np.uint64((1 << bits // 2) - 1)
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
