"""
How deep each sequence loops: the depth laws, and the plan of a micro-batch's loops.

A sequence takes n loops without gradient, then k with it (paper, section "Stable training
algorithms" and appendix "Sampling of truncated recurrence"). To add a law, write a function and add
it to DEPTH_LAWS: training, FLOPs and the flag `--sampling` follow from it.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from looped.machine import to_device
from looped.randomness import FOR_DEPTH, hash_key, uniforms

MAX_DEPTH = 10_000  # of mu_rec and of what is asked for: a slip of the finger must not seem to hang
BATCH_GROUP = 32  # sequences that share a depth under granularity "batch": the paper's micro-batch


def poisson_quantile(u: np.ndarray, mean: np.ndarray | float) -> np.ndarray:
    """Smallest k with P(Poisson(mean) <= k) > u: exact inverse-CDF sampling, elementwise."""
    mean = np.asarray(mean, np.float64)
    mean = np.broadcast_to(mean, u.shape)
    k = np.zeros(u.shape, np.int64)
    log_p = -mean  # as logarithms: exp(-mean) is 0 for means above 745
    cdf = np.exp(log_p)
    top = mean.max()
    deviations = 40 * math.sqrt(top + 1)
    largest = int(top + deviations) + 1
    for i in range(1, largest + 1):
        more = u >= cdf
        if not more.any():
            break
        k += more
        log_p = log_p + np.log(mean / i)
        cdf = np.where(more, cdf + np.exp(log_p), cdf)
    return k


# -------------------------------------------------------------------------------------------------
# Depth laws: (mu_rec, mu_bwd, u, v) -> (n, k), each of u's shape; u in (0, 1) decides the depth, v
# a law's second draw.


def truncated_full(mu_rec, mu_bwd, u, v):
    """The paper's: depth ~ max(1, Poisson(mu_rec)); its last mu_bwd loops carry gradient."""
    depth = np.maximum(1, poisson_quantile(u, mu_rec))
    return np.maximum(depth - mu_bwd, 0), np.minimum(depth, mu_bwd)


def full(mu_rec, mu_bwd, u, v):
    """The same depths, all loops with gradient."""
    depth = np.maximum(1, poisson_quantile(u, mu_rec))
    return np.zeros_like(depth), depth


def fill(mu_rec, mu_bwd, u, v):
    """Geiping et al.: n ~ Poisson(mu_rec - mu_bwd), and always mu_bwd loops with gradient."""
    n = poisson_quantile(u, mu_rec - mu_bwd)
    return n, np.full(u.shape, mu_bwd)


def lognormal_fill(mu_rec, mu_bwd, u, v):
    """The original RDM's: n ~ Poisson(e^τ) + 1, τ normal of sigma 1/2; the mean of n is mu_rec -
    mu_bwd + 1.
    """
    x = torch.from_numpy(2 * v - 1)
    normal = math.sqrt(2) * torch.erfinv(x).numpy()
    rate = np.exp(0.5 * normal - 0.125) * (mu_rec - mu_bwd)
    n = poisson_quantile(u, rate) + 1
    return n, np.full(u.shape, mu_bwd)


def fixed(mu_rec, mu_bwd, u, v):
    """Always mu_rec loops: the post's "no-SD" probe."""
    n = np.full(u.shape, mu_rec - mu_bwd)
    return n, np.full(u.shape, mu_bwd)


DEPTH_LAWS = {
    "poisson-truncated-full": truncated_full,
    "poisson-full": full,
    "poisson-fill": fill,
    "poisson-lognormal-fill": lognormal_fill,
    "fixed": fixed,
}


def draw(cfg, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) of a ModelConfig's law; zeros where the model has no loop."""
    if cfg.n_core == 0:
        none = np.zeros(u.shape, np.int64)
        return none, none
    return DEPTH_LAWS[cfg.sampling](cfg.mu_rec, cfg.mu_bwd, u, v)


# Granularities: (sequences of a step, tokens of a sequence) -> which draw, by number, each
# sequence, or token, takes.


def by_sequence(batch: int, tokens: int) -> np.ndarray:
    """Every sequence draws its own depth: (batch,)."""
    return np.arange(batch)


def by_batch(batch: int, tokens: int) -> np.ndarray:
    """BATCH_GROUP consecutive sequences share a depth: (batch,)."""
    return np.arange(batch) // BATCH_GROUP


def by_token(batch: int, tokens: int) -> np.ndarray:
    """Every token draws its own depth: (batch, tokens)."""
    return np.arange(batch * tokens).reshape(batch, tokens)


GRANULARITIES = {"sequence": by_sequence, "batch": by_batch, "token": by_token}


def sample_depths(cfg, seed: int, step: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Loops without and with gradient, (n, k), of each of the step's sequences.

    Two int64 arrays (batch,), or (batch, T) when every token has its own depth; a function of
    (seed, step, sequence).
    """
    key = hash_key(seed, FOR_DEPTH, step)
    index = GRANULARITIES[cfg.granularity](batch, cfg.seq_len)
    u = uniforms(key, index)
    v = uniforms(hash_key(key, 2), index)
    return draw(cfg, u, v)


def even_draws(law: str, mu_rec: int, mu_bwd: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) of a law over an even grid of (u, v): its distribution, to some 1e-4."""
    points = 1 << 16
    index = np.arange(points)
    u = (index + 0.5) / points
    # the golden ratio's multiples fill (0, 1) evenly, whatever u is
    v = (index * 0.6180339887498949 + 0.5) % 1.0
    v = np.clip(v, 1e-6, 1 - 1e-6)
    return DEPTH_LAWS[law](mu_rec, mu_bwd, u, v)


@functools.cache
def mean_loops(law: str, mu_rec: int, mu_bwd: int) -> tuple[float, float]:
    """Means of n and k under a law; 0 of a model without a loop, whose mu_rec is 0."""
    if mu_rec == 0:
        return 0.0, 0.0
    n, k = even_draws(law, mu_rec, mu_bwd)
    return float(n.mean()), float(k.mean())


def trained_loops(cfg, share: float = 0.05) -> int:
    """How many rows a table by loop index should have: later loops carry gradient in less than this
    share of sequences, and take the last row (looped/mechanisms.py, at_index).
    """
    n, k = even_draws(cfg.sampling, cfg.mu_rec, cfg.mu_bwd)
    last = (n + k).max()
    while last and np.mean((n < last) & (last <= n + k)) < share:
        last -= 1
    return int(last)


def deepest(cfg, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) of sequences at a depth that almost no draw exceeds (one in ten million of Poisson laws);
    memory is tried at this depth.
    """
    u = np.full(batch, 1 - 1e-7)
    v = np.full(batch, 1 - 1e-5)
    return draw(cfg, u, v)


# -------------------------------------------------------------------------------------------------
# Plans: the loops of a micro-batch, one after the other, as Model.unroll runs them.


@dataclass
class Loop:
    """One loop of a micro-batch, which is sorted by depth: deepest first."""

    number: int  # loops that ran before it
    active: int  # the first so many sequences take it
    index: torch.Tensor  # (active,), or (B, T): loops that each sequence, or token, took before
    live: torch.Tensor | None = None  # (B, T) bool: tokens that take it; None: all
    gradient: bool = False


def even_plan(batch: int, depth: int, device) -> Iterator[Loop]:
    """As many loops of all sequences alike, without gradient."""
    for number in range(depth):
        index = torch.full((batch,), number, device=device)
        yield Loop(number, batch, index)


def training_plan(n: np.ndarray, k: np.ndarray, device) -> list[Loop]:
    """The loops of truncated backpropagation: sequence i takes n[i] loops without gradient, then
    k[i] with. n and k (B,), deepest first, or (B, T): the same for each token.

    All sequences start their loops without gradient together, and end those with gradient together.
    A sequence with fewer than the most loops with gradient has none without, and joins late. So each
    loop runs the first sequences of the batch. Three of them, (n, k) = (3, 2), (1, 2), (0, 1), with a
    column for each loop, # for those with gradient:

        ...##
        .  ##
            #

    With depths by token every loop runs all tokens. Those that are done keep their state, and others
    still attend to it.
    """
    wait = k.max() - k  # loops with gradient that pass before a sequence joins
    if n.ndim == 2:
        wait = np.zeros_like(k)
    if (n[wait > 0] > 0).any():
        raise ValueError("a depth law gave a sequence fewer loops with gradient, but some without")
    taken = []  # of each loop: how many loops each sequence took before
    takes = []  # and which take it
    for t in range(n.max()):
        taken.append(np.full(n.shape, t))
        takes.append(n > t)
    for t in range(k.max()):
        taken.append(n + t - wait)
        takes.append((wait <= t) & (t < wait + k))
    index = to_device(torch.from_numpy(np.stack(taken)), device)  # one copy for all loops
    loops = []
    for number, taking in enumerate(takes):
        active = int(taking.sum()) if n.ndim == 1 else len(n)
        loop = Loop(number, active, index[number, :active])
        loop.gradient = number >= n.max()
        loops.append(loop)
    if n.ndim == 2:
        masks = to_device(torch.from_numpy(np.stack(takes)), device)
        for loop, live in zip(loops, masks, strict=True):
            loop.live = live
    return loops


def share_out(n: np.ndarray, k: np.ndarray, world: int) -> list[np.ndarray]:
    """Deals a step's sequences to the ranks: deepest first, back and forth, so that the ranks' work
    is equal.

    A loop without gradient costs 2 units, one with gradient 6. The deal depends on depths alone,
    not on the text, and the step's gradient is a sum over sequences, so which rank computes
    which sequence changes nothing but rounding.
    """
    cost = 2 * n + 6 * k
    of_sequence = cost.reshape(len(n), -1).sum(1)
    order = np.argsort(-of_sequence, kind="stable")
    rounds = order.reshape(-1, world).copy()
    rounds[1::2] = rounds[1::2, ::-1]
    return [rounds[:, rank] for rank in range(world)]
