"""
The optimiser: Muon for the blocks' matrices, AdamW for everything else, on one rank or any number
of them.

All parameters of a rule live in buffers, of which the parameters and their gradients are views:
matrices of one shape are stacked (N, rows, cols), others are laid end to end (N,). Rank r owns the
r-th part of every buffer: it receives that part of the summed gradient, keeps the state of that
part only, updates it, and gathers the rest. That is ZeRO-1: the whole gradient stays on every rank.
Each buffer takes one collective each way and one batched update, with no copies.

A new optimiser needs a class like AdamW below: `stacked` and `separate` say how its parameters are
laid out, `new_state` makes tensors of the buffer's length, `apply` multiplies every change by `ok`.
In train.py it needs a function for its parameter groups, with a line in OPTIMIZERS.

Sources: Muon (Jordan et al. 2024), Polar Express (arXiv 2505.16932), NorMuon's factored variance
reduction (arXiv 2510.05491), cautious weight decay; values of the paper's table "Hyperparameter …
Transformers".
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

POLAR_EXPRESS = (  # arXiv 2505.16932, five steps
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

LARGE = 1 << 20  # elements from which on a table has a buffer to itself

# torch 2.11 has only the second name of each, and torch 2.13 warns that it will go
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class Rates:
    """What the schedule says of a step: multiples in [0, 1] of the peaks, and Muon's momentum."""

    lr: float = 1.0
    weight_decay: float = 1.0
    momentum: float = 0.95


# -------------------------------------------------------------------------------------------------
# Updates, in place. ok: 1, or 0 if the loss or a gradient is not finite: then nothing changes. Rates
# and ok are 0-d tensors on the device, so that nothing waits for it and nothing is compiled anew.


def polar_express(g: torch.Tensor) -> torch.Tensor:
    """g (N, rows, cols) -> approximately U Vᵀ of each matrix's SVD, by five odd polynomials X (a +
    b XᵀX + c (XᵀX)²).

    The Frobenius norm, enlarged by 2 %, bounds the spectral norm, so all singular values start in
    (0, 1).
    """
    x = g.bfloat16() if g.is_cuda else g
    norm = x.norm(dim=(-2, -1), keepdim=True)
    x = x / (norm * 1.02 + 1e-6)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # the Gram matrix of the shorter side is the cheaper one
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        even = b * gram + c * gram @ gram
        x = a * x + even @ x
    return (x.mT if tall else x).to(g.dtype)


def muon_update(p, g, state: dict, rates, ok):
    """One Muon step on a stack of matrices p, g (N, rows, cols).

    rates: learning rate, weight decay, momentum, 1 - momentum. state["first"] (N, rows, cols) is the
    momentum. state["second"], (N, rows, 1) or (N, 1, cols), is NorMuon's running mean square of the
    orthogonalised update over its shorter direction: dividing by its root evens out the neurons,
    and the update's norm is then put back to what it was. Weight decay does not act where update and
    weight differ in sign.
    """
    first, second = state["first"], state["second"]
    lr, weight_decay, momentum, one_minus_momentum = rates
    first.lerp_(g, one_minus_momentum * ok)
    g = g.lerp(first, momentum)  # Nesterov
    g = polar_express(g)
    dim = -1 if second.size(-1) == 1 else -2  # the shorter direction, as second was made
    mean_square = g.square().mean(dim=dim, keepdim=True)
    second.lerp_(mean_square, 0.05 * ok)  # beta2 0.95
    scale = second.clamp_min(1e-10).rsqrt()
    # squared norms, but for a factor: of the update, and of the update times the scale
    norm2 = mean_square.sum(dim=(-2, -1), keepdim=True)
    scaled_norm2 = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True)
    ratio = norm2 / scaled_norm2.clamp_min(1e-10)
    g = g * (scale * ratio.sqrt())
    rows, cols = p.shape[-2:]
    lr = lr * max(1.0, rows / cols) ** 0.5
    shrink = weight_decay * p * (g * p >= 0)
    p.sub_(ok * lr * (g + shrink))


def adamw_update(p, g, state: dict, lr, step, ok, constants: tuple):
    """One Adam step without weight decay. p, g, state["first"] and state["second"] (N,); lr and step
    (from 1) 0-d tensors; constants: beta1, beta2, eps.

    eps = 0 means none: an element that never had a gradient stays, rather than becoming 0 / 0. The
    divisor is at least 1e-18: otherwise a gradient whose square underflows to 0 in float32, as for
    a token that never occurs, makes a huge update.
    """
    first, second = state["first"], state["second"]
    beta1, beta2, eps = constants
    first.lerp_(g, (1 - beta1) * ok)
    second.lerp_(g.square(), (1 - beta2) * ok)
    mean_square = second / (1 - beta2**step)
    denominator = mean_square.sqrt_().add_(eps).clamp_min_(1e-18)
    rate = ok * lr / (1 - beta1**step)
    p.sub_(first / denominator * rate)


# -------------------------------------------------------------------------------------------------
# Rules: how parameters are laid out, what state they have, and their update.


class Muon:
    """For matrices (paper, table of groups): stacked by shape."""

    stacked = True
    separate = False

    def __init__(self, lr: float = 8e-3, weight_decay: float = 0.2, compile: bool = False):
        self.lr = lr
        self.weight_decay = weight_decay
        self.update = torch.compile(muon_update, dynamic=False) if compile else muon_update

    def new_state(self, p: torch.Tensor) -> dict:
        count, rows, cols = p.shape
        factor = (count, rows, 1) if rows >= cols else (count, 1, cols)
        return {"first": torch.zeros_like(p), "second": p.new_zeros(factor)}

    def apply(self, buffer: "Buffer", rates: Rates, step, ok) -> None:
        # a matrix is one entry of the buffer, so this counts the rank's; padding may follow them
        count = len(buffer.members[buffer.part])
        if count == 0:
            return
        lr = rates.lr * self.lr * buffer.lr
        weight_decay = rates.weight_decay * self.weight_decay
        numbers = (lr, weight_decay, rates.momentum, 1 - rates.momentum)
        on_device = [torch.full((), number, device=ok.device) for number in numbers]
        state = {name: tensor[:count] for name, tensor in buffer.state.items()}
        self.update(buffer.p[:count], buffer.g[:count], state, on_device, ok)


class AdamW:
    """For everything else, laid end to end.

    update_clip divides the rate of a tensor by max(1, RMS of gradient / root of its second moment)
    (Wortsman et al. 2023; the RDM's setting); each tensor then has a buffer to itself. Weight decay
    is 0.
    """

    stacked = False

    def __init__(
        self, lr: float = 8e-3, betas=(0.8, 0.95), eps=1e-10, update_clip=False, compile=False
    ):
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.separate = update_clip
        self.update = torch.compile(adamw_update, dynamic=False) if compile else adamw_update

    def new_state(self, p: torch.Tensor) -> dict:
        return {"first": torch.zeros_like(p), "second": torch.zeros_like(p)}

    def apply(self, buffer: "Buffer", rates: Rates, step, ok) -> None:
        lr = torch.full((), rates.lr * self.lr * buffer.lr, device=ok.device)
        if self.separate:
            lr = lr / self.excess(buffer, step)
        constants = (*self.betas, self.eps)
        self.update(buffer.p, buffer.g, buffer.state, lr, step, ok, constants)

    def excess(self, buffer: "Buffer", step):
        """What update clipping divides the buffer's learning rate by, 0-d, at least 1."""
        g2 = buffer.g.square()
        beta2 = self.betas[1]
        second = buffer.state["second"].lerp(g2, 1 - beta2)
        second = second / (1 - beta2**step)
        total = (g2 / second.clamp_min(1e-30)).sum()
        if len(buffer.p) < len(buffer.data):  # the rest is other ranks'
            dist.all_reduce(total)
        (_, p), *_ = buffer.members
        mean = total / p.numel()
        return mean.sqrt().clamp(min=1)


# -------------------------------------------------------------------------------------------------
# Buffers, and the step over all of them


class Buffer:
    """Parameters of one rule side by side, cut into one part a rank. p, g and state are this rank's
    part of the weights, gradients and moments; zeros fill up the last rank's.
    """

    def __init__(self, rule, members: list, rank: int, world: int):
        self.rule = rule
        self.members = members  # (name, parameter)
        self.lr = rate_multiple(members[0][1])  # a multiple of the rule's
        self.spans = []  # where each member lies
        end = 0
        for _, p in members:
            start = end
            end += 1 if rule.stacked else p.numel()
            self.spans.append(slice(start, end))
        length = math.ceil(end / world)
        self.part = slice(rank * length, (rank + 1) * length)
        like = members[0][1]
        unit = like.shape if rule.stacked else ()
        self.data = torch.zeros(length * world, *unit, device=like.device)
        self.grad = torch.zeros_like(self.data)
        views = zip(members, self.views(self.data), self.views(self.grad), strict=True)
        for (_, p), (_, data), (_, grad) in views:
            data.copy_(p.data)
            p.data = data
            # .data: torch.compile (2.13) fails at a parameter whose gradient it sees to be a view
            p.grad = grad.data
        self.p = self.data[self.part]
        self.g = self.grad[self.part]
        self.state = rule.new_state(self.p)  # {name: tensor}

    def views(self, whole: torch.Tensor):
        """(name, view) of each member in a tensor that is laid out like the buffer."""
        for (name, p), span in zip(self.members, self.spans, strict=True):
            view = whole[span]
            yield name, view[0] if self.rule.stacked else view.view(p.shape)


def rate_multiple(p: torch.Tensor) -> float:
    """The multiple of its rule's learning rate that a parameter has as its attribute lr; else 1."""
    return getattr(p, "lr", 1.0)


def members_of_buffers(rule, members: list) -> list[list]:
    """The parameters of each buffer, all with one multiple of the rate: matrices of one shape; or
    each large table by itself, and the rest together; or, for a separate rule, each by itself.
    """
    kinds: dict = {}
    for name, p in members:
        kind = "rest"
        if rule.stacked:
            kind = tuple(p.shape)
        elif rule.separate or p.numel() >= LARGE:
            kind = name
        kinds.setdefault((rate_multiple(p), kind), []).append((name, p))
    # the last first: their order decides how sums are rounded, and with it recorded runs' last bits
    return [same[::-1] for same in kinds.values()]


class Optimizer:
    """Owns the buffers, reduces the gradients, clips, updates, gathers.

    groups: (rule, [(name, parameter), …]), parameters in float32. They are moved into the buffers
    and get a `.grad` there, into which backward accumulates. Gradients are summed over ranks, so
    each rank's loss must already be divided by the whole step's tokens. clip: of the global
    gradient norm.
    """

    def __init__(self, groups: list, clip: float = 1.0, rank: int = 0, world: int = 1):
        self.clip = clip
        self.rank = rank
        self.world = world
        self.buffers = []
        for rule, group in groups:
            for members in members_of_buffers(rule, group):
                self.buffers.append(Buffer(rule, members, rank, world))
        self.steps = torch.zeros((), device=self.buffers[0].data.device)  # Adam's bias correction

    @torch.no_grad()
    def step(self, rates: Rates, sums: dict) -> dict:
        """One update. sums: this rank's sums over the step's batch, scalars on the device; "loss" is
        one of them.

        Returns their sums over the ranks, and "grad_norm2", the squared norm of the gradient before
        clipping, and "ok": 1, or 0 if that norm or the loss is not finite; then no rank has changed
        anything. All are scalars on the device, and nothing here waits for it.
        """
        if self.world > 1:
            self._reduce_gradients()
        squares = torch.stack([buffer.g.square().sum() for buffer in self.buffers])
        totals = torch.stack([squares.sum(), *sums.values()])
        if self.world > 1:
            dist.all_reduce(totals)
        norm2, *values = totals
        summed = dict(zip(sums, values, strict=True))
        finite = (norm2 + summed["loss"]).isfinite()
        ok = finite.float()
        self.steps += ok
        step = self.steps.clamp(min=1)
        clipped = (self.clip / (norm2.sqrt() + 1e-6)).clamp(max=1.0)
        scale = torch.where(finite, clipped, 0.0)
        gathers = []
        for buffer in self.buffers:
            buffer.g.mul_(scale).nan_to_num_(0.0, 0.0, 0.0)
            buffer.rule.apply(buffer, rates, step, ok)
            if self.world > 1:  # gathered while the next buffer is updated
                gathers.append(all_gather(buffer.data, buffer.p, async_op=True))
        for work in gathers:
            work.wait()
        self.zero_grad()
        return summed | {"grad_norm2": norm2, "ok": ok}

    def _reduce_gradients(self) -> None:
        """Sums each buffer's gradients over the ranks, each part in place on the rank that owns it."""
        sent = []
        for buffer in self.buffers:
            sent.append(reduce_scatter(buffer.g, buffer.grad, async_op=True))
        for work in sent:
            work.wait()

    def zero_grad(self) -> None:
        for buffer in self.buffers:
            buffer.grad.zero_()

    # -- state, by parameter name, so that no file belongs to a rank ------------------------------

    def state_dict(self) -> dict:
        """{"steps", state's name: {parameter's name: tensor}}, on rank 0's CPU; every rank calls
        it.
        """
        state = {"steps": self.steps.cpu().clone()}
        for buffer in self.buffers:
            for key, part in buffer.state.items():
                whole = part
                if self.world > 1:
                    whole = part.new_empty(part.size(0) * self.world, *part.shape[1:])
                    all_gather(whole, part)
                if self.rank == 0:
                    named = state.setdefault(key, {})
                    for name, view in buffer.views(whole):
                        named[name] = view.to("cpu", copy=True)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Takes this rank's part of an unsharded state; the number of ranks may differ from the one
        that wrote it.
        """
        self.steps.copy_(state["steps"])
        for buffer in self.buffers:
            for key, part in buffer.state.items():
                whole = torch.zeros(part.size(0) * self.world, *part.shape[1:])
                for name, view in buffer.views(whole):
                    view.copy_(state[key][name])
                part.copy_(whole[buffer.part])
