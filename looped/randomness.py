"""
Counter-based randomness: every number is a hash of what it is for, (seed, purpose, step, sequence,
position).

So what a step sees does not depend on ranks, micro-batches or history, a run resumes by arithmetic,
and two runs that differ in one flag see the same rows, depths and initial states. The hash:
looped/hashes.py.
"""

import math

import numpy as np
import torch

from looped.hashes import FACTOR_1, FACTOR_2, GOLDEN, MASK, mix64

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


def hash_keys(*parts: int, each, device=None) -> torch.Tensor:
    """The keys (parts …, number) of several sequences, one for each number: (B,) int64."""
    keys = [hash_key(*parts, int(number)) for number in each]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def uniforms(key: int, index: np.ndarray) -> np.ndarray:
    """One float64 in (0, 1) for each index, a function of (key, index) alone."""
    z = mix64(index.astype(np.uint64) ^ mix64(key & MASK))
    u = ((z >> 11) + 0.5) * 2.0**-53
    return np.minimum(u, 1 - 2.0**-53)  # the largest would be rounded to 1


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
    # key + index · GOLDEN modulo 2^64. As a signed number GOLDEN is -c; and ~index is -index - 1, so
    # that c + ~index · c is -index · c, which is index · GOLDEN. The plain product would not do:
    # Inductor makes it one of 32-bit integers, which Triton refuses.
    c = (1 << 64) - GOLDEN
    z = key[:, None] + c + ~index * c
    z = (z ^ logical_shift(z, 30)) * signed(FACTOR_1)
    z = (z ^ logical_shift(z, 27)) * signed(FACTOR_2)
    low = (z ^ (z >> 31)) & 0xFFFFFF
    u = (low.to(torch.float32) + 0.5) * (2.0**-23) - 1.0  # (-1, 1]
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
