"""
What becomes of the change that a loop proposes, Huang (2026), appendix "Other Loop Mechanisms".

    u_t = core_step(h_t) - h_t
    none     h_{t+1} = h_t + u_t
    attnres  h_{t+1} = Σ_i α_i V_i,  V = [h_0, u_0 … u_t],  α = softmax_i(q_t · RMSNorm(V_i))
    hyper    S^(k) ← r_k S^(k) + b_k (u + p_t),  u = core_step(c) - c,  c = Σ_k a_k S^(k)

A mechanism is a module with these methods; `Model.unroll` calls them, for training, evaluation and
sampling alike:

    start(h)            h_0 (B, T, D) -> what the loop carries, its state, sequences first; and a
                        list, the history. Weights used here learn only from sequences all of whose
                        loops carry gradient
    step(state, history, index, core)
                        the state of these sequences after one more loop; index: each one's own loop
                        index; core(h) is Model.core_step
    resume(history)     the history as the loops with gradient should find it
    read(state)         the state -> h (B, T, D)

What belongs to a sequence must be carried in the state, or padded: an entry of the history has the
sequences that were active in its loop, and a later loop may have fewer (slice it) or more, which
begin at h_0 (pad_batch).

Letters as in model.py; Q loop indices. On the raw loop (`--injection none`) mechanisms replace the
loop's sum; with `--injection diagonal` they act on top of Parcae's linear path.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from looped.ops import EPS, ones, parameter, zeros

TABLE_LOOPS = 4  # Q / mu_rec: a depth of Poisson(8) exceeds 32 with probability 3e-11


def at_index(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a learned table (Q, D) for loop indices (B,), beyond the table its last: (B, 1, D)."""
    last = table.size(0) - 1
    return table[index.clamp(max=last)].unsqueeze(1)


def inverse_rms(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(mean(x²) + EPS) over the last dimension, kept, in float32 at least.

    RMSNorm(x) · w is computed as (x · w) times this, so that the backward pass keeps no normed copy
    of x.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    mean_square = norm.square() / x.size(-1)
    return (mean_square + EPS).rsqrt()


def pad_batch(x: torch.Tensor, batch: int, value: float) -> torch.Tensor:
    """x (R, T, *) filled up with `value` to (batch, T, *)."""
    missing = batch - x.size(0)
    if missing == 0:
        return x
    return F.pad(x, (0, 0, 0, 0, 0, missing), value=value)


class PlainLoop(nn.Module):
    """The loop itself: what it proposes is the next state."""

    def __init__(self, cfg):
        super().__init__()

    def start(self, h):
        return h, []

    def step(self, h, history, index, core):
        return core(h)

    def resume(self, history):
        return history

    def read(self, h):
        return h


class AttnRes(PlainLoop):
    """Loop AttnRes: a learned softmax average of the history, one query per loop index.

    The source leaves open: initialisation (here q = 0, so all entries weigh the same); loop indices
    that training never reached (here their query, still 0; beyond the table, the last); what
    truncated backpropagation does to the history (here entries made without gradient are constants,
    as the state is; the queries of the loops with gradient learn from them all the same). Memory:
    the loops without gradient keep n + 1 entries of T D numbers a sequence and Q scores a token with
    each, where the plain loop keeps only h.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        indices = TABLE_LOOPS * cfg.mu_rec
        self.query = parameter((indices, cfg.d_model), zeros)  # (Q, D)

    def entry(self, v):
        """v (R, T, D) and its scores under every query (R, T, Q): one matrix product instead of one
        read per loop.
        """
        query = self.query.to(v.dtype)
        products = F.linear(v, query)
        return v, products * inverse_rms(v)

    def start(self, h):
        return h, [self.entry(h)]

    def resume(self, history):
        """The same entries, constants, with scores that carry gradient to the queries."""
        return [self.entry(v) for v, _ in history]

    def step(self, h, history, index, core):
        """h (a, T, D), index (a,) -> h_{t+1} (a, T, D). Appends u_t to the history.

        An entry has only the sequences that took its loop, always the first ones; for the others it is
        masked out.
        """
        active, tokens = h.shape[:2]
        history.append(self.entry(core(h) - h))
        query = index.clamp(max=self.query.size(0) - 1)
        own = query.view(-1, 1, 1)
        own = own.expand(-1, tokens, 1)
        scores = []
        for _, score in history:
            known = score[:active]
            own_score = known.gather(-1, own[: known.size(0)])  # (R, T, 1)
            scores.append(pad_batch(own_score, active, -math.inf))
        alpha = torch.cat(scores, -1).softmax(-1)  # (a, T, entries) float32
        total = 0
        for i, (v, _) in enumerate(history):
            weight = alpha[: v.size(0), :, i : i + 1]
            total = total + pad_batch(weight * v[:active], active, 0.0)
        return total.to(h.dtype)


class HyperConnected(PlainLoop):
    """HyperConnectedLoop: S streams with gates for reading (a), writing (b) and keeping (r), one
    scalar per stream and position.

    The source leaves initialisation open. Here W = 0 and p = 0, so the gates start as constants: a
    = 1/S (the core reads the mean), r = σ(4) = 0.982, and b = 2σ(x), x spread over [-1, 1], so of
    mean 1. The mean of the streams then follows h ← 0.982 h + u: the plain loop but for 1.8 % of
    the carry. Without the spread the streams, all h_0 at first, would get equal gradients and stay
    equal for ever. S = 1: a = r = σ(4), b = 1. Loop indices that training never reached have p = 0,
    those beyond the table the last p. u is the branch alone, core(c) - c, which is one reading of
    the source's "R(c, e)". Memory: a loop with gradient keeps about S + 2 states of T D numbers a
    sequence more than the plain loop does; without gradient there are S states instead of one.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.streams = cfg.streams
        width = self.streams * cfg.d_model
        self.norm = parameter(width, ones)
        self.gate = parameter((3 * self.streams, width), zeros)  # [W_pre, W_post, W_res]
        self.bias = parameter(3 * self.streams, self.first_gates)
        indices = TABLE_LOOPS * cfg.mu_rec
        self.phase = parameter((indices, cfg.d_model), zeros)  # p, (Q, D)

    def first_gates(self, shape, generator):
        """Before the sigmoid: for reading, writing and keeping, S each."""
        keep = torch.full((self.streams,), 4.0)
        if self.streams == 1:
            return torch.cat([keep, torch.zeros(1), keep])
        share = -math.log(self.streams - 1)  # σ(share) = 1 / S
        read = torch.full((self.streams,), share)
        write = torch.linspace(-1, 1, self.streams)  # σ(-x) + σ(x) = 1: the mean of b is 1
        return torch.cat([read, write, keep])

    def start(self, h):
        streams = h.unsqueeze(2).repeat(1, 1, self.streams, 1)  # (B, T, S, D)
        return streams, []

    def step(self, s, history, index, core):
        """s (R, T, S, D), index (R,) -> the streams after the loop. Gates and sums are float32,
        streams s's dtype.
        """
        flat = s.flatten(2)  # (R, T, S D)
        matrix = (self.gate * self.norm).to(s.dtype)
        z = F.linear(flat, matrix) * inverse_rms(flat)  # W RMSNorm(flat), float32
        gates = (z + self.bias).sigmoid().unsqueeze(-1)  # (R, T, 3 S, 1)
        a, b, r = gates.chunk(3, 2)
        c = (a * s).sum(2).to(s.dtype)  # (R, T, D)
        u = core(c) - c
        u = u + at_index(self.phase, index)
        written = 2 * b * u.unsqueeze(2)
        return (r * s + written).to(s.dtype)

    def read(self, s):
        return s.mean(2)
