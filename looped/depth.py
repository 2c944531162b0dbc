"""
How deep each sequence loops: the depth laws, and the plan of a micro-batch's loops.

A sequence takes n loops without gradient, then k loops with gradient (paper, section "Stable training
algorithms" and appendix "Sampling of truncated recurrence"). To add a law, write a function and its
line in DEPTH_LAWS: training, FLOPs and the flag `--sampling` follow from it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from looped.machine import to_device
from looped.randomness import FOR_DEPTH, hash_key, uniforms

MAX_DEPTH = 10_000  # of mu_rec and of what is asked for: a slip of the finger must not seem to hang
BATCH_GROUP = 32  # sequences that share a depth under --granularity batch: the paper's micro-batch


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
# Depth laws: (mu_rec, mu_bwd, u, v, progress) -> (n, k), int64 arrays of u's shape. u in (0, 1)
# decides the depth, v is a law's second draw; progress, in [0, 1], is the part of the training that
# has passed, for a law that lets depths grow.


def truncated_full(mu_rec, mu_bwd, u, v, progress):
    """The paper's: depth ~ max(1, Poisson(mu_rec)); its last mu_bwd loops carry gradient."""
    depth = np.maximum(1, poisson_quantile(u, mu_rec))
    return np.maximum(depth - mu_bwd, 0), np.minimum(depth, mu_bwd)


def full(mu_rec, mu_bwd, u, v, progress):
    """The same depths, all loops with gradient."""
    depth = np.maximum(1, poisson_quantile(u, mu_rec))
    return np.zeros_like(depth), depth


def fill(mu_rec, mu_bwd, u, v, progress):
    """Geiping et al.: n ~ Poisson(mu_rec - mu_bwd), and always mu_bwd loops with gradient."""
    n = poisson_quantile(u, mu_rec - mu_bwd)
    return n, np.full(u.shape, mu_bwd)


def lognormal_fill(mu_rec, mu_bwd, u, v, progress):
    """The original RDM's: n ~ Poisson(e^τ) + 1, τ normal of sigma 1/2; the mean of n is mu_rec -
    mu_bwd + 1.
    """
    x = torch.from_numpy(2 * v - 1)
    normal = math.sqrt(2) * torch.erfinv(x).numpy()
    rate = np.exp(0.5 * normal - 0.125) * (mu_rec - mu_bwd)
    n = poisson_quantile(u, rate) + 1
    return n, np.full(u.shape, mu_bwd)


def fixed(mu_rec, mu_bwd, u, v, progress):
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


def draw(cfg, u: np.ndarray, v: np.ndarray, progress: float) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) by a ModelConfig's law; zeros where the model has no loop."""
    if cfg.n_core == 0:
        none = np.zeros(u.shape, np.int64)
        return none, none
    return DEPTH_LAWS[cfg.sampling](cfg.mu_rec, cfg.mu_bwd, u, v, progress)


# Granularities: the sequences' numbers (batch,) -> the number of the draw that each of them takes.


def by_sequence(sequence: np.ndarray) -> np.ndarray:
    return sequence


def by_batch(sequence: np.ndarray) -> np.ndarray:
    """BATCH_GROUP consecutive sequences share a depth."""
    return sequence // BATCH_GROUP


GRANULARITIES = {"sequence": by_sequence, "batch": by_batch}


def sample_depths(
    cfg, seed: int, step: int, batch: int, progress: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Loops without and with gradient, (n, k), of each of a step's sequences: two int64 arrays
    (batch,), a function of (seed, step, sequence) and of the law's progress.
    """
    key = hash_key(seed, FOR_DEPTH, step)
    index = GRANULARITIES[cfg.granularity](np.arange(batch))
    u = uniforms(key, index)
    v = uniforms(hash_key(key, 2), index)
    return draw(cfg, u, v, progress)


def even_draws(cfg, points: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) over an even grid of (u, v), as the law has them at the end of training."""
    index = np.arange(points)
    u = (index + 0.5) / points
    # the golden ratio's multiples fill (0, 1) evenly, whatever u is
    v = (index * 0.6180339887498949 + 0.5) % 1.0
    v = np.clip(v, 1e-6, 1 - 1e-6)
    return draw(cfg, u, v, progress=1.0)


def trained_loops(cfg, share: float = 0.05) -> int:
    """How many rows a table by loop index should have: later loops carry gradient in less than this
    share of sequences, and take the last row (looped/mechanisms.py, at_index).
    """
    n, k = even_draws(cfg, 1 << 16)
    last = (n + k).max()
    while last and np.mean((n < last) & (last <= n + k)) < share:
        last -= 1
    return int(last)


def deepest(cfg, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) of sequences at a depth that almost no draw exceeds (one in ten million of Poisson laws):
    memory is tried at this depth.
    """
    u = np.full(batch, 1 - 1e-7)
    v = np.full(batch, 1 - 1e-5)
    return draw(cfg, u, v, progress=1.0)


def staircase(cfg, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of (n, k), deepest first, that together meet every number of active sequences, without
    gradient and with it. cuDNN plans its attention anew for each such number.
    """
    if cfg.n_core == 0:
        return []
    step = np.arange(batch, 0, -1)  # one loop more for each sequence
    stairs = [(step, np.full(batch, cfg.mu_bwd))]
    top = max(2, cfg.mu_bwd)
    for first in range(0, batch, top - 1):  # with gradient: so many numbers at a time
        stairs.append((np.zeros_like(step), np.clip(step - first, 1, top)))
    return stairs


# -------------------------------------------------------------------------------------------------
# Plans: the loops of a micro-batch, one after the other, as Model.unroll runs them.


@dataclass
class Loop:
    """One loop of a micro-batch, which is sorted by depth: deepest first."""

    number: int  # loops that ran before it
    active: int  # how many sequences take it: the first ones
    index: torch.Tensor  # (active,) int64: loops that each sequence took before
    live: torch.Tensor | None = None  # (active, T) bool: the tokens that take it; None: all
    gradient: bool = False


def even_plan(batch: int, depth: int, device) -> Iterator[Loop]:
    """`depth` loops of all sequences, without gradient."""
    for number in range(depth):
        index = torch.full((batch,), number, device=device)
        yield Loop(number, batch, index)


def training_plan(n: np.ndarray, k: np.ndarray, device) -> list[Loop]:
    """The loops of truncated backpropagation: sequence i takes n[i] loops without gradient, then k[i]
    with gradient. n and k (B,), deepest first.

    All sequences start their loops without gradient together, and end those with gradient together.
    A sequence with fewer than the most loops with gradient has none without, and joins late. So each
    loop runs the first sequences of the batch. Three of them, (n, k) = (3, 2), (1, 2), (0, 1), with a
    column for each loop, # for those with gradient:

        ...##
        .  ##
            #

    Raises ValueError where the depths rise, or where a late sequence has loops without gradient.
    """
    joins_at = k.max() - k  # among the loops with gradient
    if (n[joins_at > 0] > 0).any():
        raise ValueError("a depth law gave a sequence fewer loops with gradient, but some without")
    if (np.diff(n + k) > 0).any():
        raise ValueError(f"sequences must come deepest first, not with {n + k} loops")
    loops_before = []  # for each loop: how many each sequence took before it
    takes = []  # and which sequences take it
    for t in range(n.max()):
        loops_before.append(np.full(n.shape, t))
        takes.append(n > t)
    for t in range(k.max()):
        loops_before.append(n + t - joins_at)
        takes.append(joins_at <= t)
    index = to_device(torch.from_numpy(np.stack(loops_before)), device)  # one copy for all loops
    loops = []
    for number, taking in enumerate(takes):
        active = int(taking.sum())
        gradient = bool(number >= n.max())
        loops.append(Loop(number, active, index[number, :active], gradient=gradient))
    return loops


def share_out(n: np.ndarray, k: np.ndarray, world: int) -> list[np.ndarray]:
    """Deals a step's sequences to the ranks: deepest first, back and forth, so that the ranks' work
    is equal -> the sequences' numbers for each rank.

    A loop without gradient costs 2 units, one with gradient 6. The deal depends on depths alone,
    not on the text, and the step's gradient is a sum over sequences, so which rank computes
    which sequence changes nothing but rounding.
    """
    cost = 2 * n + 6 * k
    order = np.argsort(-cost, kind="stable")
    rounds = order.reshape(-1, world).copy()
    rounds[1::2] = rounds[1::2, ::-1]
    return list(rounds.T)
