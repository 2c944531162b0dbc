"""Operations on tensors that know nothing of the model, and parameters that know how they begin."""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

from looped.randomness import FACTOR_1, FACTOR_2, GOLDEN, hash_key

EPS = 1e-5  # of every RMSNorm

# -------------------------------------------------------------------------------------------------
# Parameters


def parameter(shape, init: Callable, muon: bool = False, lr: float = 1.0) -> nn.Parameter:
    """A parameter that says how it begins and learns.

    init(shape, generator) -> its initial value, which Model.init_weights sets; muon: whether Muon
    trains it, if Muon is used; lr: a multiple of its optimiser's learning rate.
    """
    p = nn.Parameter(torch.empty(shape))
    p.init = init
    p.muon = muon
    p.lr = lr
    return p


def zeros(shape, generator) -> torch.Tensor:
    return torch.zeros(shape)


def ones(shape, generator) -> torch.Tensor:
    return torch.ones(shape)


def identity(shape, generator) -> torch.Tensor:
    return torch.eye(shape[0])


def standard_normal(shape, generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def uniform_by_width(shape, generator) -> torch.Tensor:
    """U(±1 / sqrt(inputs)), as torch's Linear begins."""
    uniform = torch.rand(shape, generator=generator) * 2 - 1
    return uniform / math.sqrt(shape[1])


def constant(value) -> Callable:
    """The initial value is this number, or tensor."""
    value = torch.as_tensor(value, dtype=torch.float32)

    def draw(shape, generator) -> torch.Tensor:
        return value.expand(shape)

    return draw


def orthogonal(std: float) -> Callable:
    """A (semi-)orthogonal matrix whose entries have this standard deviation."""

    def draw(shape, generator) -> torch.Tensor:
        rows, cols = shape
        tall = torch.randn(max(shape), min(shape), generator=generator)
        q, r = torch.linalg.qr(tall)
        q = q * r.diagonal().sign()  # makes the draw uniform over orthogonal matrices
        q = q if rows >= cols else q.T
        return q * (std * math.sqrt(max(shape)))

    return draw


# -------------------------------------------------------------------------------------------------
# Attention


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, split halves. x (B, T, H, D/H), cos and sin (T, 1, D/2H)."""
    x1, x2 = x.chunk(2, dim=-1)
    y1 = x1 * cos - x2 * sin
    y2 = x1 * sin + x2 * cos
    return torch.cat([y1, y2], dim=-1)


def preceding(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D/H) -> the same shape: for each token its predecessor's entry, 0 for the first."""
    later = F.pad(x, (0, 0, 1, 0))
    return later[:, :, :-1]


def shift_values(k, v):
    """Keys and values (B, H, T, D/H) -> the same keys; the second half of the values' channels is
    the preceding token's. So a token that attends to itself reads two tokens.
    """
    own, _ = v.chunk(2, dim=-1)
    _, before = preceding(v).chunk(2, dim=-1)
    return k, torch.cat([own, before], dim=-1)


def shift_keys(k, v):
    """Keys and values (B, H, T, D/H) -> the same values; the half of the keys' channels that rotates
    more slowly is the preceding token's. So one layer can find what followed an earlier
    occurrence of the query's token, which otherwise takes two layers.
    """
    # `rope` pairs channel c with c + D/2H, and turns the first pairs fastest
    fast, _, fast_partner, _ = k.chunk(4, dim=-1)
    before = preceding(k)
    _, slow, _, slow_partner = before.chunk(4, dim=-1)
    k = torch.cat([fast, slow, fast_partner, slow_partner], dim=-1)
    return k, v


def attends_by_products(device: str, dtype: torch.dtype, tokens: int) -> bool:
    """Whether attention is two matrix products: for short bfloat16 rows on a CPU they take half the
    time of torch's kernel.
    """
    return device == "cpu" and dtype == torch.bfloat16 and tokens <= 512


def attend(q, k, v, mask: torch.Tensor | None = None):
    """Attention of q (B, H, T, ·) to k and v (B, H, S, ·). mask (T, S): whether each query sees each
    key; None: T = S, and a token sees itself and those before it.
    """
    tokens = q.size(2)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if not attends_by_products(q.device.type, q.dtype, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # scores are rounded to bfloat16, as every other activation is
    later = torch.full((tokens, tokens), -math.inf, dtype=q.dtype)
    later = later.triu(1)
    scale = q.size(3) ** -0.5
    shape = q.shape
    q = q.flatten(0, 1)  # (B H, T, D/H)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    scores = torch.baddbmm(later, q, k.mT, alpha=scale)  # (B H, T, T)
    y = scores.softmax(-1) @ v
    return y.view(shape)


# -------------------------------------------------------------------------------------------------
# Norms, and random numbers by key


def spectral_norm(x: torch.Tensor) -> float:
    """Largest singular value; NaN if an entry is not finite, which the library would refuse."""
    if not x.isfinite().all():
        return math.nan
    return torch.linalg.matrix_norm(x.float(), 2).item()


def hash_keys(*parts: int, each, device=None) -> torch.Tensor:
    """The keys (parts …, number) of several sequences, one for each number: (B,) int64."""
    keys = [hash_key(*parts, int(number)) for number in each]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def hashed_bits(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """key (B, 1), counter (N,) or (B, N), int64 -> (B, N) int64 below 2^24: SplitMix64 of their numbers.

    Made on the CPU for Apple's GPUs, which do not multiply 64-bit integers.
    """
    if key.device.type == "mps":
        return hashed_bits(key.cpu(), counter.cpu()).to(key.device)
    # key + counter · GOLDEN modulo 2^64. As a signed number GOLDEN is -c; and ~counter is -counter - 1,
    # so that c + ~counter · c is -counter · c, which is counter · GOLDEN. The plain product would not do:
    # Inductor makes it one of 32-bit integers, which Triton refuses.
    c = (1 << 64) - GOLDEN
    z = key + c + ~counter * c
    z = (z ^ logical_shift(z, 30)) * signed(FACTOR_1)
    z = (z ^ logical_shift(z, 27)) * signed(FACTOR_2)
    return (z ^ (z >> 31)) & 0xFFFFFF


def hashed_uniform(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """key (B, 1), counter (N,) or (B, N), int64 -> (B, N) float32 in (0, 1), a function of (key, counter)."""
    bits = hashed_bits(key, counter).to(torch.float32)
    return ((bits + 0.5) * 2.0**-24).clamp(max=1 - 2.0**-24)  # the largest would be rounded to 1


def hashed_normal(
    key: torch.Tensor, tokens: int, width: int, std: float, cut: float = 3.0, positions=None
) -> torch.Tensor:
    """Truncated normal of standard deviation `std` before the cut at ±cut·std, by inverse CDF.

    key (B,) int64 -> (B, tokens, width) float32; a value depends on (key, position, channel) only.
    positions (tokens,) int64: the tokens' positions, if they are not 0, 1, …
    """
    index = torch.arange(tokens * width, device=key.device, dtype=torch.int64)
    if positions is not None:
        index = positions[:, None] * width + index[:width]
        index = index.flatten()
    bits = hashed_bits(key[:, None], index).to(torch.float32)
    u = (bits + 0.5) * (2.0**-23) - 1.0  # (-1, 1]
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
