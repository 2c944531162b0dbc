"""Operations on tensors that know nothing of the model."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from looped.randomness import FACTOR_1, FACTOR_2, GOLDEN, hash_key


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, split halves. x (B, T, H, K), cos and sin (T, 1, K/2) or (B, T, 1, K/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    y1 = x1 * cos - x2 * sin
    y2 = x1 * sin + x2 * cos
    return torch.cat([y1, y2], dim=-1)


def preceding(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, K) -> the same shape: for each token its predecessor's entry, 0 for the first."""
    return F.pad(x, (0, 0, 1, 0))[:, :, :-1]


def shift_values(k, v):
    """Keys and values (B, H, T, K) -> the same keys; the second half of the values' channels is
    the preceding token's. So a token that attends to itself reads two tokens.
    """
    own, _ = v.chunk(2, dim=-1)
    _, before = preceding(v).chunk(2, dim=-1)
    return k, torch.cat([own, before], dim=-1)


def shift_keys(k, v):
    """Keys and values (B, H, T, K) -> the same values; the half of the keys' channels that rotates
    more slowly is the preceding token's. So one layer can find what followed an earlier
    occurrence of the query's token, which otherwise takes two layers.
    """
    # `rope` pairs channel c with c + K/2, and turns the first pairs fastest
    fast, _, fast_partner, _ = k.chunk(4, dim=-1)
    _, slow, _, slow_partner = preceding(k).chunk(4, dim=-1)
    return torch.cat([fast, slow, fast_partner, slow_partner], dim=-1), v


def attends_by_products(device: str, dtype: torch.dtype, tokens: int) -> bool:
    """Whether attention is two matrix products: for short bfloat16 rows on a CPU they take half the
    time of torch's kernel.
    """
    return device == "cpu" and dtype == torch.bfloat16 and tokens <= 512


def attend(q, k, v, shift: Callable | None = None, mask: torch.Tensor | None = None):
    """Causal attention on (B, H, T, K); shift: shift_values, shift_keys or None, applied first.

    mask (T, S): for text that comes piece by piece, whether each of q's T tokens sees each of the S
    of k and v so far. As two matrix products, scores are rounded to bfloat16, as every other
    activation is.
    """
    if shift is not None:
        k, v = shift(k, v)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if not attends_by_products(q.device.type, q.dtype, q.size(2)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    tokens = q.size(2)
    later = torch.full((tokens, tokens), -math.inf, dtype=q.dtype)
    mask = later.triu(1)
    scale = q.size(3) ** -0.5
    keys = k.flatten(0, 1)
    scores = torch.baddbmm(mask, q.flatten(0, 1), keys.mT, alpha=scale)  # (B H, T, T)
    y = scores.softmax(-1) @ v.flatten(0, 1)
    return y.view(q.shape)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits = h Wᵀ without ever holding all logits: gradients are made in
    the forward pass.

    Three matrix products a chunk, as the plain head has, where recomputing the logits in the
    backward would need four. h (N, D), weight (V, D) float32, target (N,) -> float32 sum.
    """

    @staticmethod
    def forward(ctx, h, weight, target, chunk):
        w = weight.to(h.dtype)
        loss = h.new_zeros((), dtype=torch.float32)
        dh = torch.empty_like(h)
        dw = torch.zeros_like(weight)
        for i in range(0, h.size(0), chunk):
            x = h[i : i + chunk]
            y = target[i : i + chunk, None]
            p = torch.softmax(x @ w.T, -1, dtype=torch.float32)  # (n, V)
            right = p.gather(1, y).clamp_min(1e-38)  # so a token's loss is 87.5 at most
            # not in place: torch 2.11 compiles that to a gradient of 0 (pytorch issue 180642)
            loss = loss - right.log().sum()
            p.scatter_add_(1, y, p.new_full(y.shape, -1.0))  # the logits' gradient
            p = p.to(h.dtype)
            dh[i : i + chunk] = p @ w
            dw += p.T @ x
        ctx.save_for_backward(dh, dw)
        return loss

    @staticmethod
    def backward(ctx, g):
        dh, dw = ctx.saved_tensors
        dh = (dh.float() * g).to(dh.dtype)  # rounded once: g is 1 / tokens
        return dh, dw * g, None, None


def orthogonal(shape, std: float, generator: torch.Generator) -> torch.Tensor:
    """A (semi-)orthogonal matrix scaled so that its entries have the given standard deviation."""
    rows, cols = shape
    tall = torch.randn(max(shape), min(shape), generator=generator)
    q, r = torch.linalg.qr(tall)
    q = q * r.diagonal().sign()  # makes the draw uniform over orthogonal matrices
    q = q if rows >= cols else q.T
    return q * (std * math.sqrt(max(shape)))


def spectral_norm(x: torch.Tensor) -> float:
    """Largest singular value; NaN if an entry is not finite, which the library would refuse."""
    if not x.isfinite().all():
        return math.nan
    return torch.linalg.matrix_norm(x.float(), 2).item()


def hash_keys(*parts: int, each, device=None) -> torch.Tensor:
    """The keys (parts …, number) of several sequences, one for each number: (B,) int64."""
    keys = [hash_key(*parts, int(number)) for number in each]
    return torch.tensor(keys, dtype=torch.int64, device=device)


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
