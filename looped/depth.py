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

from looped.console import refuse
from looped.machine import to_device
from looped.randomness import FOR_DEPTH, hash_key, uniforms

MAX_DEPTH = 10_000  # of mu_rec and of what is asked for: a slip of the finger must not seem to hang
BATCH_GROUP = 32  # sequences that share a depth under granularity "batch": the paper's micro-batch


def refuse_too_deep(name: str, depths: list[int]) -> None:
    """Refuses depths above MAX_DEPTH that were given by the flag or argument of this name."""
    if max(depths, default=0) > MAX_DEPTH:
        refuse(f"{name} {max(depths)} is more than {MAX_DEPTH:,}")


def poisson_quantile(u: np.ndarray, mean: np.ndarray | float) -> np.ndarray:
    """Smallest k with P(Poisson(mean) <= k) > u: exact inverse-CDF sampling, elementwise."""
    mean = np.broadcast_to(np.asarray(mean, np.float64), u.shape)
    k = np.zeros(u.shape, np.int64)
    log_p = -mean  # as logarithms: exp(-mean) is 0 for means above 745
    cdf = np.exp(log_p)
    top = mean.max()
    largest = int(top + 40 * math.sqrt(top + 1)) + 1
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
    return poisson_quantile(u, mu_rec - mu_bwd), np.full(u.shape, mu_bwd)


def lognormal_fill(mu_rec, mu_bwd, u, v):
    """The original RDM's: n ~ Poisson(e^τ) + 1, τ normal of sigma 1/2; the mean of n is mu_rec -
    mu_bwd + 1.
    """
    x = torch.from_numpy(2 * v - 1)
    normal = math.sqrt(2) * torch.erfinv(x).numpy()
    rate = np.exp(0.5 * normal - 0.125) * (mu_rec - mu_bwd)
    return poisson_quantile(u, rate) + 1, np.full(u.shape, mu_bwd)


def fixed(mu_rec, mu_bwd, u, v):
    """Always mu_rec loops: the post's "no-SD" probe."""
    return np.full(u.shape, mu_rec - mu_bwd), np.full(u.shape, mu_bwd)


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
    n, k = DEPTH_LAWS[cfg.sampling](cfg.mu_rec, cfg.mu_bwd, u, v)
    for loops in (n, k):
        if np.shape(loops) != u.shape or loops.dtype.kind != "i" or loops.min() < 0:
            what = "must give n and k as whole numbers of at least 0, of u's shape"
            raise ValueError(f"the depth law {cfg.sampling} {what}")
    if (n + k).min() < 1:
        raise ValueError(f"the depth law {cfg.sampling} must loop at least once")
    return n, k


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
    return draw(cfg, uniforms(key, index), uniforms(hash_key(key, 2), index))


@functools.cache
def mean_loops(law: str, mu_rec: int, mu_bwd: int) -> tuple[float, float]:
    """Means of n and k under a law, by averaging it over a grid of (u, v); exact to some 1e-4. 0 of a
    model without a loop, whose mu_rec is 0. Raises ValueError for a law that draws from something else.
    """
    if mu_rec == 0:
        return 0.0, 0.0
    points = 1 << 16
    index = np.arange(points)
    u = (index + 0.5) / points
    # the golden ratio's multiples fill (0, 1) evenly, whatever u is
    v = (index * 0.6180339887498949 + 0.5) % 1.0
    v = np.clip(v, 1e-6, 1 - 1e-6)
    n, k = DEPTH_LAWS[law](mu_rec, mu_bwd, u, v)
    again = DEPTH_LAWS[law](mu_rec, mu_bwd, u, v)
    if not np.array_equal((n, k), again):
        raise ValueError(f"the depth law {law} draws from other numbers than u and v")
    return float(n.mean()), float(k.mean())


def deepest(cfg, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, k) of rows at a depth that almost no draw exceeds (one in ten million of Poisson laws);
    memory is tried at this depth.
    """
    return draw(cfg, np.full(rows, 1 - 1e-7), np.full(rows, 1 - 1e-5))


# -------------------------------------------------------------------------------------------------
# Plans: the loops of a micro-batch, one after the other, as Model.unroll runs them.


@dataclass
class Loop:
    """One loop of a micro-batch whose rows come deepest first."""

    number: int  # loops that ran before it
    active: int  # rows 0 … active - 1 take it
    index: torch.Tensor  # (active,), or (B, T): how many loops each row, or token, has taken before
    # rows (B,) or tokens (B, T) that take it, bool; None: all of the active rows
    live: torch.Tensor | None = None
    gradient: bool = False


def even_plan(rows: int, depth: int, device) -> Iterator[Loop]:
    """As many loops of all rows alike, without gradient."""
    for number in range(depth):
        yield Loop(number, active=rows, index=torch.full((rows,), number, device=device))


def training_plan(n: np.ndarray, k: np.ndarray, device) -> list[Loop]:
    """The loops of truncated backpropagation: row, or token, i takes n[i] loops without gradient,
    then k[i] with.

    Rows, n and k (B,), deepest first, with n[i] = 0 where k[i] < max(k), as under every law above,
    are nested: the loops without gradient start together, those with gradient end together, so that
    the active rows of every loop are the first so many. Of other rows, and of tokens, n and k
    (B, T), every loop computes all; one that is done, or waits for its gradient loops, keeps its
    state; other tokens still attend to it. Three rows of (n, k) = (3, 2), (1, 2), (0, 1), a column
    for each loop, # those with gradient:

        nested    ...##    not nested    ...##
                  .  ##                  .  ##
                      #                     #
    """
    late = k.max() - k  # loops with gradient that pass before a row joins
    together = k.any() or n.min() == n.max()  # the last loop is that of all rows
    nested = n.ndim == 1 and together and (np.diff(n) <= 0).all() and (n[late > 0] == 0).all()
    if not nested:
        late = np.zeros_like(k)
    indices = []  # of each loop: how many loops each row has taken before
    lives = []  # and which rows take it
    for t in range(n.max()):
        indices.append(np.full(n.shape, t))
        lives.append(n > t)
    without = len(lives)
    for j in range(k.max()):
        indices.append(n + j - late)
        lives.append((late <= j) & (j < late + k))
    if not lives:
        return []
    on_device = to_device(torch.from_numpy(np.stack(indices)), device)  # one copy for all loops
    masks = None if nested else to_device(torch.from_numpy(np.stack(lives)), device)
    loops = []
    for number, live in enumerate(lives):
        active = int(live.sum()) if nested else len(n)
        loop = Loop(number, active, on_device[number, :active], gradient=number >= without)
        if masks is not None:
            loop.live = masks[number]
        loops.append(loop)
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
