"""Layers whose weights are float32 and are used in the activations' dtype."""

from collections.abc import Iterable
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

EPS = 1e-5  # of every RMSNorm


class Embedding(nn.Embedding):
    def reset_parameters(self):
        """Nothing: `Model.init_weights` draws them."""


class RMSNorm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d))

    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), EPS)


class LinearByCopy(torch.autograd.Function):
    """x Wᵀ, read from a copy of W in the activations' dtype that several calls share.

    W's gradient is computed in the copy's dtype, as without a copy, but returned in W's own, so
    that autograd sums it over calls in float32. x (..., in), weight, copy (out, in) -> (..., out).
    """

    @staticmethod
    def forward(ctx, x, weight, copy):
        ctx.save_for_backward(x, copy)
        ctx.dtype = weight.dtype
        return F.linear(x, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, copy = ctx.saved_tensors
        dw = g.flatten(0, -2).T @ x.flatten(0, -2)
        return g @ copy, dw.to(ctx.dtype), None


class Linear(nn.Linear):
    copy = None  # of the weight, in the activations' dtype, while the loops run

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self):
        """Nothing: `Model.init_weights` draws them."""

    def forward(self, x):
        copy = self.copy  # read once: another thread's loops may end meanwhile
        if copy is not None:
            return LinearByCopy.apply(x, self.weight, copy)
        return F.linear(x, self.weight.to(x.dtype))


@contextmanager
def copied(blocks: Iterable, dtype: torch.dtype):
    """Within, the blocks' matrices are cast once, and not at every use."""
    linears = []
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Linear) and module.weight.dtype != dtype:
                linears.append(module)
    for linear in linears:
        linear.copy = linear.weight.detach().to(dtype)
    try:
        yield
    finally:
        for linear in linears:
            linear.copy = None
